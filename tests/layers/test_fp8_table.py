"""Tables in mode "fp8": what is stored, what reads give, what has a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, DataError, ShapeError
from memjax.layers.row_grad import value_and_row_grad
from memjax.layers.table import READS, TABLES_FP8, ValueTable
from memjax.ops.fp8 import dequantize_rows, e4m3fn_values, e8m0_values, quantize_rows
from memjax.parallel.mesh import MeshConfig, make_mesh
from memjax.parallel.row_sharding import RowSharding

MODEL = ValueTable(6, 64, mode="fp8")
IDS = jnp.array([[0, 2, 2], [5, 4, 0]])
WEIGHTS = jnp.array([[1.0, 2, -0.5], [3, -3, 0]])


@pytest.fixture(scope="module")
def variables():
    return MODEL.init(jax.random.key(1), IDS)


@pytest.fixture(scope="module")
def values(variables):
    """The numbers of the table, by the definition, float64 [R, W]."""
    table = variables[TABLES_FP8]
    codes, scales = (np.asarray(table[f"table_{name}"]) for name in ("codes", "scales"))
    scales_RW = np.repeat(e8m0_values()[scales].astype(np.float64), 32, axis=1)
    return e4m3fn_values()[codes] * scales_RW


def test_two_arrays_of_bytes_in_a_collection_of_their_own(variables):
    kinds = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), variables)
    assert kinds == {
        "tables_fp8": {
            "table_codes": ((6, 64), "uint8"),
            "table_scales": ((6, 2), "uint8"),
        }
    }
    dense = ValueTable(6, 64).init(jax.random.key(1), IDS)["params"]["table"]
    codes, scales = quantize_rows(dense, 32)
    np.testing.assert_array_equal(variables[TABLES_FP8]["table_codes"], codes)
    np.testing.assert_array_equal(variables[TABLES_FP8]["table_scales"], scales)


def test_reads_are_those_of_the_definition(variables, values):
    rows = jax.jit(MODEL.apply)(variables, IDS)
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows, values[np.asarray(IDS)])
    np.testing.assert_array_equal(
        rows,
        dequantize_rows(
            *(variables[TABLES_FP8][f"table_{name}"] for name in ("codes", "scales")),
            IDS,
        ),
    )
    bags = MODEL.apply(variables, IDS, WEIGHTS)
    assert bags.dtype == jnp.float32
    want = np.einsum("nk,nkw->nw", WEIGHTS, values[np.asarray(IDS)])
    np.testing.assert_allclose(bags, want, rtol=1e-5, atol=1e-8)
    narrow = MODEL.apply(variables, IDS, WEIGHTS.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.float32
    np.testing.assert_array_equal(narrow, bags)
    none = MODEL.apply(variables, IDS[:, :0], WEIGHTS[:, :0])
    np.testing.assert_array_equal(none, np.zeros((2, 64)))


def test_a_bag_of_many_rows_is_their_sum(variables, values):
    """More rows than the loop takes at once."""
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 6, (3, 70)))
    weights = jnp.asarray(rng.normal(size=(3, 70)), jnp.float32)
    bags = jax.jit(MODEL.apply)(variables, ids, weights)
    want = np.einsum("nk,nkw->nw", weights, values[np.asarray(ids)])
    np.testing.assert_allclose(bags, want, atol=1e-6)


def test_weights_have_a_gradient_and_nothing_is_recorded(variables, values):
    def loss(weights):
        bags, state = MODEL.apply(variables, IDS, weights, mutable=[READS])
        assert READS not in state
        return jnp.sum(jnp.cos(jnp.arange(64)) * bags)

    got = jax.jit(jax.grad(loss))(WEIGHTS)
    want = values[np.asarray(IDS)] @ np.cos(np.arange(64))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)

    def row_loss(variables):
        bags, state = MODEL.apply(variables, IDS, WEIGHTS, mutable=[READS])
        return jnp.sum(bags), state

    _, grads = value_and_row_grad(row_loss)(variables)
    assert (grads.params, grads.tables) == ({}, {})


def test_p06_ids_outside_a_table(variables):
    """Ids of the host are checked; on the device they read NaN, not the last row."""
    with pytest.raises(DataError, match=r"id -1 .* < 6"):
        MODEL.apply(variables, np.array([-1]))
    rows = MODEL.apply(variables, jnp.array([6, -1, 5]))
    np.testing.assert_array_equal(np.isnan(rows[:, 0]), [True, True, False])
    bags = MODEL.apply(variables, jnp.array([[6, 0], [1, 0]]), jnp.zeros((2, 2)))
    np.testing.assert_array_equal(np.isnan(bags[:, 0]), [True, False])


def test_p07_a_table_of_98_billion_entries_is_legal():
    """384006168 rows by 256 columns; shapes alone are made."""
    model = ValueTable(384006168, 256, mode="fp8")
    shapes = jax.eval_shape(model.init, jax.random.key(0), IDS)
    assert shapes[TABLES_FP8]["table_scales"].shape == (384006168, 8)
    assert jax.eval_shape(model.apply, shapes, IDS).shape == (2, 3, 256)


def test_what_cannot_be_is_refused(variables):
    for width in (48, 31):
        with pytest.raises(ConfigError, match=f"width = {width} .* multiple of 32"):
            ValueTable(4, width, mode="fp8").init(jax.random.key(0), IDS)
    mesh = make_mesh(MeshConfig(data=1, table=1), jax.devices()[:1])
    divided = ValueTable(4, 32, mode="fp8", sharding=RowSharding(mesh))
    with pytest.raises(ConfigError, match="table_mode = 'fp8' .*'rows'"):
        divided.init(jax.random.key(0), IDS)
    table = variables[TABLES_FP8]
    for name, part in (("table_codes", (5, 64)), ("table_scales", (6, 1))):
        wrong = {TABLES_FP8: table | {name: jnp.zeros(part, jnp.uint8)}}
        with pytest.raises(ShapeError, match=f"table {name} has shape"):
            MODEL.apply(wrong, IDS)
    with pytest.raises(ShapeError, match="weights"):
        MODEL.apply(variables, IDS, WEIGHTS[:1])
