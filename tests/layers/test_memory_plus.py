"""Memory+: every form and option against a slow oracle, its laws, its errors."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.layers.memory import own_tables
from memjax.layers.memory_plus import MemoryPlus, MemoryPlusConfig
from memjax.layers.row_grad import value_and_row_grad
from memjax.layers.table import READS, TABLES
from memjax.ops.row_gradient import dense_gradient, unique_rows
from memjax.ops.rows import store
from tests.layers.memory_calls import (
    BFLOAT16,
    FLOAT32,
    as_float64,
    call,
    inputs_of,
    own_fields,
    shaken,
    shapes,
    start,
    stream,
)
from tests.oracles import memory_reads as oracle

BASE = MemoryPlusConfig(layers=(0,), n_sub_keys=4, key_width=6, n_heads=2, k=3)
CHANGES = {
    "n_sub_keys": 5,
    "key_width": 4,
    "n_heads": 1,
    "k": 2,
    "value_width": 5,
    "form": "plain",
    "gate": "sigmoid",
    "query_bias": False,
    "query_norm": "query",
    "input_dropout": 0.5,
    "query_dropout": 0.5,
    "value_dropout": 0.5,
    "value_std": 0.1,
}


def layer(dtypes=FLOAT32, **changes):
    return MemoryPlus(dataclasses.replace(BASE, **changes), dtypes)


@pytest.fixture(scope="module")
def base():
    """Input, initial variables, output and records of the unchanged layer."""
    x_BTD = stream()
    variables = start(layer(), x_BTD)
    return x_BTD, variables, *call(layer(), variables, x_BTD)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"form": "plain", "gate": "sigmoid", "k": 9, "query_bias": False},
        {"form": "plain", "value_width": 5, "query_norm": "query", "n_heads": 1},
        {"value_width": 4, "query_norm": "query_key"},
        {"form": "experts", "k": 16},
    ],
    ids=str,
)
def test_each_form_is_what_the_oracle_computes(changes):
    module, x_BTD = layer(**changes), stream()
    variables = shaken(start(module, x_BTD))
    out, _ = call(module, variables, x_BTD)
    params, x = as_float64(variables["params"]), as_float64(x_BTD)
    for b, t in np.ndindex(out.shape[:2]):
        want = oracle.memory_plus(params, module.config, x[b, t])
        np.testing.assert_allclose(out[b, t], want, rtol=2e-4, atol=2e-5)


def test_every_option_has_a_case_here():
    assert set(CHANGES) == own_fields(MemoryPlusConfig)


@pytest.mark.parametrize("field", CHANGES)
def test_every_option_changes_parameters_or_output(field, base):
    x_BTD, variables, out, _ = base
    changed = layer(**{field: CHANGES[field]})
    if shapes(changed) != shapes(layer()):
        return
    if field == "value_std":
        table = start(changed, x_BTD)["params"]["table"]
        assert 0.07 < np.std(table) < 0.13
        return
    other, _ = call(changed, variables, x_BTD, train=True)
    assert np.abs(out - other).max() > 1e-3
    if field.endswith("dropout"):
        np.testing.assert_array_equal(out, call(changed, variables, x_BTD)[0])


def test_tables_and_projections_start_as_documented():
    module = MemoryPlus(
        dataclasses.replace(BASE, n_sub_keys=30, key_width=64), FLOAT32, out_width=9
    )
    params = start(module, stream())["params"]
    assert params["table"].shape == (900, 9)
    assert np.std(params["table"]) == pytest.approx(9**-0.5, rel=0.05)
    assert np.abs(params["keys"]).max() == pytest.approx(64**-0.5, rel=0.01)
    bound = (6 / (6 + 128)) ** 0.5
    assert np.abs(params["query"]["kernel"]).max() == pytest.approx(bound, rel=0.02)
    for name in ("value", "swilu"):
        assert np.std(params[name]["kernel"]) == pytest.approx(1 / 3, rel=0.25)
        assert not params[name]["bias"].any()


def test_normalised_queries_and_keys_have_no_length():
    x_BTD = stream()
    module = layer(query_norm="query_key", query_bias=False)
    variables = start(module, x_BTD)
    params = variables["params"]
    longer = {**params, "keys": 3 * params["keys"]}
    longer["query"] = {"kernel": 2 * params["query"]["kernel"]}
    out, records = call(module, variables, x_BTD)
    other, _ = call(module, {"params": longer}, x_BTD)
    np.testing.assert_allclose(out, other, rtol=1e-4, atol=1e-6)
    gain = {"scale": jnp.zeros_like(params["query_norm"]["scale"])}
    _, equal = call(module, {"params": {**params, "query_norm": gain}}, x_BTD)
    np.testing.assert_allclose(equal["weights"], 1 / 3, rtol=1e-6)
    assert np.std(records["weights"]) > 0.01


def test_a_token_reads_for_itself_and_dropping_leaves_nothing(base):
    x_BTD, variables, out, records = base
    other, _ = call(layer(), variables, x_BTD.at[0, 1].add(1.0))
    differs = np.argwhere(np.any(np.asarray(out != other), axis=-1))
    assert differs.tolist() == [[0, 1]]
    dropped, _ = call(layer(), variables, x_BTD, drop=True)
    assert not dropped.any()
    assert records["slots"].shape == records["weights"].shape == (2, 3, 2, 3)
    np.testing.assert_allclose(records["weights"].sum(-1), 1, rtol=1e-6)


def test_p04_nan_stays_in_its_token_and_is_counted_at_real_positions(base):
    x_BTD, variables, clean, records = base
    assert records["non_finite_scores"] == 0
    spoilt_BTD = x_BTD.at[0, 1, 2].set(jnp.nan).at[1, 2, 0].set(jnp.nan)
    out, records = call(layer(), variables, spoilt_BTD, n_padding=1)
    bad = np.isnan(np.asarray(out))
    assert bad[0, 1].all() and bad[1, 2].all() and bad.sum() == 2 * out.shape[-1]
    np.testing.assert_array_equal(out[~bad], clean[~bad])
    assert records["non_finite_scores"] == 2, "two heads of the one real token"


@pytest.mark.parametrize("form", ["swilu", "experts"])
def test_bfloat16_reads_near_float32(form):
    x_BTD = stream()
    module = layer(form=form, table_mode="rows")
    variables = start(module, x_BTD)
    narrow = layer(BFLOAT16, form=form, table_mode="rows")
    tables = jax.tree.map(lambda t: store(t.astype("bfloat16")), variables[TABLES])
    out, records = call(module, variables, x_BTD)
    got, rounded = call(narrow, {**variables, TABLES: tables}, x_BTD.astype("bfloat16"))
    assert got.dtype == jnp.bfloat16 and rounded["weights"].dtype == jnp.float32
    same = np.all(records["slots"] == rounded["slots"], axis=(2, 3))
    assert same.any()
    np.testing.assert_allclose(
        np.asarray(got, np.float32)[same], out[same], rtol=0.1, atol=0.05
    )


class Pair(nn.Module):
    """Two layers, one pair of tables."""

    config: MemoryPlusConfig

    @nn.compact
    def read(self, h_BTD, inputs):
        specs = self.config.table_specs(h_BTD.shape[-1])
        tables = own_tables(self, self.config, specs, None, FLOAT32, None)
        inputs = inputs.replace(tables=tables)
        for i in range(2):
            memory = MemoryPlus(self.config, FLOAT32, name=f"layer_{i}")
            h_BTD = h_BTD + memory.read(h_BTD, inputs)
        return h_BTD


def test_shared_tables_of_experts_sum_their_gradients_in_both_modes():
    x_BTD = stream()
    config = dataclasses.replace(BASE, form="experts", table_mode="rows")
    variables = shaken({"params": start(Pair(config), x_BTD)["params"]})
    tables = start(Pair(config), x_BTD)[TABLES]
    assert set(tables) == {"down_table", "up_table"}
    assert "down_table" not in variables["params"]["layer_1"]

    def graded(config, variables):
        def loss(variables):
            out, state = Pair(config).apply(
                variables, x_BTD, inputs_of(x_BTD), method="read", mutable=[READS]
            )
            return jnp.sum(jnp.sin(out)), state

        return jax.jit(value_and_row_grad(loss))(variables)

    loss, grads = graded(config, {**variables, TABLES: tables})
    dense = dataclasses.replace(config, table_mode="dense")
    together = {"params": {**variables["params"], **tables}}
    want_loss, want = graded(dense, together)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for name in tables:
        assert len(grads.tables[name]) == 2, "one read a layer"
        summed = unique_rows(grads.tables[name], 16, 6)
        np.testing.assert_allclose(
            dense_gradient(summed, 16), want.params[name], rtol=1e-4, atol=1e-6
        )
    for name, tree in grads.params.items():
        for got, leaf in zip(
            jax.tree.leaves(tree), jax.tree.leaves(want.params[name]), strict=True
        ):
            np.testing.assert_allclose(got, leaf, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 17}, r"memories.k = 17 .* 1 to 16"),
        ({"k": 0}, r"memories.k = 0"),
        ({"n_sub_keys": 46341}, r"memories.n_sub_keys = 46341 .* 46340"),
        ({"n_sub_keys": 0}, r"memories.n_sub_keys = 0"),
        ({"n_heads": 0}, r"memories.n_heads = 0"),
        ({"key_width": 5}, r"memories.key_width = 5 .* even"),
        ({"value_width": 0}, r"memories.value_width = 0"),
        ({"form": "experts", "value_width": 6}, r"value_width = 6 .* None when"),
        ({"form": "gated"}, r"memories.form = 'gated'"),
        ({"gate": "tanh"}, r"memories.gate = 'tanh'"),
        ({"mode": "convex"}, r"memories.gate = 'none' .* 'sigmoid'"),
        ({"query_norm": "l2"}, r"memories.query_norm = 'l2'"),
        ({"query_bias": 2}, r"memories.query_bias = 2"),
        ({"input_dropout": 1.0}, r"memories.input_dropout = 1.0"),
        ({"query_dropout": -0.1}, r"memories.query_dropout = -0.1"),
        ({"value_dropout": float("nan")}, r"memories.value_dropout = nan"),
        ({"value_std": -1.0}, r"memories.value_std = -1.0"),
    ],
    ids=str,
)
def test_what_cannot_be_built_says_why(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BASE, **changes)


def test_the_largest_tables_have_shapes():
    config = MemoryPlusConfig(n_sub_keys=46340)
    (spec,) = config.table_specs(64).values()
    assert (spec.n_rows, spec.width, spec.reads) == (46340**2, 64, 128)
    module = MemoryPlus(dataclasses.replace(config, form="plain"), FLOAT32)
    assert shapes(module)["table"][0] == (46340**2, 6)


def test_experts_as_wide_as_the_stream_only():
    module = MemoryPlus(dataclasses.replace(BASE, form="experts"), FLOAT32, out_width=5)
    with pytest.raises(ShapeError, match=r"table down_table has shape \(16, 5\)"):
        shapes(module)
