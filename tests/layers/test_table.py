"""Tables of Linen modules: declaration, reads, errors."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, DataError, ShapeError
from memjax.layers.table import MAX_ROWS, READS, TAPS, ValueTable, declare_table
from memjax.parallel.mesh import MeshConfig, make_mesh
from memjax.parallel.row_sharding import RowSharding

IDS = jnp.array([[0, 2], [4, 4]])


def test_both_modes_draw_and_read_the_same() -> None:
    found = []
    for mode in ("dense", "rows"):
        model = ValueTable(5, 3, mode=mode)
        variables = model.init(jax.random.key(1), IDS)
        (leaf,) = jax.tree.leaves(variables)
        assert list(variables) == [{"dense": "params", "rows": "tables"}[mode]]
        rows = model.apply(variables, IDS)
        bags = model.apply(variables, IDS, jnp.array([[1.0, 2], [3, -3]]))
        np.testing.assert_array_equal(rows, np.asarray(leaf)[np.asarray(IDS)])
        np.testing.assert_allclose(bags[0], leaf[0] + 2 * leaf[2], rtol=1e-6)
        np.testing.assert_array_equal(bags[1], 0.0)
        found.append((leaf, rows, bags))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert 0.005 < np.std(found[0][0]) < 0.05  # the default deviation is 0.02


def test_bfloat16_tables_are_stored_as_integers_in_mode_rows_alone() -> None:
    dense = ValueTable(5, 3, dtype=jnp.bfloat16)
    rows = ValueTable(5, 3, dtype=jnp.bfloat16, mode="rows")
    values = [model.init_with_output(jax.random.key(0), IDS) for model in (dense, rows)]
    assert values[0][1]["params"]["table"].dtype == jnp.bfloat16
    assert values[1][1]["tables"]["table"].dtype == jnp.uint16
    assert values[0][0].dtype == values[1][0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(values[0][0], values[1][0])


@pytest.mark.parametrize("mode", ["dense", "rows"])
def test_p07_a_table_of_98_billion_entries_is_legal(mode: str) -> None:
    """384006168 rows by 256 columns: rows fit in 32 bits; shapes alone are made."""
    model = ValueTable(384006168, 256, mode=mode)
    shapes = jax.eval_shape(model.init, jax.random.key(0), IDS)
    (table,) = jax.tree.leaves(shapes)
    assert table.shape == (384006168, 256)
    read = jax.eval_shape(model.apply, shapes, IDS)
    assert read.shape == (2, 2, 256)


@pytest.mark.parametrize("mode", ["dense", "rows"])
def test_p06_ids_outside_a_table(mode: str) -> None:
    """Ids of the host are checked; on the device they read NaN, not the last row."""
    model = ValueTable(4, 2, mode=mode)
    variables = model.init(jax.random.key(0), jnp.zeros(1, jnp.int32))
    for wrong in (10, -1, -9):
        with pytest.raises(DataError, match=rf"id {wrong} .* < 4"):
            model.apply(variables, np.array([wrong]))
    rows = model.apply(variables, jnp.array([10, -1, -9, 3]))
    np.testing.assert_array_equal(np.isnan(rows[:, 0]), [True, True, True, False])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"n_rows": 0}, "n_rows = 0 .*1 to 2147483646"),
        ({"n_rows": MAX_ROWS + 1}, "n_rows = 2147483647"),
        ({"width": 0}, "width = 0"),
        ({"mode": "lazy"}, "table_mode = 'lazy' .*'dense', 'rows'"),
    ],
)
def test_sizes_and_modes_are_checked(fields: Any, message: str) -> None:
    model = ValueTable(**{"n_rows": 4, "width": 2, **fields})
    with pytest.raises(ConfigError, match=message):
        model.init(jax.random.key(0), jnp.zeros(1, jnp.int32))


def test_a_dense_table_is_not_divided() -> None:
    mesh = make_mesh(MeshConfig(data=1, table=1), jax.devices()[:1])
    model = ValueTable(4, 2, sharding=RowSharding(mesh))
    with pytest.raises(ConfigError, match="table_mode = 'dense' .*'rows'"):
        model.init(jax.random.key(0), jnp.zeros(1, jnp.int32))


def test_tables_of_another_shape_or_dtype_are_refused() -> None:
    model = ValueTable(4, 2, mode="rows")
    with pytest.raises(ShapeError, match=r"table table has shape \(5, 2\), .*\(4, 2\)"):
        model.apply({"tables": {"table": jnp.zeros((5, 2))}}, IDS)
    with pytest.raises(ConfigError, match="dtype of table table .*float32"):
        model.apply({"tables": {"table": jnp.zeros((4, 2), jnp.uint16)}}, IDS)


class Pair(nn.Module):
    """Two tables of one owner, read by a child and by the owner."""

    def setup(self) -> None:
        init = nn.initializers.normal(1.0)
        self.a = declare_table(self, "a_table", 3, 2, init=init, mode="rows")
        self.b = declare_table(self, "b_table", 3, 2, init=init, mode="rows")

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.a.gather(self, ids) + self.b.gather(self, ids)


def test_reads_are_sown_when_asked_for_and_never_at_init() -> None:
    model, ids = Pair(), jnp.array([2, 0])
    variables = model.init(jax.random.key(0), ids)
    assert set(variables) == {"tables"} and set(variables["tables"]) == {
        "a_table",
        "b_table",
    }
    plain = model.apply(variables, ids)
    read, state = model.apply(variables, ids, mutable=[READS])
    np.testing.assert_array_equal(plain, read)
    assert set(state[READS]) == {"a_table", "b_table"}
    (sown,) = state[READS]["b_table"]
    np.testing.assert_array_equal(sown.ids, [[2], [0]])
    assert (sown.weights, sown.table, sown.tap.shape) == (None, "b_table", (2, 2))
    # Not even with everything mutable.
    _, state = model.apply(variables, ids, mutable=["tables"])
    assert READS not in state


def test_taps_without_mutable_reads_are_an_error() -> None:
    model, ids = Pair(), jnp.array([2, 0])
    variables = model.init(jax.random.key(0), ids)
    tap = (jnp.ones((2, 2)),)
    tapped = {**variables, TAPS: {"a_table": tap, "b_table": tap}}
    read, _ = model.apply(tapped, ids, mutable=[READS])
    np.testing.assert_allclose(read, model.apply(variables, ids) + 2, rtol=1e-6)
    with pytest.raises(ConfigError, match=r"mutable .*mutable=\['reads'\]"):
        model.apply(tapped, ids)


def test_rows_tables_have_no_gradient_of_their_own() -> None:
    """Whoever differentiates them by mistake finds zeros, not a table-sized sum."""
    model = ValueTable(4, 2, mode="rows")
    variables = model.init(jax.random.key(0), IDS)
    gradient = jax.grad(lambda v: model.apply(v, IDS).sum())(variables)
    np.testing.assert_array_equal(gradient["tables"]["table"], 0.0)
