"""Sinkhorn momentum against Algorithm 1 written as a slow loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.optim.clip import clip_by_norm
from memjax.optim.sinkhorn_momentum import (
    scale_by_sinkhorn_momentum,
    sinkhorn_momentum,
)
from tests.oracles import sinkhorn_momentum as oracle


def sparse_gradients(n_steps: int = 6, seed: int = 0) -> list[np.ndarray]:
    """Most rows are not read in a step, some never."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n_steps):
        grad = rng.standard_normal((12, 4)) * (rng.random((12, 1)) < 0.4)
        grad[10:] = 0.0
        out.append(grad.astype(np.float32))
    return out


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_equals_algorithm_1(norm):
    grads = sparse_gradients()
    settings = {"beta": 0.8, "n_iterations": 5, "tau": 0.05, "eps": 1e-20}
    transform = scale_by_sinkhorn_momentum(**settings, norm=norm)
    state = transform.init(jnp.zeros((12, 4)))
    update = jax.jit(transform.update)
    for grad, (want, momentum) in zip(
        grads, oracle.steps(grads, **settings, norm=norm), strict=True
    ):
        got, state = update(jnp.asarray(grad), state)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.momentum, momentum, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(np.any(got, 1), want.any(1))


def test_defaults_are_the_published_ones():
    grads = sparse_gradients(2)
    transform = scale_by_sinkhorn_momentum()
    state = transform.init(jnp.zeros((12, 4)))
    for grad, (want, _) in zip(
        grads, oracle.steps(grads, 0.95, 11, 1e-3, 1e-20), strict=True
    ):
        got, state = transform.update(jnp.asarray(grad), state)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"beta": 0.5},
        {"n_iterations": 1},
        {"tau": 0.9},
        {"eps": 1.0},
        {"norm": "l1"},
        {"gamma": 0.5},
        {"learning_rate": 0.1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_argument_changes_the_update(change):
    def last(**arguments):
        transform = sinkhorn_momentum(**{"learning_rate": 1.0, **arguments})
        state = transform.init(jnp.zeros((12, 4)))
        for grad in sparse_gradients(3):
            updates, state = transform.update(jnp.asarray(grad), state)
        return np.asarray(updates)

    assert np.abs(last(**change) - last()).max() > 1e-3


def test_alias_moves_kept_rows_by_gamma_times_rate():
    transform = sinkhorn_momentum(lambda step: 0.5 / (1 + step), gamma=0.18)
    params = jnp.ones((12, 4))
    state = transform.init(params)
    for step, grad in enumerate(sparse_gradients(3)):
        updates, state = transform.update(jnp.asarray(grad), state)
        rms = np.sqrt(np.mean(np.square(updates), 1))
        assert rms.any()
        np.testing.assert_allclose(rms[rms > 0], 0.18 * 0.5 / (1 + step), rtol=1e-5)


def test_a_row_no_longer_read_moves_until_it_falls_to_the_threshold():
    transform = sinkhorn_momentum(1.0, beta=0.5, tau=0.1, n_iterations=3)
    grad = jnp.asarray(sparse_gradients(1)[0] * 0 + 1.0)
    state = transform.init(grad)
    _, state = transform.update(grad, state)
    moved = []
    for _ in range(6):
        updates, state = transform.update(grad.at[0].set(0.0), state)
        moved.append(bool(np.any(updates[0])))
    assert moved[0] and not moved[-1]
    assert moved == sorted(moved, reverse=True)


@pytest.mark.parametrize("clip", [None, 1.0, 0.0])
def test_zero_rows_columns_and_gradients(clip):
    """Gradient [[3, 4], [0, 0], [0, 5]]: row 1 is 0, the others as without it."""

    def update(grad):
        transform = scale_by_sinkhorn_momentum()
        if clip is not None:
            transform = optax.chain(clip_by_norm(clip), transform)
        grad = jnp.asarray(grad, jnp.float32)
        updates, state = transform.update(grad, transform.init(grad))
        for leaf in jax.tree.leaves((updates, state)):
            assert np.isfinite(leaf).all()
        return np.asarray(updates)

    got = update([[3, 4], [0, 0], [0, 5]])
    want = update([[3, 4], [0, 5]])
    np.testing.assert_array_equal(got[1], 0.0)
    np.testing.assert_allclose(got[[0, 2]], want, rtol=1e-6)
    np.testing.assert_array_equal(update([[3, 0], [4, 0]])[:, 1], 0.0)
    np.testing.assert_array_equal(update(np.zeros((3, 2))), 0.0)
    assert want.any() == (clip != 0.0)


def test_accumulator_dtype():
    params = jnp.zeros((4, 2), jnp.bfloat16)
    for dtype, want in ((None, jnp.bfloat16), ("float32", jnp.float32)):
        transform = scale_by_sinkhorn_momentum(accumulator_dtype=dtype)
        state = transform.init(params)
        updates, state = transform.update(params + 1, state)
        assert state.momentum.dtype == want
        assert updates.dtype == jnp.bfloat16


def test_masked_leaves_pass():
    transform = optax.masked(
        scale_by_sinkhorn_momentum(), {"table": True, "bias": False}
    )
    params = {"table": jnp.ones((4, 2)), "bias": jnp.ones(2)}
    updates, _ = transform.update(params, transform.init(params), params)
    np.testing.assert_array_equal(updates["bias"], 1.0)
    np.testing.assert_allclose(np.square(updates["table"]).mean(1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_other_ranks_are_refused_by_path(shape):
    transform = scale_by_sinkhorn_momentum()
    params = {"block": {"bias": jnp.ones(shape)}}
    with pytest.raises(ShapeError, match="'block/bias'"):
        transform.init(params)
    with pytest.raises(ShapeError, match="'block/bias'"):
        transform.update(params, transform.init({"x": jnp.ones((2, 2))}))


@pytest.mark.parametrize(
    "bad",
    [
        {"beta": 1.0},
        {"beta": -0.1},
        {"tau": -1.0},
        {"eps": float("nan")},
        {"gamma": -0.1},
        {"n_iterations": 4},
        {"norm": "max"},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_arguments_out_of_range(bad):
    name = next(iter(bad))
    with pytest.raises(ConfigError, match=f"sinkhorn_momentum.{name}"):
        sinkhorn_momentum(1.0, **bad)
