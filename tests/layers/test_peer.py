"""PEER: both readings against a slow oracle, its tables per head, laws and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.layers.batch_norm import BATCH_STATS
from memjax.layers.peer import Peer, PeerConfig
from memjax.layers.row_grad import value_and_row_grad
from memjax.layers.table import READS, TABLES
from memjax.ops.product_keys import product_key_search
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
from tests.oracles.product_keys import best_slots

BASE = PeerConfig(layers=(0,), n_sub_keys=4, n_heads=2, k=3)
CHANGES = {
    "n_sub_keys": 5,
    "key_width": 4,
    "n_heads": 1,
    "k": 2,
    "half_k": 2,
    "activation": "relu",
    "query_norm": "batch",
    "separate_tables": True,
    "input_norm": True,
    "gate": "sigmoid",
    "expert_dropout": 0.5,
    "table_std": 0.1,
}


def layer(dtypes=FLOAT32, **changes):
    return Peer(dataclasses.replace(BASE, **changes), dtypes)


@pytest.fixture(scope="module")
def base():
    """Input, initial variables, output and records of the unchanged layer."""
    x_BTD = stream()
    variables = shaken(start(layer(), x_BTD))
    return x_BTD, variables, *call(layer(), variables, x_BTD)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "relu", "k": 1, "key_width": 8},
        {"activation": "relu", "input_norm": True, "separate_tables": True},
        {"half_k": 2, "k": 4, "separate_tables": True},
    ],
    ids=str,
)
def test_each_reading_is_what_the_oracle_computes(changes):
    module, x_BTD = layer(**changes), stream()
    variables = shaken(start(module, x_BTD))
    out, _ = call(module, variables, x_BTD)
    params, x = as_float64(variables["params"]), as_float64(x_BTD)
    for b, t in np.ndindex(out.shape[:2]):
        want = oracle.peer(params, module.config, x[b, t])
        np.testing.assert_allclose(out[b, t], want, rtol=2e-4, atol=2e-5)


def test_every_option_has_a_case_here():
    assert set(CHANGES) == own_fields(PeerConfig)


@pytest.mark.parametrize("field", CHANGES)
def test_every_option_changes_parameters_or_output(field, base):
    x_BTD, variables, out, _ = base
    changed = layer(**{field: CHANGES[field]})
    if shapes(changed) != shapes(layer()):
        return
    if field == "table_std":
        params = start(changed, x_BTD)["params"]
        for name in ("down_table", "up_table"):
            assert 0.07 < np.std(params[name]) < 0.13
        return
    if field == "half_k":
        spread = {**variables["params"]}
        spread["keys"] = 10 * spread["keys"].at[:, 1].mul(0.01)
        variables = {"params": spread}
        out, _ = call(layer(), variables, x_BTD)
    other, _ = call(changed, variables, x_BTD, train=True)
    assert np.abs(out - other).max() > 1e-3
    if field.endswith("dropout"):
        np.testing.assert_array_equal(out, call(changed, variables, x_BTD)[0])


def test_parameters_start_as_documented():
    params = start(layer(n_sub_keys=20), stream())["params"]
    assert params["keys"].shape == (2, 2, 20, 3)
    assert np.std(params["keys"]) == pytest.approx(0.02, rel=0.15)
    for name in ("down_table", "up_table"):
        assert params[name].shape == (400, 6)
        assert np.std(params[name]) == pytest.approx(6**-0.5, rel=0.05)
    assert np.any(params["down_table"] != params["up_table"])


def test_fewer_kept_sub_keys_search_the_grid_of_the_kept():
    rng = np.random.default_rng(0)
    for half_k, k in ((1, 1), (2, 3), (2, 4), (3, 3), (5, 7)):
        halves = rng.permutation(60).reshape(6, 2, 5).astype(np.float32)
        found = product_key_search(halves, k, half_k)
        for row, scores, slots in zip(halves, *found, strict=True):
            lowest = np.sort(row, axis=-1)[:, -half_k, None]
            want = best_slots(np.where(row >= lowest, row, -np.inf), k)
            assert (scores.tolist(), slots.tolist()) == want
    for half_k in (0, 1, 6):
        with pytest.raises(ConfigError, match=f"half_k = {half_k} .* 1 to 5 .* 2"):
            product_key_search(halves, 2, half_k)


def test_separate_tables_give_each_head_its_own_experts():
    module, x_BTD = layer(separate_tables=True), stream()
    variables = shaken(start(module, x_BTD))
    out, records = call(module, variables, x_BTD)
    assert records["slots"].max() < 16, "slots are those of a head"

    def without(head):
        params = dict(variables["params"])
        rows = slice(16 * head, 16 * (head + 1))
        params["up_table"] = params["up_table"].at[rows].set(0)
        return call(module, {"params": params}, x_BTD)[0]

    np.testing.assert_allclose(without(0) + without(1), out, rtol=1e-4, atol=1e-5)


def test_a_normed_input_has_no_length_and_zero_stays_zero():
    module, x_BTD = layer(input_norm=True), stream().at[0, 0].set(0)
    variables = shaken(start(module, x_BTD))
    out, _ = call(module, variables, x_BTD)
    longer, _ = call(module, variables, 5 * x_BTD)
    np.testing.assert_allclose(longer, out, rtol=1e-4, atol=1e-6)
    assert not out[0, 0].any()
    grad = jax.grad(lambda x: call(module, variables, x)[0].sum())(x_BTD)
    assert np.isfinite(grad).all()


def test_batch_norm_of_queries_passes_over_padding_and_keeps_averages():
    module, x_BTD = layer(query_norm="batch"), stream()
    variables = start(module, x_BTD)
    assert set(variables[BATCH_STATS]) == {"query_norm"}
    loud_BTD = x_BTD.at[:, 2].set(100.0)

    def trained(x_BTD):
        out, state = module.apply(
            variables, x_BTD, inputs_of(x_BTD, 1), method="read",
            train=True, mutable=[BATCH_STATS],
        )  # fmt: skip
        return out[:, :2], state[BATCH_STATS]

    jitted = jax.jit(trained)
    (out, stats), (other, loud_stats) = jitted(x_BTD), jitted(loud_BTD)
    np.testing.assert_array_equal(out, other)
    jax.tree.map(np.testing.assert_array_equal, stats, loud_stats)
    assert np.abs(stats["query_norm"]["mean"]).max() > 0


def test_p04_nan_stays_in_its_token_and_is_counted_at_real_positions(base):
    x_BTD, variables, clean, records = base
    assert records["non_finite_scores"] == 0
    spoilt_BTD = x_BTD.at[0, 1, 2].set(jnp.nan).at[1, 2, 0].set(jnp.nan)
    out, records = call(layer(), variables, spoilt_BTD, n_padding=1)
    bad = np.isnan(np.asarray(out))
    assert bad[0, 1].all() and bad[1, 2].all() and bad.sum() == 2 * out.shape[-1]
    np.testing.assert_array_equal(out[~bad], clean[~bad])
    assert records["non_finite_scores"] == 2, "two heads of the one real token"


def test_by_rows_and_whole_tables_have_the_same_gradients(base):
    x_BTD, variables, *_ = base
    tables = ("down_table", "up_table")

    def graded(mode, variables):
        def loss(variables):
            out, state = layer(table_mode=mode).apply(
                variables, x_BTD, inputs_of(x_BTD), method="read", mutable=[READS]
            )
            return jnp.sum(jnp.sin(out)), state

        return jax.jit(value_and_row_grad(loss))(variables)

    params = variables["params"]
    own = {name: leaf for name, leaf in params.items() if name not in tables}
    rows = {name: params[name] for name in tables}
    loss, grads = graded("rows", {"params": own, TABLES: rows})
    want_loss, want = graded("dense", variables)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for name in tables:
        summed = unique_rows(grads.tables[name], 16, 6)
        np.testing.assert_allclose(
            dense_gradient(summed, 16), want.params[name], rtol=1e-4, atol=1e-6
        )
    for name in ("keys", "query"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            grads.params[name],
            want.params[name],
        )


def test_bfloat16_reads_near_float32(base):
    x_BTD, variables, out, records = base
    tables = ("down_table", "up_table")
    params = dict(variables["params"])
    rows = {name: store(params.pop(name).astype("bfloat16")) for name in tables}
    narrow = layer(BFLOAT16, table_mode="rows")
    variables = {"params": params, TABLES: rows}
    got, rounded = call(narrow, variables, x_BTD.astype("bfloat16"))
    assert got.dtype == jnp.bfloat16 and rounded["weights"].dtype == jnp.float32
    same = np.all(records["slots"] == rounded["slots"], axis=(2, 3))
    assert same.any()
    got = np.asarray(got, np.float32)
    np.testing.assert_allclose(got[same], out[same], rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 17}, r"memories.k = 17 .* 1 to 16"),
        ({"k": 0}, r"memories.k = 0"),
        ({"n_sub_keys": 46341}, r"memories.n_sub_keys = 46341 .* 46340"),
        (
            {"n_sub_keys": 46340, "separate_tables": True},
            r"separate_tables = True .* False for 2 heads of 46340\^2 .* 2147483646",
        ),
        ({"n_heads": 0}, r"memories.n_heads = 0"),
        ({"key_width": 5}, r"memories.key_width = 5 .* even"),
        ({"half_k": 1}, r"memories.half_k = 1 .* square is at least 3"),
        ({"half_k": 5}, r"memories.half_k = 5 .* 1 to 4 sub-keys"),
        ({"activation": "silu"}, r"memories.activation = 'silu'"),
        ({"query_norm": "layer"}, r"memories.query_norm = 'layer'"),
        ({"separate_tables": 2}, r"memories.separate_tables = 2"),
        ({"input_norm": "rms"}, r"memories.input_norm = 'rms'"),
        ({"gate": "tanh"}, r"memories.gate = 'tanh'"),
        ({"mode": "convex"}, r"memories.gate = 'none' .* 'sigmoid'"),
        ({"expert_dropout": 1.0}, r"memories.expert_dropout = 1.0"),
        ({"table_std": float("nan")}, r"memories.table_std = nan"),
    ],
    ids=str,
)
def test_what_cannot_be_built_says_why(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BASE, **changes)


def test_a_stream_too_narrow_for_two_halves_needs_a_key_width():
    BASE.check_width(2)
    dataclasses.replace(BASE, key_width=4).check_width(1)
    with pytest.raises(ConfigError, match="key_width = None .* a stream of width 1"):
        BASE.check_width(1)


def test_the_largest_tables_have_shapes():
    config = dataclasses.replace(BASE, n_sub_keys=32767, separate_tables=True)
    assert config.table_specs(8)["up_table"].n_rows == 2 * 32767**2
    assert shapes(Peer(config, FLOAT32))["up_table"][0] == (2 * 32767**2, 6)
