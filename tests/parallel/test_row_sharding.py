"""Divided tables: shapes, placing, reads, memory."""

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax.errors import ConfigError, DataError, ShapeError
from memjax.layers.row_grad import value_and_row_grad
from memjax.layers.table import READS, ValueTable
from memjax.ops.embedding_bag import embedding_bag, gather_rows
from memjax.ops.row_gradient import RowGradient, dense_gradient, unique_rows
from memjax.ops.rows import store
from memjax.parallel.division import Division
from memjax.parallel.logical_axes import BATCH_AXES
from memjax.parallel.mesh import MeshConfig, make_mesh
from memjax.parallel.row_sharding import RowSharding

pytestmark = pytest.mark.multidevice
WIDTH, N_TOKENS, N_READ = 8, 8, 3


def sharding_of(
    n_parts: int,
    by: str = "rows",
    n_data: int = 1,
    column_rows: tuple[int, ...] = (),
    **axes: int,
) -> RowSharding:
    config = MeshConfig(data=n_data, table=n_parts, **axes)
    n_devices = n_parts * n_data * math.prod(axes.values())
    mesh = make_mesh(config, jax.devices()[:n_devices])
    return RowSharding(mesh, by=by, column_rows=column_rows)


def case(n_rows: int) -> tuple[np.ndarray, ...]:
    """table, ids (the first token's are outside), weights, cotangent."""
    rng = np.random.default_rng(n_rows)
    ids = rng.integers(0, n_rows, (N_TOKENS, N_READ)).astype(np.int32)
    ids[0] = [n_rows, n_rows + 1, -1]
    return (
        rng.standard_normal((n_rows, WIDTH)).astype(np.float32),
        ids,
        rng.standard_normal(ids.shape).astype(np.float32),
        rng.standard_normal((N_TOKENS, WIDTH)).astype(np.float32),
    )


def reads(sharding: RowSharding | None, n_rows: int, *arrays: Any) -> tuple[Any, ...]:
    """Rows, bags, gradients of the weights, and the table's from unique rows."""

    @jax.jit
    def all_of(table: Any, ids: Any, weights: Any, cotangent: Any) -> tuple[Any, ...]:
        if sharding is None:
            rows, bag = gather_rows(table, ids), partial(embedding_bag, table, ids)
        else:
            rows = sharding.gather(table, ids, n_rows)
            bag = partial(sharding.bag, table, ids, n_rows=n_rows)
        bags, pull = jax.vjp(bag, weights)
        gradient = RowGradient(ids, weights, cotangent)

        def summed(table: Any, gradient: RowGradient) -> Any:
            split = {} if sharding is None else {"split": sharding.split(n_rows)}
            unique = unique_rows([gradient], *table.shape, **split)
            return dense_gradient(unique, len(table))

        if sharding is not None:
            spec = sharding.spec
            gradient = sharding.gradient(gradient)
            local = summed
            summed = jax.shard_map(
                lambda table, part: local(table, sharding.at_hand(part)),
                mesh=sharding.mesh,
                in_specs=(spec, P(BATCH_AXES)),
                out_specs=spec,
                check_vma=False,
            )
        return rows, bags, pull(cotangent)[0], summed(table, gradient)

    return all_of(*arrays)


@pytest.mark.parametrize("n_rows", [13, 4099])
@pytest.mark.parametrize(
    "n_parts, by, n_data",
    [
        (2, "rows", 1),
        (4, "rows", 2),
        (8, "rows", 1),
        (2, "columns", 2),
        (8, "columns", 1),
    ],
)
def test_reads_and_gradients_equal_those_of_one_device(
    n_rows: int, n_parts: int, by: str, n_data: int
) -> None:
    table, *rest = case(n_rows)
    sharding = sharding_of(n_parts, by, n_data)
    placed = sharding.place(table)
    got = reads(sharding, n_rows, placed, *rest)
    want = reads(None, n_rows, table, *rest)
    np.testing.assert_array_equal(got[0], want[0])
    for value, wanted in zip(got[1:3], want[1:3], strict=True):
        assert np.isnan(value[0]).all() and np.isfinite(value[1:]).all()
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[3][:n_rows], want[3])
    np.testing.assert_array_equal(got[3][n_rows:], 0.0)
    divided = NamedSharding(sharding.mesh, P(BATCH_AXES))
    for value in got[:3]:
        assert value.sharding.is_equivalent_to(divided, value.ndim)


COLUMN_ROWS = (5, 7, 11, 13)


@pytest.mark.parametrize(
    ("n_parts", "axes"), [(4, {"n_data": 2}), (2, {"fsdp": 2, "tensor": 2})]
)
def test_hash_columns(n_parts: int, axes: dict[str, int], optimized: None) -> None:
    """Every token reads a row of each column: values and gradients are those of one
    device bit by bit, ids outside their column's part are NaN and have no gradient, and
    nothing is summed over devices."""
    n_rows = sum(COLUMN_ROWS)
    starts = np.cumsum((0, *COLUMN_ROWS[:-1])).astype(np.int32)
    rng = np.random.default_rng(0)
    ids = (rng.integers(0, COLUMN_ROWS, (N_TOKENS, 3, 4)) + starts).astype(np.int32)
    ids[0, 0] = [-1, n_rows, n_rows + 5, starts[0]]  # the last: a row of column 0
    table = rng.standard_normal((n_rows, WIDTH)).astype(np.float32)
    cotangent = rng.standard_normal((*ids.shape, WIDTH)).astype(np.float32)
    sharding = sharding_of(n_parts, "hash_columns", column_rows=COLUMN_ROWS, **axes)
    placed = sharding.place(table)
    size = max(
        sum(COLUMN_ROWS[i : i + 4 // n_parts]) for i in (0, 1, 2, 3)[:: 4 // n_parts]
    )
    assert placed.shape == (n_parts * size, WIDTH)
    stored = sharding.division.joined(np.asarray(placed), n_rows)
    np.testing.assert_array_equal(stored, table)

    @jax.jit
    def read(table: Any, ids: Any) -> Any:
        return sharding.gather(table, ids, n_rows)

    program = read.lower(placed, ids).compile()
    np.testing.assert_array_equal(program(placed, ids)[0, 0], np.nan)
    ids[0, 0] = starts
    np.testing.assert_array_equal(program(placed, ids), table[ids])
    assert "all-to-all" in program.as_text()
    for word in ("all-reduce", "reduce-scatter"):
        assert word not in program.as_text()

    ids[0, 0] = [-1, n_rows, n_rows + 5, starts[0]]
    gradient = RowGradient(jnp.asarray(ids[..., None]), None, jnp.asarray(cotangent))

    def of_parts(table: Any, part: RowGradient) -> Any:
        rows = unique_rows(
            [sharding.at_hand(part)], *table.shape, split=sharding.split(n_rows)
        )
        return dense_gradient(rows, len(table))

    summed = jax.jit(
        jax.shard_map(
            of_parts,
            mesh=sharding.mesh,
            in_specs=(sharding.spec, P(BATCH_AXES)),
            out_specs=sharding.spec,
            check_vma=False,
        )
    )
    # In the last column stands a row of the first, which its owner never hears of.
    counted = ids.copy()
    counted[0, 0, 3] = -1
    whole = RowGradient(counted[..., None], None, cotangent)
    want = jax.jit(lambda g: dense_gradient(unique_rows([g], n_rows, WIDTH), n_rows))
    got = sharding.division.joined(np.asarray(summed(placed, gradient)), n_rows)
    np.testing.assert_array_equal(got, want(whole))


def test_only_tables_with_hash_columns_are_divided_by_them() -> None:
    mesh = sharding_of(2).mesh
    whole = RowSharding(mesh, "hash_columns", of_tables=(("a/table", COLUMN_ROWS),))
    assert whole.of("a/table").column_rows == COLUMN_ROWS
    assert whole.of("b/table") == RowSharding(mesh)
    with pytest.raises(ConfigError, match="n_parts = 4.*divisor of the 6 hash columns"):
        Division(4, "hash_columns", (3,) * 6)
    with pytest.raises(ConfigError, match=r"column_rows = \(\)"):
        RowSharding(mesh, "hash_columns")
    with pytest.raises(ConfigError, match="of_tables"):
        RowSharding(mesh, "rows", of_tables=whole.of_tables)
    with pytest.raises(ConfigError, match="column_rows.*37 rows together"):
        Division(2, "hash_columns", COLUMN_ROWS).bounds(37)


def test_a_bfloat16_table_and_a_batch_that_does_not_divide() -> None:
    table, ids, weights, _ = case(13)
    stored = store(jnp.asarray(table, jnp.bfloat16))
    sharding = sharding_of(4, n_data=2)
    placed = sharding.place(stored)
    assert placed.dtype == jnp.uint16
    odd = slice(1, N_TOKENS)
    rows = sharding.gather(placed, ids[odd, 0] % 13, 13)
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows, gather_rows(stored, ids[odd, 0]))
    bags = sharding.bag(placed, ids[odd], jnp.asarray(weights[odd]), 13)
    want = embedding_bag(stored, ids[odd], jnp.asarray(weights[odd]))
    np.testing.assert_allclose(bags, want, rtol=1e-5, atol=1e-6)


def test_mistakes_are_named() -> None:
    sharding = sharding_of(4)
    with pytest.raises(ConfigError, match="by = 'blocks'"):
        RowSharding(sharding.mesh, by="blocks")
    with pytest.raises(ConfigError, match="mesh = .*rows.*a mesh with the axes"):
        RowSharding(Mesh(np.array(jax.devices()[:2]), ("rows",)))
    with pytest.raises(ConfigError, match="row_width = 6 .* 4 parts"):
        sharding_of(4, "columns").shape(13, 6)
    placed = sharding.place(np.zeros((13, 2), np.float32))
    with pytest.raises(DataError, match="13 .* < 13"):
        sharding.gather(placed, np.array([13]), 13)
    with pytest.raises(ShapeError, match="weights"):
        sharding.bag(placed, jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 2)), 13)


def test_p19_thirteen_rows_on_four_devices() -> None:
    """They cannot be placed as they are; padded to 16, rows 0 to 12 read as on one
    device, 13, 14 and 15 are out of range, and a seed draws the same 13 rows on 1, 2
    and 4 devices."""
    table, *_ = case(13)
    sharding = sharding_of(4)
    with pytest.raises(ValueError, match="evenly divide"):
        jax.device_put(table, NamedSharding(sharding.mesh, sharding.spec))
    assert sharding.shape(13, WIDTH) == (16, WIDTH)
    placed = sharding.place(table)
    assert [s.data.shape for s in placed.addressable_shards] == [(4, WIDTH)] * 4
    rows = sharding.gather(placed, jnp.arange(16), 13)
    np.testing.assert_array_equal(rows[:13], table)
    assert np.isnan(rows[13:]).all()

    drawn = []
    for n_parts in (1, 2, 4):
        sharding = sharding_of(n_parts)
        module = ValueTable(13, WIDTH, mode="rows", sharding=sharding)
        place = NamedSharding(sharding.mesh, sharding.spec)
        init = jax.jit(
            lambda key, module=module: module.init(key, jnp.zeros(1, jnp.int32)),
            out_shardings={"tables": {"table": place}},
        )
        drawn.append(np.asarray(init(jax.random.key(3))["tables"]["table"]))
    assert [len(table) for table in drawn] == [13, 14, 16]
    assert np.abs(drawn[0]).min() > 0
    for table in drawn:
        np.testing.assert_array_equal(table[:13], drawn[0])
        np.testing.assert_array_equal(table[13:], 0.0)


class Reader(nn.Module):
    """Reads a table in both ways, with weights that are learned."""

    sharding: RowSharding | None

    @nn.compact
    def __call__(self, ids_NK: jax.Array) -> jax.Array:
        table = ValueTable(
            4096, 64, mode="rows", sharding=self.sharding, name="memory"
        ).handle()
        scale_K = self.param("scale", nn.initializers.ones, ids_NK.shape[-1:])
        weights_NK = jnp.broadcast_to(scale_K, ids_NK.shape)
        return table.bag(self, ids_NK, weights_NK) ** 2 + table.gather(
            self, ids_NK[:, 0]
        )


@pytest.fixture
def optimized() -> Any:
    """Programs compiled as users compile them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.parametrize("by", ["rows", "columns"])
def test_p20_the_table_stays_where_it_is(by: str, optimized: None) -> None:
    """4096 rows by 64 on 4 devices, 32 ids: values and gradients equal those of one
    device, only rows that were read have a gradient, and the compiled program's
    temporary memory stays below one part (262144 bytes)."""
    ids_NK = np.random.default_rng(0).integers(0, 4096, (16, 2)).astype(np.int32)

    def gradients(module: Reader, variables: Any, ids_NK: Any) -> Any:
        def loss(variables: Any) -> Any:
            read, state = module.apply(variables, ids_NK, mutable=[READS])
            return jnp.sum(jnp.sin(read)), (state, read)

        return value_and_row_grad(loss, has_aux=True)(variables)

    whole, divided = Reader(None), Reader(sharding_of(4, by))
    variables = whole.init(jax.random.key(0), ids_NK)
    want = jax.jit(partial(gradients, whole))(variables, ids_NK)
    table = divided.sharding.place(variables["tables"]["memory"]["table"])
    placed = {**variables, "tables": {"memory": {"table": table}}}

    read = jax.jit(divided.apply).lower(placed, ids_NK).compile()
    backward = jax.jit(partial(gradients, divided)).lower(placed, ids_NK).compile()
    for program in (read, backward):
        memory = program.memory_analysis()
        assert memory.argument_size_in_bytes < 262144 + 1024
        assert memory.temp_size_in_bytes < 262144 // 4
        for line in program.as_text().splitlines():
            assert "all-gather" not in line or "1024,64" not in line
            assert "4096,64" not in line

    got = backward(placed, ids_NK)
    np.testing.assert_allclose(got[0][1], want[0][1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        got[1].params["scale"], want[1].params["scale"], rtol=1e-5
    )
    dense = []
    for grads in (got, want):
        rows = unique_rows(jax.device_get(grads[1].tables["memory/table"]), 4096, 64)
        dense.append(dense_gradient(rows, 4096))
    np.testing.assert_allclose(*dense, rtol=1e-5, atol=1e-6)
    was_read = np.abs(dense[0]).max(axis=1) > 0
    np.testing.assert_array_equal(np.flatnonzero(was_read), np.unique(ids_NK))


def test_a_device_draws_its_own_hash_columns() -> None:
    """The values are those of one device, and no device draws the whole table."""
    column_rows, width = (997, 1009, 1013, 1019), 64
    n_rows = sum(column_rows)
    sharding = sharding_of(4, "hash_columns", column_rows=column_rows)
    normal = nn.initializers.normal(0.5)
    draw = jax.jit(
        lambda key: sharding.drawn(normal, key, n_rows, width, jnp.float32),
        out_shardings=NamedSharding(sharding.mesh, sharding.spec),
    )
    key = jax.random.key(5)
    memory = draw.lower(key).compile().memory_analysis()
    assert memory.temp_size_in_bytes < n_rows * width * 4
    stored = sharding.division.joined(np.asarray(draw(key)), n_rows)
    np.testing.assert_array_equal(stored, normal(key, (n_rows, width)))
