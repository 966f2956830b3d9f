"""Weights from scores: the order of the steps, the guards, the gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.read_weights import ACTIVATIONS, OVERS, SUBTRACTS, read_weights
from tests.oracles import product_keys as oracle

INF = np.inf
SCORES = np.array(
    [
        [[2.0, 1.5, 0.5, -1.0, -1.5], [0.5, -0.5, -2.0, -2.5, -4.0]],
        [[3.0, 1.0, -0.5, -INF, -INF], [1.0, -INF, -INF, -INF, -INF]],
        [[-INF] * 5, [0.75, 0.5, 0.25, -0.25, -INF]],
        [[-INF] * 5, [-INF] * 5],
        [[0.9, 0.9, 0.9, -INF, -INF], [-0.8] * 5],
    ],
    np.float32,
)
UPSTREAM = np.arange(SCORES.size, dtype=np.float32).reshape(SCORES.shape) / 7


@functools.cache
def compiled(**settings):
    """Weights, and the gradient of their sum weighted by UPSTREAM, in one program."""

    def run(scores):
        weights, pull = jax.vjp(lambda s: read_weights(s, **settings), scores)
        return weights, pull(UPSTREAM)[0]

    return jax.jit(run)


def settings_of(activation: str, subtract: str) -> list[dict]:
    overs = OVERS if activation == "softmax" else ("head",)
    common = dict(activation=activation, subtract=subtract, temperature=0.5)
    return [
        dict(over=over, normalize=normalize, **common)
        for over, normalize in itertools.product(overs, (False, True))
    ]


def slope(row: np.ndarray, at: tuple[int, int], upstream: np.ndarray, **settings):
    """Of the oracle's weighted sum of one token's weights, by a central difference."""
    around = np.repeat(row[None].astype(np.float64), 2, axis=0)
    around[:, *at] += [1e-5, -1e-5]
    high, low = (
        (oracle.read_weights(moved, **settings) * upstream).sum() for moved in around
    )
    return (high - low) / 2e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("subtract", SUBTRACTS)
def test_equals_the_slow_loop(activation, subtract) -> None:
    for settings in settings_of(activation, subtract):
        want = np.stack([oracle.read_weights(row, **settings) for row in SCORES])
        got, gradient = (np.asarray(x) for x in compiled(**settings)(SCORES))
        alike = settings["normalize"] and subtract != "none"
        rows = slice(4) if alike else slice(None)  # the oracle's mean of equals rounds
        np.testing.assert_allclose(got[rows], want[rows], rtol=2e-5, atol=1e-6)
        assert np.isfinite(gradient).all()
        for array in (got, gradient):
            np.testing.assert_array_equal(array[SCORES == -INF], 0)
        for t, h, k in np.argwhere(SCORES[:4] != -INF):  # ties have one-sided slopes
            want = slope(SCORES[t], (h, k), UPSTREAM[t], **settings)
            np.testing.assert_allclose(gradient[t, h, k], want, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("subtract", SUBTRACTS[1:])
def test_equal_scores_subtract_to_exactly_zero(subtract) -> None:
    """A mean must not leave a rounding error, which the norm would blow up to 1 / K."""
    for activation in ACTIVATIONS:
        for settings in settings_of(activation, subtract):
            got, gradient = compiled(**settings)(SCORES)
            np.testing.assert_array_equal(got[4], 0)
            if settings["normalize"]:
                np.testing.assert_array_equal(gradient[4], 0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_p04_nan_stays_nan(activation) -> None:
    scores = SCORES.copy()
    scores[0, 0] = np.nan
    for subtract in SUBTRACTS:
        for settings in settings_of(activation, subtract):
            got = np.asarray(compiled(**settings)(scores)[0])
            assert np.isnan(got[0, 0]).all(), settings
            joint = settings["over"] == "joint"
            assert np.isnan(got[0, 1]).all() == joint
            assert np.isfinite(got[1:]).all()


def test_eager_equals_jit() -> None:
    settings = settings_of("softmax", "median")[1]
    want, _ = compiled(**settings)(SCORES)
    np.testing.assert_allclose(read_weights(SCORES, **settings), want, rtol=1e-6)


@pytest.mark.parametrize("over", OVERS)
def test_p03_masked_softmax_and_its_gradient(over) -> None:
    """Logits [1, 1, 100] with mask [yes, yes, no]."""

    def first(logits):
        mask = jnp.array([[True, True, False]])
        weights = read_weights(jnp.where(mask, logits, -INF), over=over)
        return weights[0, 0], weights

    run = jax.jit(jax.grad(first, has_aux=True))
    gradient, weights = run(jnp.array([[1.0, 1.0, 100.0]]))
    np.testing.assert_allclose(weights, [[0.5, 0.5, 0]], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.25, -0.25, 0]], rtol=1e-6)


def test_the_median_of_an_even_count_is_the_lower_middle() -> None:
    scores = jnp.array([[4.0, 3.0, 1.0, 0.0]])
    median = functools.partial(read_weights, activation="none", subtract="median")
    np.testing.assert_array_equal(median(scores), [[3, 2, 0, -1]])
    gradient = jax.jit(jax.grad(lambda s: median(s).sum()))(scores)
    np.testing.assert_array_equal(gradient, [[1, 1, 1 - 4, 1]])


def test_softmax_per_head_differs_from_the_joint_one() -> None:
    scores = jnp.array([[1.0, 0.0], [3.0, 2.0]])
    np.testing.assert_allclose(read_weights(scores).sum(-1), 1, rtol=1e-6)
    joint = read_weights(scores, over="joint")
    np.testing.assert_allclose(joint.sum(), 1, rtol=1e-6)
    assert joint[1].sum() > 0.8


def test_slots_added_with_minus_infinity_change_nothing() -> None:
    settings = settings_of("softmax", "median")[1]
    longer, _ = compiled(**settings)(SCORES)
    shorter = read_weights(SCORES[1:2, :, :3], **settings)
    np.testing.assert_allclose(longer[1:2, :, :3], shorter, rtol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    np.testing.assert_array_equal(read_weights(jnp.array([[1e30, 0.0]])), [[1, 0]])
    np.testing.assert_array_equal(read_weights(jnp.array([[-1e30, -INF]])), [[1, 0]])


def test_low_precision_is_weighed_in_float32_and_float64_kept() -> None:
    low = jnp.asarray(SCORES[0], jnp.bfloat16)
    got = read_weights(low)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, read_weights(low.astype(jnp.float32)))
    with jax.enable_x64(True):
        wide = jnp.asarray(SCORES[0], jnp.float64)
        weights = read_weights(wide, subtract="mean", normalize=True)
        assert weights.dtype == jnp.float64


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(activation="gelu"), "activation = 'gelu' is not allowed: one of"),
        (dict(over="token"), "over = 'token'"),
        (dict(subtract="max"), "subtract = 'max'"),
        (dict(temperature=0.0), "temperature = 0.0 is not allowed: above 0"),
        (dict(temperature=-1.0), "temperature = -1.0"),
        (dict(temperature=INF), "temperature = inf"),
    ],
)
def test_settings_that_are_not_allowed(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read_weights(jnp.zeros((1, 2)), **settings)


def test_scores_without_heads_are_an_error() -> None:
    with pytest.raises(ShapeError, match=r"\[..., H, K\]"):
        read_weights(jnp.zeros((3,)))
