"""The optimizer of all tables: groups, clipping, parts, memory."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

from memjax.errors import ConfigError, ShapeError
from memjax.ops.row_gradient import RowGradient
from memjax.ops.rows import store
from memjax.optim.sinkhorn_rows import sinkhorn_rows
from memjax.optim.table_optimizer import rowwise
from memjax.optim.tables import TableGroup, apply_updates, table_optimizer
from memjax.parallel.row_sharding import Division, RowSharding
from tests.optim.divided_tables import (
    N_STEPS,
    WIDTH,
    first_table,
    go_on,
    mesh_of,
    optimizer_of,
    optimizers,
    sharding_of,
    start,
    train,
)

SGD = rowwise(optax.sgd(1.0))


def one_row(row: int, gradient: list[float]) -> tuple[RowGradient, ...]:
    """The gradient of a read of one row."""
    return (RowGradient(jnp.array([[row]]), None, jnp.array([gradient])),)


# Parts, how, and devices that share the batch.
LAYOUTS = [
    (13, 2, "rows", 1),
    (13, 4, "rows", 1),
    (13, 8, "rows", 1),
    (13, 4, "columns", 1),
    (4099, 4, "rows", 2),
    (4099, 8, "rows", 1),
    (4099, 8, "columns", 1),
]


@pytest.mark.multidevice
@pytest.mark.parametrize("n_rows, n_parts, by, n_data", LAYOUTS)
def test_p16_steps_of_a_divided_table_equal_those_of_the_whole(
    n_rows: int, n_parts: int, by: str, n_data: int
) -> None:
    """13 rows padded to 16 on 4 devices: the update of the real rows equals that of
    the whole table, of every optimizer; padding rows stay 0 and count in no norm."""
    whole, parts = train(n_rows, 1, "rows"), train(n_rows, n_parts, by, n_data)
    first = first_table(n_rows)
    for name in optimizers():
        table = np.asarray(parts.tables[name])
        assert np.abs(table[:n_rows] - first).max() > 0.01
        np.testing.assert_allclose(
            table[:n_rows], whole.tables[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
        np.testing.assert_array_equal(table[n_rows:], 0.0)
        np.testing.assert_allclose(
            parts.means[name][:n_rows], whole.means[name], rtol=1e-5, atol=1e-6
        )
    # The third step was a dense one; which rows then are active depends on the parts.
    metrics = [dict(run.metrics) for run in (parts, whole)]
    for found in metrics:
        n_dense = [found.pop(f"{why}_steps/sinkhorn") for why in ("overflow", "dense")]
        assert n_dense[0] >= 1 and sum(n_dense) <= N_STEPS - 2
        found.pop("active_rows/sinkhorn")
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


@pytest.mark.multidevice
def test_arrays_keep_their_shardings() -> None:
    """What a step returns lies as what it was given."""
    tables, state = start(13, 4, "rows")
    run = train(13, 4, "rows")
    for before, after in zip(
        jax.tree.leaves((tables, state)),
        jax.tree.leaves((run.tables, run.state)),
        strict=True,
    ):
        assert before.sharding.is_equivalent_to(after.sharding, before.ndim)
    assert run.tables["sgd"].addressable_shards[0].data.shape == (4, WIDTH)


CHANGES = [
    ((4, "rows"), (3, "rows")),
    ((4, "rows"), (1, "rows")),
    ((1, "rows"), (2, "rows")),
    ((4, "columns"), (2, "rows")),
    ((2, "rows"), (4, "columns")),
]


@pytest.mark.multidevice
@pytest.mark.parametrize("old, new", CHANGES)
def test_p19_training_goes_on_in_other_parts(old: Any, new: Any) -> None:
    """A checkpoint of a 13-row table goes on on 1, 2, 3 or 4 devices as if nothing had
    happened: from its arrays on the host, in their old shapes."""
    n_rows = 13
    before = train(n_rows, *old)
    host = jax.device_get((before.tables, before.state))
    optimizer, _ = optimizer_of(n_rows, *new)
    tables, state = optimizer.repartition(*host, Division(*old))

    fresh_tables, fresh_state = start(n_rows, *new)
    assert jax.tree.structure(state) == jax.tree.structure(fresh_state)
    for fresh, moved in zip(
        jax.tree.leaves((fresh_tables, fresh_state)),
        jax.tree.leaves((tables, state)),
        strict=True,
    ):
        assert (fresh.shape, fresh.dtype) == (moved.shape, moved.dtype)
        assert fresh.sharding.is_equivalent_to(moved.sharding, fresh.ndim)
    for name in optimizers():
        table = np.asarray(tables[name])
        np.testing.assert_array_equal(
            table[:n_rows], np.asarray(before.tables[name])[:n_rows]
        )
        np.testing.assert_array_equal(table[n_rows:], 0.0)

    more = range(N_STEPS, N_STEPS + 2)
    after = go_on(tables, state, n_rows, *new, more)
    whole = train(n_rows, 1, "rows")
    want = go_on(whole.tables, whole.state, n_rows, 1, "rows", more)
    for name in optimizers():
        for got, wanted in (
            (after.tables[name], want.tables[name]),
            (after.means[name], want.means[name]),
        ):
            np.testing.assert_allclose(
                got[:n_rows], wanted, rtol=1e-5, atol=2e-6, err_msg=name
            )
    counted = before.metrics["dense_steps/sinkhorn"]
    assert after.metrics["dense_steps/sinkhorn"] > counted


@pytest.mark.multidevice
def test_the_same_parts_change_nothing() -> None:
    before = train(13, 4, "rows")
    optimizer, _ = optimizer_of(13, 4, "rows")
    moved = optimizer.repartition(before.tables, before.state, Division(4, "rows"))
    for old, new in zip(
        jax.tree.leaves((before.tables, before.state)),
        jax.tree.leaves(moved),
        strict=True,
    ):
        np.testing.assert_array_equal(old, new)


def test_shapes_of_parts_need_no_devices() -> None:
    """The shapes of a checkpoint of 4096 devices, found on one machine."""
    axes = ("data", "fsdp", "table")
    mesh = AbstractMesh((1, 1, 4096), axes, axis_types=(AxisType.Auto,) * 3)
    optimizer = table_optimizer(
        rowwise(optax.adam(0.1)), sharding=RowSharding(mesh), n_rows={"t": 13}
    )
    shapes = jax.eval_shape(
        optimizer.init, {"t": jax.ShapeDtypeStruct((4096, 2), jnp.float32)}
    )
    assert shapes["t"].inner[0].mu.shape == (4096, 2)


def test_repartition_names_what_does_not_fit() -> None:
    table = {"t": jnp.zeros((16, 2))}
    optimizer = table_optimizer(SGD)
    state = optimizer.init(table)
    with pytest.raises(ConfigError, match="n_rows = None .* table t"):
        optimizer.repartition(table, state, Division(4, "rows"))
    optimizer = table_optimizer(SGD, n_rows={"t": 11})
    with pytest.raises(ShapeError, match=r"table t has shape \(16, 2\), .*\(12, 2\)"):
        optimizer.repartition(table, state, Division(4, "rows"))
    with pytest.raises(ConfigError, match="n_parts = 0"):
        Division(0)
    with pytest.raises(ConfigError, match="by = 'diagonal'"):
        Division(2, "diagonal")


def test_a_buffer_moves_on_at_the_cost_of_one_dense_step() -> None:
    optimizer = table_optimizer(
        sinkhorn_rows(0.1, capacity=2, momentum_dtype="bfloat16"), n_rows={"t": 4}
    )
    table = {"t": jnp.ones((4, 2))}
    state = optimizer.init(table)
    gradient = {"t": one_row(3, [1.0, 2.0])}
    tables, state, _ = jax.jit(optimizer.apply)(gradient, state, table)
    # As if its buffer had been that of another number of devices.
    other = table_optimizer(
        sinkhorn_rows(0.1, capacity=3, momentum_dtype="bfloat16"), n_rows={"t": 4}
    )
    _, moved = other.repartition(tables, state, Division())
    momentum = np.asarray(moved["t"].momentum_RW).view(jnp.bfloat16)
    np.testing.assert_allclose(momentum[3].astype(float), [0.05, 0.1], rtol=5e-3)
    assert moved["t"].active_AW.shape == (3, 2)
    np.testing.assert_array_equal(moved["t"].place_R, [-1, -1, -1, -2])
    state, step = jax.tree.map(jnp.asarray, moved), jax.jit(other.apply)
    for _ in range(3):
        tables, state, metrics = step(gradient, state, tables)
    assert (metrics["dense_steps/t"], metrics["overflow_steps/t"]) == (1, 0)


def test_the_norm_of_a_group_is_joint() -> None:
    tables = {"a": jnp.zeros((3, 2)), "b": jnp.zeros((3, 2)), "c": jnp.zeros((3, 2))}
    optimizer = table_optimizer(
        [TableGroup("[ab]", SGD, clip_norm=1.0), TableGroup("c", SGD)]
    )
    gradients = {
        "a": one_row(0, [3.0, 0.0]),
        "b": one_row(1, [0.0, 4.0]),
        "c": one_row(2, [6.0, 8.0]),
    }
    tables, _, metrics = optimizer.apply(gradients, optimizer.init(tables), tables)
    np.testing.assert_allclose(tables["a"], [[-0.6, 0], [0, 0], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(tables["b"], [[0, 0], [0, -0.8], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(tables["c"], [[0, 0], [0, 0], [-6, -8]], rtol=1e-6)
    # Norms as they were before they were clipped.
    norms = {f"grad_norm/{name}": n for name, n in (("a", 3), ("b", 4), ("c", 10))}
    assert {name: float(metrics[name]) for name in norms} == pytest.approx(norms)
    assert float(metrics["update_norm/a"]) == pytest.approx(0.6)


@pytest.mark.multidevice
def test_the_norm_of_a_group_is_over_all_parts() -> None:
    sharding = RowSharding(mesh_of(2))
    optimizer = table_optimizer(
        [TableGroup("", SGD, clip_norm=1.0)], sharding=sharding, n_rows={"t": 3}
    )
    tables = {"t": sharding.place(np.zeros((3, 2), np.float32))}
    gradients = {"t": one_row(0, [3.0, 0.0]) + one_row(2, [0.0, 4.0])}
    state = jax.jit(optimizer.init)(tables)
    tables, _, _ = jax.jit(optimizer.apply)(gradients, state, tables)
    want = [[-0.6, 0], [0, 0], [0, -0.8], [0, 0]]
    np.testing.assert_allclose(tables["t"], want, rtol=1e-6)


@pytest.mark.parametrize(
    "gradient, want",
    [([3.0, 4.0], [0.0, 0.0]), ([0.0, 0.0], [0.0, 0.0]), ([np.nan, 1.0], [np.nan] * 2)],
)
def test_a_limit_of_0_stops_and_nan_spreads(gradient: Any, want: Any) -> None:
    optimizer = table_optimizer([TableGroup("", SGD, clip_norm=0.0)])
    tables = {"t": jnp.zeros((2, 2))}
    tables, _, _ = optimizer.apply(
        {"t": one_row(1, gradient)}, optimizer.init(tables), tables
    )
    np.testing.assert_array_equal(tables["t"], [[0.0, 0.0], want])


def test_p14_frozen_tables_are_bit_equal() -> None:
    """a = 10 and b = 10, gradients 1 and 1, b frozen: b is bit-equal after 10 steps."""
    optimizer = table_optimizer(
        [TableGroup("b", None), TableGroup("a", rowwise(optax.sgd(0.1)))]
    )
    tables = {"a": jnp.full((1, 1), 10.0), "b": jnp.full((1, 1), 10.0)}
    state = optimizer.init(tables)
    gradients = dict.fromkeys(tables, one_row(0, [1.0]))
    for _ in range(10):
        tables, state, metrics = optimizer.apply(gradients, state, tables)
    np.testing.assert_array_equal(tables["b"], [[10.0]])
    np.testing.assert_allclose(tables["a"], [[9.0]], rtol=1e-6)
    assert set(state) == {"a"} and not [name for name in metrics if "/b" in name]
    np.testing.assert_array_equal(optimizer.mean(tables, state)["b"], [[10.0]])


@pytest.mark.parametrize(
    "groups, message",
    [
        ([TableGroup("own", SGD)], r"group of table shared/table = None .*'own'"),
        ([TableGroup("", SGD), TableGroup("far", SGD)], r"pattern = 'far' .*'own'"),
        ([TableGroup("", SGD), TableGroup("own", None)], r"pattern = 'own' "),
    ],
)
def test_p14_groups_and_tables_that_do_not_meet(groups: Any, message: str) -> None:
    """A path that no group matches, or a group that takes nothing, is an error."""
    tables = {"own": jnp.zeros((2, 2)), "shared": {"table": jnp.zeros((2, 2))}}
    optimizer = table_optimizer(groups)
    with pytest.raises(ConfigError, match=message):
        optimizer.init(tables)
    with pytest.raises(ConfigError, match=message):
        optimizer.apply({}, {}, tables)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=re.escape("pattern = '(' ")):
        TableGroup("(", SGD)
    for limit in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="clip_norm"):
            TableGroup("", SGD, limit)
    tables = {"t": jnp.zeros((2, 2))}
    optimizer = table_optimizer(SGD)
    with pytest.raises(ConfigError, match=r"gradients = \['u'\] .*'t'"):
        optimizer.apply({"u": one_row(0, [1.0, 1])}, optimizer.init(tables), tables)
    sharding = RowSharding(mesh_of(1))
    divided = table_optimizer(SGD, sharding=sharding, n_rows={"u": 2})
    with pytest.raises(ConfigError, match="rows of table t"):
        divided.init(tables)


def test_no_tables_and_tables_nobody_reads() -> None:
    optimizer = table_optimizer(SGD)
    assert optimizer.apply({}, optimizer.init({}), {}) == ({}, {}, {})
    optimizer, _ = optimizer_of(13, 1, "rows")
    tables, state = start(13, 1, "rows")
    new, _, metrics = jax.jit(optimizer.apply)({}, state, tables)
    for name in tables:
        np.testing.assert_array_equal(new[name], tables[name])
        assert float(metrics[f"grad_norm/{name}"]) == 0


def test_apply_updates_scales_row_gradients_alone() -> None:
    optimizer = table_optimizer(SGD)
    tables = {"t": store(jnp.zeros((2, 2), jnp.bfloat16))}
    params, tables, _, metrics = apply_updates(
        {"w": jnp.ones(3)},
        {"w": jnp.full(3, np.inf)},
        tables,
        {"t": one_row(1, [2.0, 4.0])},
        optimizer.init(tables),
        optimizer,
        scale=0.5,
    )
    np.testing.assert_array_equal(params["w"], [np.inf] * 3)
    assert tables["t"].dtype == jnp.uint16
    rows = np.asarray(tables["t"]).view(jnp.bfloat16).astype(float)
    np.testing.assert_array_equal(rows, [[0.0, 0.0], [-1.0, -2.0]])
    assert float(metrics["grad_norm/t"]) == pytest.approx(5**0.5)


# The bytes of the parts of tables that a step may hold beside its arguments, in parts:
# a dense step of Sinkhorn momentum needs the look-ahead and the move of every row.
@pytest.mark.multidevice
@pytest.mark.parametrize(
    "kind, by, n_held",
    [
        ("sgd", "none", 0),
        ("sgd", "columns", 0),
        ("adam", "rows", 0),
        ("sinkhorn_touched", "rows", 0),
        ("sinkhorn", "rows", 2),
    ],
)
def test_p20_tables_are_written_in_place(kind: str, by: str, n_held: int) -> None:
    """Of a table of 4096 rows by 64 on 4 devices no device holds more than its part
    (262144 bytes) and what the batch needs; also where the gradient of dense weights
    reads the table once more."""
    n_rows, width, n_parts = 4096, 64, 1 if by == "none" else 4
    sharding = sharding_of(n_parts, by)
    optimizer = table_optimizer(
        optimizers()[kind], sharding=sharding, n_rows={"t": n_rows}
    )
    table = jax.ShapeDtypeStruct((n_rows, width), jnp.float32)

    def step(weights_N: Any, table: Any, state: Any, ids_N: Any) -> Any:
        rows_NW = table.at[ids_N].get(mode="clip")
        gradient = RowGradient(ids_N[:, None], None, rows_NW)
        updates = -jnp.sum(table.at[ids_N[::-1]].get(mode="clip"), axis=1)
        return apply_updates(
            weights_N, updates, {"t": table}, {"t": (gradient,)}, state, optimizer
        )

    weights_N = jax.ShapeDtypeStruct((32,), jnp.float32)
    ids_N = jax.ShapeDtypeStruct((32,), jnp.int32)
    state = jax.eval_shape(optimizer.init, {"t": table})
    if sharding is not None:

        def place(leaf: Any) -> Any:
            spec = jax.NamedSharding(sharding.mesh, sharding.state_spec(leaf.ndim))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec)

        table, state = jax.tree.map(place, (table, state))
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        compiled = (
            jax.jit(step, donate_argnums=(1, 2))
            .lower(weights_N, table, state, ids_N)
            .compile()
        )
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    part = n_rows * width * 4 // n_parts
    assert compiled.memory_analysis().temp_size_in_bytes < (n_held + 0.5) * part
    for line in compiled.as_text().splitlines():
        assert "all-gather" not in line or "4096,64" not in line
