"""The step: sums that add up, norms, types, compilation, sharding."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.errors import ConfigError, TrainingError
from memjax.optim.labels import group_norms
from memjax.parallel.mesh import global_batch, replicated
from memjax.train.state import Ema, TrainState, abstract_state, init_state
from memjax.train.step import make_train_step
from tests.train import toy

SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = {
    "bias": np.linspace(-1, 1, toy.V, dtype="f"),
    "table": np.sin(np.arange(toy.V**2, dtype="f")).reshape(toy.V, toy.V),
}


def start(transform, mesh, ema=None):
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=transform.init(params),
        ema=None if ema is None else ema.init(params),
        key=jax.random.key_data(jax.random.key(3)),
    )
    return jax.device_put(jax.tree.map(jnp.copy, state), replicated(mesh))


@functools.cache
def step_of(loss_fn, transform, n_devices, update_ema, **how):
    mesh = toy.toy_mesh(n_devices)
    return make_train_step(loss_fn, transform, mesh=mesh, update_ema=update_ema, **how)


def run_steps(
    n,
    *,
    n_devices=1,
    loss_fn=toy.quiet_loss_fn,
    batch=toy.make_batch,
    transform=SGD,
    ema=None,
    **how,
):
    mesh = toy.toy_mesh(n_devices)
    state = start(transform, mesh, ema)
    step = step_of(loss_fn, transform, n_devices, ema and ema.update, **how)
    for index in range(n):
        state, metrics = step(state, global_batch(mesh, batch(index)))
    return state, metrics, step


def test_metrics_are_what_a_loop_in_numpy_says():
    state, metrics, _ = run_steps(1, batch=lambda i: toy.make_batch(i + 5))
    batch = toy.make_batch(5)
    table, bias = PARAMS["table"].astype(np.float64), PARAMS["bias"]
    nats = weight = 0.0
    for token, target, w in zip(*(x.ravel() for x in batch.values()), strict=True):
        logits = table[token] + bias
        nats += w * (np.log(np.exp(logits).sum()) - logits[target])
        weight += w
    assert weight < batch["weights"].size
    assert metrics["weight"] == weight
    np.testing.assert_allclose(metrics["loss"], nats / weight, rtol=1e-6)
    bits = nats / weight / np.log(2)
    np.testing.assert_allclose(metrics["bits_per_token"], bits, rtol=1e-6)
    assert int(state.step) == 1 and bool(metrics["finite"])


def test_accumulation_equals_the_large_batch():
    whole, metrics, _ = run_steps(3)
    for how in ({}, {"n_devices": 2}):
        parts, parts_metrics, _ = run_steps(3, accumulate_steps=4, **how)
        chex.assert_trees_all_close(whole.params, parts.params, rtol=2e-5, atol=1e-6)
        chex.assert_trees_all_close(metrics, parts_metrics, rtol=1e-4)


def test_accumulation_must_divide_the_batch():
    with pytest.raises(ConfigError, match="accumulate_steps = 3.*8 rows"):
        run_steps(1, accumulate_steps=3)
    with pytest.raises(ConfigError, match="accumulate_steps = 4.*2 rows.*4 parts"):
        run_steps(1, accumulate_steps=4, n_devices=4)


@pytest.mark.multidevice
def test_eight_devices_equal_one():
    one, metrics, _ = run_steps(3, loss_fn=toy.loss_fn)
    eight, eight_metrics, _ = run_steps(3, loss_fn=toy.loss_fn, n_devices=8)
    chex.assert_trees_all_close(one.params, eight.params, rtol=2e-5, atol=1e-6)
    chex.assert_trees_all_close(metrics, eight_metrics, rtol=1e-4)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(eight))


def test_no_second_compile_and_types_stay():
    state, _, step = run_steps(3)
    assert step._cache_size() == 1
    chex.assert_trees_all_equal_shapes_and_dtypes(start(SGD, toy.toy_mesh()), state)


def test_the_whole_toy_compiles_once_from_its_own_init():
    mesh, transform = toy.toy_mesh(), toy.transform()
    state = init_state(toy.init_params, transform, mesh)
    abstract = abstract_state(toy.init_params, transform, mesh)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, state)
    assert state.step.dtype == jnp.int32
    step = make_train_step(toy.loss_fn, transform, mesh=mesh)
    for index in range(3):
        state, _ = step(state, global_batch(mesh, toy.make_batch(index)))
    assert step._cache_size() == 1
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, state)


def test_a_transform_that_drifts_is_named():
    drift = optax.GradientTransformation(
        lambda params: {"n": jnp.zeros((), jnp.int32)},
        lambda updates, state, params: (updates, {"n": state["n"] + 0.5}),
    )
    with pytest.raises(TrainingError, match="opt_state/n into float32.*int32"):
        run_steps(1, transform=drift)


def test_keys_differ_by_step_and_repeat_by_seed():
    def losses():
        mesh = toy.toy_mesh()
        batch = global_batch(mesh, toy.make_batch(0))
        state = start(SGD, mesh)
        step = step_of(toy.loss_fn, SGD, 1, None)
        for _ in range(2):
            state, metrics = step(state._replace(params=PARAMS), batch)
            yield float(metrics["loss"])

    first, second = losses()
    assert first != second
    assert [first, second] == list(losses())


def test_a_batch_without_weight_changes_nothing():
    def empty(index):
        batch = toy.make_batch(index)
        return {**batch, "weights": 0 * batch["weights"]}

    state, metrics, _ = run_steps(1, batch=empty)
    chex.assert_trees_all_equal(state.params, PARAMS)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["finite"]


def test_norms_by_group_add_up_and_extra_sums_become_means():
    def loss_fn(params, batch, key):
        nats, aux = toy.quiet_loss_fn(params, batch, key)
        return nats, {**aux, "twos": 2.0 * aux["weight"]}

    _, metrics, _ = run_steps(
        1,
        loss_fn=loss_fn,
        group_norms=lambda tree: group_norms(tree, toy.LABELS),
        accumulate_steps=2,
    )
    assert metrics["twos"] == 2.0
    for name in ("grad_norm", "update_norm"):
        parts = [metrics[f"{name}/{label}"] for label in ("matrix", "vector")]
        np.testing.assert_allclose(np.hypot(*parts), metrics[name], rtol=1e-6)


@pytest.mark.parametrize("bad", ["loss", "update"])
def test_what_is_not_finite_is_flagged(bad):
    if bad == "loss":
        batch = lambda i: {  # noqa: E731
            **toy.make_batch(i),
            "weights": np.full((8, 4), np.inf, np.float32),
        }
        _, metrics, _ = run_steps(1, batch=batch)
    else:
        _, metrics, _ = run_steps(1, transform=optax.sgd(np.inf))
        assert np.isfinite(metrics["loss"])
    assert not metrics["finite"]


def test_the_average_follows_the_parameters():
    ema = Ema(
        init=lambda params: {"bias": params["bias"]},
        update=lambda ema, params, step: {"bias": ema["bias"] + params["bias"] * step},
        merge=lambda ema, params: {**params, **ema},
    )
    before, _, _ = run_steps(1, ema=ema)
    after, _, _ = run_steps(2, ema=ema)
    np.testing.assert_array_equal(before.ema["bias"], PARAMS["bias"])
    expected = PARAMS["bias"] + after.params["bias"]
    np.testing.assert_allclose(after.ema["bias"], expected, rtol=1e-6)


def test_a_loss_without_weight_is_refused():
    with pytest.raises(TrainingError, match="'weight' is missing"):
        run_steps(1, loss_fn=lambda p, b, k: (jnp.sum(p["bias"]), {}))


def test_what_is_minimised_beside_the_nats_is_reported_apart():
    def with_penalty(params, batch, key):
        nats, sums = toy.quiet_loss_fn(params, batch, key)
        penalty = sums["weight"] * jnp.sum(params["bias"] ** 2)
        return nats + penalty, sums | {"nats": nats, "auxiliary_loss": penalty}

    plain, want, _ = run_steps(1)
    state, metrics, _ = run_steps(1, loss_fn=with_penalty)
    np.testing.assert_array_equal(metrics["loss"], want["loss"])
    squares = np.sum(PARAMS["bias"] ** 2)
    np.testing.assert_allclose(metrics["auxiliary_loss"], squares, rtol=1e-5)
    moved = plain.params["bias"] - state.params["bias"]
    np.testing.assert_allclose(moved, 0.1 * 2 * PARAMS["bias"], atol=1e-5)
