"""Product keys: slots that fit 32 bits, bounds on k, scores of the halves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from memjax.errors import ConfigError, ShapeError
from memjax.ops.product_keys import (
    check_selection,
    distance_scores,
    dot_scores,
    half_l2_normalize,
    slot_count,
)
from tests.oracles import product_keys as oracle

T, H, N, C = 3, 2, 4, 5


def queries_and_keys(seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((T, H, 2, C)).astype(np.float32)
    keys = rng.standard_normal((H, 2, N, C)).astype(np.float32)
    return jnp.asarray(q), jnp.asarray(keys)


def test_p07_more_slots_than_32_bit_integers_is_an_error() -> None:
    """46341 sub-keys per half is 2147488281 slots, more than 2**31 - 1; the error says
    that 46340 is the largest."""
    with pytest.raises(ConfigError, match=r"46341 .* 46340 "):
        slot_count(46341)
    assert slot_count(46340) == 2147395600


def test_a_grid_has_a_slot_for_every_pair() -> None:
    assert [slot_count(n) for n in (1, 2, 1024)] == [1, 4, 1048576]
    with pytest.raises(ConfigError, match="sub_keys = 0"):
        slot_count(0)


def test_p02_k_outside_the_slots_is_an_error_before_anything_is_compiled() -> None:
    for k in (5, 0, -1):
        with pytest.raises(ConfigError, match=f"^memories.k = {k} is .* 1 to 4"):
            check_selection(k, slot_count(2), "memories.k")
    for k in (1, 3, 4):
        check_selection(k, slot_count(2))


@pytest.mark.parametrize("score, eps", [(dot_scores, None), (distance_scores, 1e-3)])
def test_half_scores_equal_the_slow_loop(score, eps) -> None:
    q, keys = queries_and_keys()
    want = [oracle.half_scores(np.asarray(at), np.asarray(keys), eps) for at in q]
    np.testing.assert_allclose(score(q, keys), want, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(jax.jit(score)(q, keys), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("score", [dot_scores, distance_scores])
def test_gradients_of_half_scores_equal_finite_differences(score) -> None:
    """Second order too: fast weights differentiate through a gradient of the keys."""
    with jax.enable_x64(True):
        q, keys = (jnp.asarray(x, jnp.float64) for x in queries_and_keys())
        assert score(q, keys).dtype == jnp.float64
        # A nonlinear sum: the second derivatives of the scores alone leave no trace.
        total = jax.jit(lambda q, keys: jnp.sum(jnp.sin(score(q, keys))))
        check_grads(total, (q, keys), order=2, modes=["rev"], rtol=1e-4, atol=1e-4)


def test_distance_scores_on_a_key_have_a_finite_value_and_gradient() -> None:
    """Also in a corner far from 0, where |q|^2 + |k|^2 - 2 q.k has no digit left."""
    run = jax.jit(jax.value_and_grad(lambda q, keys: distance_scores(q, keys).sum()))
    for corner in (0.0, 1000.0):
        keys = np.full((1, 2, 1, C), corner, np.float32)
        q = keys[None, :, :, 0].copy()
        score, gradient = run(q, keys)
        np.testing.assert_allclose(score, -2 * np.log(1e-3), rtol=1e-6)
        np.testing.assert_array_equal(gradient, 0)
        keys[..., 0] += 0.125
        want = -2 * np.log(1e-3 + 0.125**2)
        np.testing.assert_allclose(run(q, keys)[0], want, rtol=1e-6)


@pytest.mark.parametrize("score", [dot_scores, distance_scores])
def test_low_precision_rounds_the_inputs_of_half_scores_only(score) -> None:
    q, keys = (x.astype(jnp.bfloat16) for x in queries_and_keys())
    got = score(q, keys)
    assert got.dtype == jnp.float32
    want = score(q.astype(jnp.float32), keys.astype(jnp.float32))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_flat_keys_are_one_half() -> None:
    q, keys = queries_and_keys()
    flat = dot_scores(q[:, :, :1], keys[:, :1])
    np.testing.assert_array_equal(flat, dot_scores(q, keys)[:, :, :1])


@pytest.mark.parametrize("score", [dot_scores, distance_scores])
def test_queries_that_do_not_fit_the_keys_are_an_error(score) -> None:
    q, keys = queries_and_keys()
    with pytest.raises(ShapeError, match=r"queries has shape .* \[..., 2, 2, 5\]"):
        score(q[..., :4], keys)
    with pytest.raises(ShapeError, match=r"keys has shape \(2, 4, 5\)"):
        score(q, keys[0])


def test_an_eps_that_is_not_positive_is_an_error() -> None:
    with pytest.raises(ConfigError, match="eps = 0.0"):
        distance_scores(*queries_and_keys(), eps=0.0)


def test_half_l2_normalize_is_the_unit_vector_of_each_half() -> None:
    q, _ = queries_and_keys()
    got = half_l2_normalize(q)
    wide = np.asarray(q, np.float64)
    want = wide / np.sqrt((wide**2).sum(-1, keepdims=True))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(half_l2_normalize(1e-6 * q), want, rtol=1e-5)
    assert half_l2_normalize(q.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    total = jax.jit(lambda q: jnp.sum(jnp.sin(half_l2_normalize(q))))
    check_grads(total, (q,), order=1, modes=["rev"], rtol=0.02)


def test_half_l2_normalize_of_zero_and_of_nan() -> None:
    q = jnp.array([[0.0, 0.0], [3.0, 4.0], [jnp.nan, 1.0]])
    np.testing.assert_allclose(
        half_l2_normalize(q), [[0, 0], [0.6, 0.8], [np.nan, np.nan]], rtol=1e-6
    )
    gradient = jax.jit(jax.grad(lambda q: half_l2_normalize(q)[:2, 0].sum()))(q)
    np.testing.assert_allclose(gradient[:2], [[0, 0], [0.128, -0.096]], atol=1e-6)
