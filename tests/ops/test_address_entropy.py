"""Usage entropy: a slow oracle, bounds, padding, and the way its gradient points."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.ops.address_entropy import address_entropy
from tests.oracles import address_entropy as oracle

entropy = jax.jit(address_entropy, static_argnums=1)


def scores(seed=0, n=5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, 4, 3, 2, n)).astype(np.float32)


REAL = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)


@pytest.mark.parametrize("k", [1, 3, 9])
def test_it_is_what_the_oracle_computes(k):
    s = scores()
    s[0, 0, 0, 0, :3] = 1.5  # ties with the last that is kept
    s[1, 0, 2, 1, 2:] = -np.inf
    want = oracle.address_entropy(s.reshape(8, 3, 2, 5), k, REAL.ravel())
    got = entropy(s, k, REAL)
    assert got == pytest.approx(want, rel=1e-5)
    assert address_entropy(jnp.asarray(s), k, jnp.asarray(REAL)) == pytest.approx(
        float(got), rel=1e-6
    )


def test_bounds_padding_and_heads():
    even = np.zeros((1, 2, 1, 2, 4), np.float32)
    real = np.ones((1, 2), bool)
    assert entropy(even, 4, real) == pytest.approx(2 * math.log(4), rel=1e-5)
    one = even.copy()
    one[..., 1] = 1000.0
    assert entropy(one, 4, real) == pytest.approx(0, abs=1e-6)
    assert entropy(even, 4, ~real) == 0
    s = scores()
    padded = s.copy()
    padded[~REAL] = 7 * np.random.default_rng(1).normal(size=(3, 3, 2, 5))
    assert entropy(padded, 2, REAL) == entropy(s, 2, REAL)
    # Two heads that each use one sub-key of their own use one each.
    heads = np.zeros((1, 1, 2, 2, 4), np.float32)
    heads[0, 0, 0, :, 0] = heads[0, 0, 1, :, 3] = 1000.0
    assert entropy(heads, 2, np.ones((1, 1), bool)) == pytest.approx(0, abs=1e-6)


def test_the_gradient_is_that_of_finite_differences_and_raises_the_entropy():
    s = scores()
    loss = functools.partial(address_entropy, k=3, real=jnp.asarray(REAL))
    gradient = jax.jit(jax.grad(loss))(s)
    rng = np.random.default_rng(3)
    for _ in range(3):
        way = rng.normal(size=s.shape).astype(np.float32)
        ends = [float(entropy(s + h * way, 3, REAL)) for h in (1e-3, -1e-3)]
        slope = (ends[0] - ends[1]) / 2e-3
        assert float(jnp.sum(gradient * way)) == pytest.approx(slope, abs=2e-3)
    assert entropy(s + 0.5 * gradient, 3, REAL) > entropy(s, 3, REAL)
    assert not np.asarray(gradient)[~REAL].any()


def test_bfloat16_scores_give_float32_and_nan_is_seen():
    s = jnp.asarray(scores(), jnp.bfloat16)
    got = entropy(s, 3, REAL)
    assert got.dtype == jnp.float32
    assert got == pytest.approx(float(entropy(s.astype(jnp.float32), 3, REAL)))
    assert np.isnan(entropy(s.at[0, 0, 0, 0, 0].set(jnp.nan), 3, REAL))
    assert np.isfinite(entropy(s.at[0, 3].set(jnp.nan), 3, REAL))
