"""Learning-rate schedules at the steps that matter."""

import jax
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.optim.rate import rate_schedule


def rates(kind, n_steps=20, **settings):
    rate = rate_schedule(kind, 2.0, n_steps, **settings)
    return np.array([rate(step) for step in range(n_steps + 5)])


def test_warm_up_is_linear_and_starts_above_zero():
    for kind in ("cosine", "wsd", "constant"):
        got = rates(kind, warmup_steps=4)
        np.testing.assert_allclose(got[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)


def test_cosine():
    got = rates("cosine", warmup_steps=4, end_frac=0.1)
    np.testing.assert_allclose(got[4], 2.0, rtol=1e-6)
    np.testing.assert_allclose(got[12], 2.0 * (0.1 + 0.9 * 0.5), rtol=1e-5)
    np.testing.assert_allclose(got[20:], 0.2, rtol=1e-5)
    assert (np.diff(got[4:21]) < 0).all()


def test_wsd():
    got = rates("wsd", warmup_steps=4, decay_frac=0.25, end_frac=0.5)
    np.testing.assert_allclose(got[4:16], 2.0, rtol=1e-6)
    np.testing.assert_allclose(got[15:21], [2, 1.8, 1.6, 1.4, 1.2, 1], rtol=1e-5)
    np.testing.assert_allclose(got[20:], 1.0, rtol=1e-6)


def test_constant():
    np.testing.assert_allclose(rates("constant"), 2.0)


def test_inside_jit_and_outside_agree():
    rate = rate_schedule("cosine", 2.0, 20, warmup_steps=4)
    jitted = jax.jit(rate)
    for step in (0, 4, 11, 20):
        np.testing.assert_allclose(jitted(step), rate(step), rtol=1e-5, atol=1e-7)
        assert rate(step).dtype == np.float32


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ConfigError, match="warmup_steps = 21"):
        rate_schedule("cosine", 1.0, 20, warmup_steps=21)
    with pytest.raises(ConfigError, match="warmup_steps = 11"):
        rate_schedule("wsd", 1.0, 20, warmup_steps=11, decay_frac=0.5)
    with pytest.raises(ConfigError, match="n_steps"):
        rate_schedule("constant", 1.0, 0)
    with pytest.raises(ConfigError, match="schedule"):
        rate_schedule("step", 1.0, 20)
