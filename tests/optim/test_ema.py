"""The running mean of dense weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from memjax.optim.ema import ema_params, init_ema, update_ema

LABELS = {"w": "matrix", "g": "vector", "e": "embedding", "t": "table", "f": "frozen"}


def params_of(value, dtype=jnp.float32):
    return {name: jnp.full((2, 2), value, dtype) for name in LABELS}


def test_mean_of_dense_weights_only():
    ema = init_ema(params_of(1.0), LABELS)
    assert {n for n in LABELS if isinstance(ema[n], optax.MaskedNode)} == {"t", "f"}
    update = jax.jit(update_ema)
    ema = update(ema, params_of(2.0), 0.75)
    ema = update(ema, params_of(4.0), 0.75)
    got = ema_params(ema, params_of(4.0))
    for name in ("w", "g", "e"):
        np.testing.assert_allclose(got[name], 0.75 * 1.25 + 0.25 * 4.0, rtol=1e-6)
    for name in ("t", "f"):
        np.testing.assert_array_equal(got[name], 4.0)
    assert update._cache_size() == 1


def test_a_step_lets_the_first_weights_fade():
    ema = init_ema(params_of(0.0), LABELS)
    early = update_ema(ema, params_of(1.0), 0.999, 0)
    np.testing.assert_allclose(early["w"], 0.9, rtol=1e-6)
    late = update_ema(ema, params_of(1.0), 0.999, 10**6)
    np.testing.assert_allclose(late["w"], 0.001, rtol=1e-4)


def test_bfloat16_is_averaged_in_float32():
    ema = init_ema(params_of(1.0, jnp.bfloat16), LABELS)
    for _ in range(4):
        ema = update_ema(ema, params_of(1.0078125, jnp.bfloat16), 0.999)
    assert ema["w"].dtype == jnp.float32
    assert (ema["w"] > 1.00002).all()
    assert ema_params(ema, params_of(1.0, jnp.bfloat16))["w"].dtype == jnp.bfloat16


def test_the_copy_outlives_donated_parameters():
    params = params_of(1.0)
    ema = init_ema(params, LABELS)
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params)
    np.testing.assert_array_equal(ema["w"], 1.0)
