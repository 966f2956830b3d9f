"""The optimizer built from settings: groups, decay, clipping, frozen parameters."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.optim.build import build_optimizer, schedules
from memjax.optim.config import OptimConfig, SinkhornConfig

LABELS = {
    "block": {"kernel": "matrix", "gain": "vector"},
    "embed": "embedding",
    "table": "table",
}
CONSTANT = OptimConfig(
    schedule="constant", clip_norm=None, sinkhorn=SinkhornConfig(n_iterations=3)
)


def toy_params():
    rng = np.random.default_rng(0)
    return {
        "block": {
            "kernel": jnp.asarray(rng.standard_normal((2, 4, 6)), jnp.float32),
            "gain": jnp.ones(4),
        },
        "embed": jnp.asarray(rng.standard_normal((8, 4)), jnp.float32),
        "table": jnp.asarray(rng.standard_normal((16, 4)), jnp.float32),
    }


def toy_gradients(params, seed=1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params
    )


def updates_of(config, labels=LABELS, params=None, n_steps=100, n_updates=2):
    params = toy_params() if params is None else params
    transform = build_optimizer(config, labels, n_steps)
    state = transform.init(params)
    for seed in range(n_updates):
        updates, state = transform.update(toy_gradients(params, seed), state, params)
    return updates


def changed(a, b):
    """Names of the leaves that differ."""
    differ = jax.tree.map(lambda x, y: bool(np.any(x != y)), a, b)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, value in jax.tree_util.tree_leaves_with_path(differ)
        if value
    }


DENSE = {"block/kernel", "block/gain", "embed"}
ADAM_TABLE = {"table_optimizer": "adam"}


CHANGES = [
    ({}, {"optimizer": "muon"}, {"block/kernel"}),
    ({}, {"learning_rate": 0.1}, DENSE),
    ({}, {"betas": (0.5, 0.95)}, DENSE),
    ({}, {"eps": 0.1}, DENSE),
    ({}, {"weight_decay": 0.5}, {"block/kernel"}),
    ({}, {"embedding_weight_decay": 0.5}, {"embed"}),
    ({"optimizer": "muon"}, {"muon_momentum": 0.5}, {"block/kernel"}),
    ({"optimizer": "muon"}, {"muon_rms": None}, {"block/kernel"}),
    ({"optimizer": "muon"}, {"weight_decay": 0.5}, {"block/kernel"}),
    ({"eps": 0.1}, {"clip_norm": 0.01}, DENSE),
    ({}, {"schedule": "cosine"}, DENSE | {"table"}),
    ({}, {"warmup_steps": 5}, DENSE | {"table"}),
    ({}, {"table_optimizer": "adam"}, {"table"}),
    ({}, {"table_optimizer": "adagrad"}, {"table"}),
    ({}, {"table_optimizer": "sgd"}, {"table"}),
    ({}, {"table_learning_rate": 0.5}, {"table"}),
    (ADAM_TABLE, {"table_betas": (0.5, 0.999)}, {"table"}),
    ({"table_optimizer": "sgd"}, {"table_clip_norm": 0.01}, {"table"}),
    ({}, {"embedding": "sinkhorn_momentum"}, {"embed"}),
    ({}, {"embedding_learning_rate": 0.5}, {"embed"}),
]
SINKHORN_CHANGES = {
    "beta": 0.5,
    "n_iterations": 1,
    "tau": 0.9,
    "eps": 1.0,
    "gamma": 0.5,
    "norm": "l1",
}


@pytest.mark.parametrize(
    "base, change, moved",
    CHANGES,
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_every_setting_moves_exactly_its_group(base, change, moved):
    config = replace(CONSTANT, **base)
    got = changed(updates_of(config), updates_of(replace(config, **change)))
    assert got == moved


@pytest.mark.parametrize("field", SINKHORN_CHANGES)
def test_every_sinkhorn_setting_reaches_tables_and_embedding(field):
    config = replace(CONSTANT, embedding="sinkhorn_momentum")
    settings = replace(config.sinkhorn, **{field: SINKHORN_CHANGES[field]})
    got = changed(updates_of(config), updates_of(replace(config, sinkhorn=settings)))
    assert got == {"embed", "table"}


def test_the_lists_of_settings_are_complete():
    assert {f.name for f in fields(SinkhornConfig)} == set(SINKHORN_CHANGES)
    changes = {name for _, change, _ in CHANGES for name in change}
    # The two that shape schedules and the sinkhorn settings have tests of their own
    # here, the others in test_ema.py, test_labels.py, test_run.py and
    # test_build_tables.py.
    elsewhere = {"end_frac", "decay_frac", "sinkhorn", "ema_decay", "label_rules"}
    elsewhere |= {"table_rules", "table_capacity", "table_ema_decay"}
    elsewhere |= {"table_stochastic_rounding"}
    assert {f.name for f in fields(OptimConfig)} == changes | elsewhere


@pytest.mark.parametrize("field", ["end_frac", "decay_frac"])
def test_schedule_shapes_reach_the_updates(field):
    config = replace(CONSTANT, schedule="wsd", end_frac=0.5, decay_frac=1.0)
    other = replace(config, **{field: 0.25})
    assert changed(updates_of(config), updates_of(other)) == DENSE | {"table"}


def test_only_labels_that_occur_get_a_group():
    labels = {"kernel": "matrix"}
    transform = build_optimizer(OptimConfig(), labels, 10)
    state = transform.init({"kernel": jnp.ones((2, 2))})
    groups = [list(part.inner_states) for part in state]
    assert groups == [["dense"], ["matrix"]]
    n_table_leaves = jax.tree.leaves(
        build_optimizer(CONSTANT, {"t": "table"}, 10).init({"t": jnp.ones((4, 2))})
    )
    assert [leaf.shape for leaf in n_table_leaves] == [(4, 2), ()]


def test_adamw_equals_optax():
    config = replace(CONSTANT, weight_decay=0.3)
    got = updates_of(config, n_updates=3)["block"]["kernel"]
    params = toy_params()
    plain = optax.adamw(3e-3, 0.9, 0.95, 1e-8, weight_decay=0.3)
    state = plain.init(params)
    for seed in range(3):
        updates, state = plain.update(toy_gradients(params, seed), state, params)
    np.testing.assert_allclose(got, updates["block"]["kernel"], rtol=1e-5)


def test_muon_treats_leading_axes_as_layers():
    config = replace(CONSTANT, optimizer="muon", weight_decay=0.0)
    params = {"kernel": toy_params()["block"]["kernel"]}
    got = updates_of(config, {"kernel": "matrix"}, params, n_updates=1)["kernel"]
    grads = toy_gradients(params, 0)["kernel"]
    for layer in range(2):
        transform = build_optimizer(config, {"kernel": "matrix"}, 100)
        one = {"kernel": params["kernel"][layer]}
        alone, _ = transform.update({"kernel": grads[layer]}, transform.init(one), one)
        np.testing.assert_allclose(got[layer], alone["kernel"], rtol=1e-3, atol=1e-7)
    # Rows of an orthogonal 4 x 6 matrix have norm 1: RMS 0.2 * sqrt(6) / sqrt(6).
    rms = np.sqrt(np.mean(np.square(got)))
    assert 0.7 * 0.2 * 3e-3 < rms < 1.3 * 0.2 * 3e-3


def test_clipping_is_per_group():
    """A huge table gradient leaves the dense updates alone, and the other way."""
    config = replace(
        CONSTANT, table_optimizer="sgd", clip_norm=1.0, table_clip_norm=1.0, eps=0.1
    )
    params = toy_params()
    grads = toy_gradients(params)
    transform = build_optimizer(config, LABELS, 100)

    def update(grads):
        return transform.update(grads, transform.init(params), params)[0]

    plain = update(grads)
    assert changed(plain, update({**grads, "table": 100 * grads["table"]})) <= {"table"}
    assert "table" not in changed(plain, update({**grads, "embed": grads["embed"] * 9}))
    np.testing.assert_allclose(
        np.linalg.norm(plain["table"]), config.table_learning_rate, rtol=1e-5
    )


@pytest.mark.parametrize("table_optimizer", ["sinkhorn_momentum", "adam", "sgd"])
def test_a_limit_of_zero_with_a_zero_gradient_is_not_nan(table_optimizer):
    config = replace(
        CONSTANT, clip_norm=0.0, table_clip_norm=0.0, table_optimizer=table_optimizer
    )
    params = toy_params()
    transform = build_optimizer(config, LABELS, 10)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = transform.update(zeros, transform.init(params), params)
    for leaf in jax.tree.leaves((updates, state)):
        assert np.isfinite(leaf).all()
    np.testing.assert_array_equal(updates["table"], 0.0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_parameters_are_bit_equal_after_ten_steps(optimizer):
    """a = b = 10, gradients 1, b frozen: b stays 10, decay and clipping included."""
    config = replace(
        CONSTANT,
        optimizer=optimizer,
        learning_rate=0.1,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    params = {"a": jnp.full((2, 2), 10.0), "b": jnp.full((2, 2), 10.0)}
    transform = build_optimizer(config, {"a": "matrix", "b": "frozen"}, 20)
    state = transform.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    start = params
    for _ in range(10):
        params, state = step(params, state)
    assert np.asarray(params["b"]).tobytes() == np.asarray(start["b"]).tobytes()
    assert (params["a"] < 10).all()


def test_frozen_gradients_count_in_no_norm():
    config = replace(CONSTANT, clip_norm=1.0, eps=0.1)
    labels = {"a": "vector", "b": "frozen"}
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    transform = build_optimizer(config, labels, 10)

    def update(frozen):
        grads = {"a": jnp.full(2, 0.1), "b": jnp.full(2, frozen)}
        return transform.update(grads, transform.init(params), params)[0]["a"]

    np.testing.assert_array_equal(update(0.0), update(1e6))


def test_rows_never_read_are_bit_equal_after_ten_steps():
    config = OptimConfig(clip_norm=None, weight_decay=0.1)
    params = {"table": toy_params()["table"].at[0, 0].set(-0.0)}
    transform = build_optimizer(config, {"table": "table"}, 20)
    state = transform.init(params)
    grads = jax.tree.map(lambda p: p.at[::2].set(0.0), toy_gradients(params))

    @jax.jit
    def step(params, state):
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    start = np.asarray(params["table"])
    for _ in range(10):
        params, state = step(params, state)
    end = np.asarray(params["table"])
    assert end[::2].tobytes() == start[::2].tobytes()
    assert (end[1::2] != start[1::2]).all()


def test_table_adam_is_dense():
    """A row with gradient 1, 0, 0 moves by -0.1000, -0.0670, -0.0518."""
    config = replace(CONSTANT, table_optimizer="adam", table_learning_rate=0.1)
    transform = build_optimizer(config, {"t": "table"}, 10)
    params = {"t": jnp.zeros((1, 1))}
    state = transform.init(params)
    moves = []
    for grad in (1.0, 0.0, 0.0):
        updates, state = transform.update({"t": jnp.full((1, 1), grad)}, state, params)
        moves.append(float(updates["t"][0, 0]))
    np.testing.assert_allclose(moves, [-0.1, -0.0670, -0.0518], atol=5e-5)


def test_adagrad_ignores_the_scale_of_the_gradient():
    config = replace(CONSTANT, table_optimizer="adagrad", eps=1e-12)
    transform = build_optimizer(config, {"t": "table"}, 10)
    params = {"t": jnp.zeros((2, 1))}
    grads = {"t": jnp.array([[1e-6], [1.0]])}
    updates, state = transform.update(grads, transform.init(params), params)
    np.testing.assert_allclose(updates["t"], -0.02, rtol=1e-4)
    updates, _ = transform.update(grads, state, params)
    np.testing.assert_allclose(updates["t"], -0.02 / np.sqrt(2), rtol=1e-4)


def test_schedules_are_the_rates_applied():
    config = replace(
        OptimConfig(), learning_rate=0.3, table_learning_rate=0.7, warmup_steps=4
    )
    rates = schedules(config, 40)
    assert set(rates) == {"dense", "embedding", "table"}
    assert rates["dense"](3) == np.float32(0.3)
    assert rates["embedding"](3) == np.float32(0.3)
    assert rates["table"](3) == np.float32(0.7)
    shared = replace(config, embedding="sinkhorn_momentum")
    assert schedules(shared, 40)["embedding"](3) == np.float32(0.7)
    own = replace(shared, embedding_learning_rate=0.1)
    assert schedules(own, 40)["embedding"](3) == np.float32(0.1)


def test_unknown_labels_and_wrong_ranks_are_errors():
    with pytest.raises(ConfigError, match="label of block/kernel = 'matrx'"):
        build_optimizer(OptimConfig(), {"block": {"kernel": "matrx"}}, 10)
    transform = build_optimizer(OptimConfig(), {"t": "table"}, 10)
    with pytest.raises(ShapeError, match="'t'"):
        transform.init({"t": jnp.ones((2, 3, 4))})
    muon = build_optimizer(OptimConfig(optimizer="muon"), {"v": "matrix"}, 10)
    with pytest.raises(ShapeError, match="'v'"):
        muon.init({"v": jnp.ones(3)})
