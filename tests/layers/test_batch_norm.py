"""Batch norm over real positions only: P05 to the digit, laws, an oracle, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.layers.batch_norm import BATCH_STATS, MaskedBatchNorm

NORM = MaskedBatchNorm()
SHAPE = (2, 3)
PARAMS = {
    "scale": jnp.linspace(0.5, 1.5, 6).reshape(SHAPE),
    "bias": jnp.linspace(-1.0, 1.0, 6).reshape(SHAPE),
}
STATS = {
    "mean": jnp.linspace(-0.3, 0.4, 6).reshape(SHAPE),
    "var": jnp.linspace(0.6, 2.0, 6).reshape(SHAPE),
}


@jax.jit
def trained(x, mask, params=PARAMS, stats=STATS):
    """(output, running averages) of one training call."""
    variables = {"params": params, BATCH_STATS: stats}
    out, state = NORM.apply(variables, x, mask, train=True, mutable=[BATCH_STATS])
    return out, state[BATCH_STATS]


def oracle(x, mask):
    """The same in float64, one feature at a time."""
    x = np.asarray(x, np.float64)
    out = np.empty_like(x)
    stats = {name: np.array(value, np.float64) for name, value in STATS.items()}
    for f in np.ndindex(SHAPE):
        real = [x[(*p, *f)] for p in np.ndindex(mask.shape) if mask[p]]
        n, mean = len(real), sum(real) / len(real)
        var = sum((value - mean) ** 2 for value in real) / n
        scale, bias = float(PARAMS["scale"][f]), float(PARAMS["bias"][f])
        for p in np.ndindex(mask.shape):
            out[(*p, *f)] = (x[(*p, *f)] - mean) / (var + 1e-5) ** 0.5 * scale + bias
        stats["mean"][f] = 0.9 * stats["mean"][f] + 0.1 * mean
        stats["var"][f] = 0.9 * stats["var"][f] + 0.1 * var * n / (n - 1)
    return out, stats


@pytest.fixture(scope="module")
def batch():
    x = 3 + 2 * jax.random.normal(jax.random.key(0), (2, 4, *SHAPE))
    mask = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    return x, mask


def test_training_equals_the_oracle_and_its_jit(batch):
    out, stats = trained(*batch)
    want, want_stats = oracle(*map(np.asarray, batch))
    np.testing.assert_allclose(out, want, atol=2e-6)
    for name in stats:
        np.testing.assert_allclose(stats[name], want_stats[name], atol=1e-6)
    with jax.disable_jit():
        again, _ = trained(*batch)
    np.testing.assert_allclose(again, out, atol=1e-6)


def test_evaluation_uses_the_running_averages_and_keeps_them(batch):
    x, mask = batch
    variables = {"params": PARAMS, BATCH_STATS: STATS}
    out, state = NORM.apply(variables, x, mask, train=False, mutable=[BATCH_STATS])
    want = (x - STATS["mean"]) / np.sqrt(STATS["var"] + 1e-5)
    np.testing.assert_allclose(out, want * PARAMS["scale"] + PARAMS["bias"], atol=1e-6)
    np.testing.assert_array_equal(state[BATCH_STATS]["var"], STATS["var"])
    np.testing.assert_array_equal(state[BATCH_STATS]["mean"], STATS["mean"])
    # Training with the collection not mutable gives the output and moves nothing.
    frozen = NORM.apply(variables, x, mask, train=True)
    np.testing.assert_allclose(frozen, trained(x, mask)[0], atol=1e-6)


def test_the_issues_example_two_real_values_and_two_of_padding():
    """P05: 1 and 3 and two zeros that are padding: mean 2, variance 1."""
    x = jnp.array([1.0, 3.0, 0.0, 0.0]).reshape(4, 1)
    mask = jnp.array([True, True, False, False])
    stats = {"mean": jnp.zeros(1), "var": jnp.zeros(1)}
    params = {"scale": jnp.ones(1), "bias": jnp.zeros(1)}
    out, after = trained(x, mask, params, stats)
    np.testing.assert_allclose(after["mean"], 0.1 * 2.0, atol=1e-7)
    np.testing.assert_allclose(after["var"], 0.1 * 1.0 * 2 / 1, atol=1e-7)
    np.testing.assert_allclose(out[:2, 0], [-1, 1], atol=1e-5)
    doubled = jnp.concatenate([x, jnp.zeros((4, 1))])
    more, later = trained(doubled, jnp.arange(8) < 2, params, stats)
    np.testing.assert_allclose(more[:2], out[:2], atol=1e-6)
    np.testing.assert_allclose(later["mean"], after["mean"], atol=1e-7)
    np.testing.assert_allclose(later["var"], after["var"], atol=1e-7)


def test_what_stands_at_padding_does_not_matter(batch):
    x, mask = batch
    out, stats = trained(x, mask)
    spoiled = jnp.where(mask[..., None, None], x, jnp.nan)
    other, after = trained(spoiled, mask)
    np.testing.assert_array_equal(out[mask], other[mask])
    np.testing.assert_array_equal(stats["var"], after["var"])
    grad = jax.grad(lambda x: jnp.sum(trained(x, mask)[0][0, 0] ** 2))(x)
    np.testing.assert_array_equal(grad[~mask], 0)


def test_padding_alone_and_a_single_position(batch):
    x, mask = batch
    out, stats = trained(x, jnp.zeros_like(mask))
    assert np.isfinite(out).all()
    for name in stats:
        np.testing.assert_array_equal(stats[name], STATS[name])
    one = jnp.zeros_like(mask).at[0, 0].set(True)
    out, stats = trained(x, one)
    np.testing.assert_allclose(out[0, 0], PARAMS["bias"], atol=1e-6)
    np.testing.assert_array_equal(stats["var"], STATS["var"])
    np.testing.assert_allclose(
        stats["mean"], 0.9 * STATS["mean"] + 0.1 * x[0, 0], atol=1e-6
    )


def test_gradient_against_finite_differences(batch):
    x, mask = batch
    cotangent = jax.random.normal(jax.random.key(1), x.shape) * mask[..., None, None]
    cotangent = np.asarray(cotangent, np.float64)
    grad = jax.grad(lambda x: jnp.sum(trained(x, mask)[0] * cotangent))(x)
    direction = np.random.default_rng(0).normal(size=x.shape)
    ahead, behind = (
        (oracle(np.asarray(x, np.float64) + h * direction, mask)[0] * cotangent).sum()
        for h in (1e-5, -1e-5)
    )
    slope = (ahead - behind) / 2e-5
    assert abs(float(np.sum(grad * direction)) - slope) < 1e-4 * abs(slope)


def test_far_from_zero_the_variance_is_not_lost(batch):
    x, mask = batch
    np.testing.assert_allclose(
        trained(x + 4096, mask)[0][mask], trained(x, mask)[0][mask], atol=2e-3
    )


def test_bfloat16_gives_float32_and_initialising_moves_nothing(batch):
    x, mask = batch
    out, stats = trained(x.astype(jnp.bfloat16), mask)
    assert out.dtype == jnp.float32 and stats["mean"].dtype == jnp.float32
    start = NORM.init(jax.random.key(0), x, mask, train=True)
    np.testing.assert_array_equal(start[BATCH_STATS]["mean"], 0)
    np.testing.assert_array_equal(start[BATCH_STATS]["var"], 1)
    assert start["params"]["scale"].shape == SHAPE
