"""Product-key memory: against a slow oracle, its laws, both table modes, NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.layers.product_key import CONSTANTS, ProductKeyMemory
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.layers.record import METRICS
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
    shaken,
    shapes,
    start,
    stream,
)
from tests.oracles.product_key_memory import product_key_memory

BASE = ProductKeyConfig(layers=(0,), n_sub_keys=4, key_width=6, n_heads=2, k=3)
N_SLOTS = 16


def layer(dtypes=FLOAT32, **changes):
    return ProductKeyMemory(dataclasses.replace(BASE, **changes), dtypes)


@pytest.fixture(scope="module")
def base():
    """Input, variables, output and records of the layer without changes."""
    x_BTD = stream()
    variables = shaken(start(layer(), x_BTD))
    return x_BTD, variables, *call(layer(), variables, x_BTD)


def expect(module, variables, x_BTD, out, order_HS=None):
    params, x = as_float64(variables["params"]), as_float64(x_BTD)
    for b, t in np.ndindex(out.shape[:2]):
        want = product_key_memory(params, module.config, x[b, t], order_HS)
        np.testing.assert_allclose(out[b, t], want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"k": 16, "activation": "relu", "value_width": 5},
        {"normalize_query": True, "subtract": "median", "normalize": True, "k": 4},
        {"query": "identity", "over": "joint", "temperature": 0.5, "input_norm": True},
        {"flat": True, "n_sub_keys": 7, "key_width": 5, "normalize_query": True},
        {"slice_values": True, "key_shared": True, "modulo_rows": 7},
        {"output_norm": True, "query_bias": False, "activation": "silu"},
        {"k": None, "activation": "relu"},
        {"k": None, "flat": True, "n_sub_keys": 7, "activation": "softmax"},
    ],
    ids=str,
)
def test_the_layer_is_what_the_oracle_computes(changes):
    module, x_BTD = layer(**changes), stream()
    variables = shaken(start(module, x_BTD))
    out, _ = call(module, variables, x_BTD)
    expect(module, variables, x_BTD, out)


def test_gradient_against_finite_differences_of_the_oracle(base):
    x_BTD, variables, out, _ = base
    expect(layer(), variables, x_BTD, out)
    bar = np.asarray(jax.random.normal(jax.random.key(3), out.shape), np.float64)

    @jax.jit
    def graded(params, x_BTD):
        def loss(params, x_BTD):
            out = layer().apply(
                {"params": params}, x_BTD, inputs_of(x_BTD), method="read"
            )
            return jnp.sum(out * bar)

        return jax.grad(loss, argnums=(0, 1))(params, x_BTD)

    grads = as_float64(graded(variables["params"], x_BTD))
    point = as_float64((variables["params"], x_BTD))
    random = np.random.default_rng(0)

    def moved(direction, h):
        params, x = jax.tree.map(lambda a, b: a + h * b, point, direction)
        return sum(
            product_key_memory(params, BASE, x[b, t]) @ bar[b, t]
            for b, t in np.ndindex(x.shape[:2])
        )

    leaves, tree = jax.tree.flatten(point)
    for i, leaf in enumerate(leaves):  # one parameter, or the stream, at a time
        steps = [np.zeros_like(other) for other in leaves]
        steps[i] = random.normal(size=leaf.shape)
        direction = jax.tree.unflatten(tree, steps)
        slope = (moved(direction, 1e-6) - moved(direction, -1e-6)) / 2e-6
        got = np.sum(jax.tree.leaves(grads)[i] * steps[i])
        assert got == pytest.approx(slope, rel=1e-3, abs=1e-5)


def test_without_jit_it_is_the_same_and_records_have_their_shapes(base):
    x_BTD, variables, out, records = base
    again = layer().apply(variables, x_BTD, inputs_of(x_BTD), method="read")
    np.testing.assert_allclose(again, out, rtol=1e-5, atol=1e-6)
    assert records["slots"].shape == records["weights"].shape == (2, 3, 2, 3)
    assert records["slots"].dtype == jnp.int32
    np.testing.assert_allclose(records["weights"].sum(-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(records["gate"], 1)
    assert set(variables["params"]) == {"keys", "query", "table"}


def test_flat_keys_with_the_same_scores_read_the_same(base):
    x_BTD, variables, out, records = base
    first, second = np.moveaxis(np.asarray(variables["params"]["keys"]), 1, 0)
    pairs = [np.repeat(first, 4, axis=1), np.tile(second, (1, 4, 1))]
    params = {**variables["params"], "keys": np.concatenate(pairs, axis=-1)}
    flat = layer(flat=True, n_sub_keys=N_SLOTS)
    other, found = call(flat, {"params": params}, x_BTD)
    np.testing.assert_allclose(other, out, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["slots"], records["slots"])


def test_numbering_sub_keys_otherwise_moves_slots_and_rows(base):
    x_BTD, variables, out, records = base
    order = np.random.default_rng(1).permutation(4)
    params = dict(variables["params"])
    params["keys"] = params["keys"].at[:, 1].set(params["keys"][:, 1, order])
    slots = (4 * np.arange(4)[:, None] + order).ravel()
    params["table"] = params["table"][slots]
    other, found = call(layer(), {"params": params}, x_BTD)
    np.testing.assert_allclose(other, out, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(slots[found["slots"]], records["slots"])


def test_all_slots_of_one_head_are_the_widest_search():
    x_BTD = stream()
    module = layer(n_heads=1, k=N_SLOTS)
    variables = shaken(start(module, x_BTD))
    out, _ = call(module, variables, x_BTD)
    dense, records = call(layer(n_heads=1, k=None), variables, x_BTD)
    np.testing.assert_allclose(dense, out, rtol=1e-5, atol=1e-6)
    assert "slots" not in records


def test_permuted_slots_are_rows_in_another_order_for_each_head(base):
    x_BTD, variables, out, records = base
    module = layer(permutation_seed=5)
    _, permuted = call(module, variables, x_BTD)
    order_HS = np.stack(
        [[permuted_row(module, variables, a, s) for s in range(16)] for a in (0, 1)]
    )
    assert (np.sort(order_HS) == np.arange(16)).all()
    assert (order_HS[0] != order_HS[1]).any()
    heads = np.arange(2)[:, None]
    slots = np.asarray(records["slots"])
    np.testing.assert_array_equal(permuted["slots"], order_HS[heads, slots])
    # Recorded orders take the place of those of the seed.
    given = np.stack([np.roll(np.arange(16), 3), np.arange(16)[::-1]]).astype(np.int32)
    with_given = {**variables, CONSTANTS: {"permutations": given}}
    other, found = call(module, with_given, x_BTD)
    np.testing.assert_array_equal(found["slots"], given[heads, slots])
    expect(module, variables, x_BTD, other, given)


def permuted_row(module, variables, head, slot):
    slots = jnp.zeros((1, 1, 2, 1), jnp.int32).at[..., head, 0].set(slot)
    return int(module.apply(variables, slots, method="rows")[0, 0, head, 0])


def test_a_token_reads_for_itself_and_dropping_leaves_nothing(base):
    x_BTD, variables, out, _ = base
    other, _ = call(layer(), variables, x_BTD.at[0, 1].add(1.0))
    differs = np.argwhere(np.any(np.asarray(out != other), axis=-1))
    assert differs.tolist() == [[0, 1]]
    dropped, _ = call(layer(), variables, x_BTD, drop=True)
    assert not dropped.any()


def test_p04_nan_stays_in_its_token_and_is_counted_at_real_positions(base):
    x_BTD, variables, clean, records = base
    assert records["non_finite_scores"] == 0
    spoilt_BTD = x_BTD.at[0, 1, 2].set(jnp.nan).at[1, 2, 0].set(jnp.nan)
    out, records = call(layer(), variables, spoilt_BTD, n_padding=1)
    bad = np.isnan(np.asarray(out))
    assert bad[0, 1].all() and bad[1, 2].all() and bad.sum() == 2 * out.shape[-1]
    np.testing.assert_array_equal(out[~bad], clean[~bad])
    assert records["non_finite_scores"] == 2, "two heads of the one real token"
    _, records = call(layer(k=None), variables, spoilt_BTD, n_padding=1)
    assert records["non_finite_scores"] == 1, "heads are summed"


def test_p05_padding_moves_neither_reads_nor_running_averages():
    module = layer(query_norm="batch")
    x_BTD = stream(4)
    variables = start(module, x_BTD[:, :2])

    @functools.partial(jax.jit, static_argnames=("n_padding", "train"))
    def run(x_BTD, n_padding, train):
        return module.apply(
            variables,
            x_BTD,
            inputs_of(x_BTD, n_padding),
            train=train,
            method="read",
            mutable=["batch_stats", METRICS],
        )

    out, state = run(x_BTD[:, :2], n_padding=0, train=True)
    padded, same = run(x_BTD, n_padding=2, train=True)
    np.testing.assert_allclose(padded[:, :2], out, rtol=1e-5, atol=1e-6)
    moved, again = (found["batch_stats"]["query"]["norm_0"] for found in (state, same))
    for name in ("mean", "var"):
        np.testing.assert_allclose(moved[name], again[name], rtol=1e-5, atol=1e-6)
    assert np.abs(moved["mean"]).max() > 1e-4
    _, kept = run(x_BTD, n_padding=0, train=False)
    np.testing.assert_array_equal(kept["batch_stats"]["query"]["norm_0"]["mean"], 0)


@pytest.mark.parametrize("slice_values", [False, True])
def test_a_table_by_rows_reads_and_learns_as_a_dense_one(slice_values):
    x_BTD = stream()
    module = layer(table_mode="rows", slice_values=slice_values, modulo_rows=5)
    variables = start(module, x_BTD)
    table = variables[TABLES]["table"]

    def graded(module, variables):
        def loss(variables):
            out, state = module.apply(
                variables, x_BTD, inputs_of(x_BTD), method="read", mutable=[READS]
            )
            return jnp.sum(jnp.sin(out)), state

        return jax.jit(value_and_row_grad(loss))(variables)

    loss, grads = graded(module, variables)
    dense = layer(slice_values=slice_values, modulo_rows=5)
    together = {"params": {**variables["params"], "table": table}}
    want_loss, want = graded(dense, together)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    summed = unique_rows(grads.tables["table"], *table.shape)
    np.testing.assert_allclose(
        dense_gradient(summed, 5), want.params["table"], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        grads.params["keys"], want.params["keys"], rtol=1e-4, atol=1e-6
    )


def test_bfloat16_selects_in_float32_and_reads_near_it(base):
    x_BTD, _, _, _ = base
    module, narrow = (layer(d, table_mode="rows") for d in (FLOAT32, BFLOAT16))
    variables = start(module, x_BTD)
    tables = jax.tree.map(lambda t: store(t.astype("bfloat16")), variables[TABLES])
    out, records = call(module, variables, x_BTD)
    got, rounded = call(narrow, {**variables, TABLES: tables}, x_BTD.astype("bfloat16"))
    assert got.dtype == jnp.bfloat16 and rounded["weights"].dtype == jnp.float32
    same = np.all(records["slots"] == rounded["slots"], axis=(2, 3))
    assert same.any()
    np.testing.assert_allclose(
        np.asarray(got, np.float32)[same], out[same], rtol=0.1, atol=0.05
    )


def test_fixed_keys_and_queries_have_names_of_their_own_and_no_gradient():
    x_BTD = stream()
    module = layer(key_learned=False, query_learned=False)
    params = start(module, x_BTD)["params"]
    assert set(params) == {"fixed_keys", "fixed_query", "table"}

    def loss(params, x_BTD):
        out = module.apply({"params": params}, x_BTD, inputs_of(x_BTD), method="read")
        return jnp.sum(jnp.sin(out))

    grads, of_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x_BTD)
    for name in ("fixed_keys", "fixed_query"):
        assert not any(leaf.any() for leaf in jax.tree.leaves(grads[name]))
    assert np.abs(grads["table"]).max() > 0 and np.abs(of_x).max() > 0


def test_a_detached_input_gets_no_gradient_from_the_query(base):
    x_BTD, variables, _, _ = base
    module = layer(detach_input=True)

    def loss(x_BTD):
        out = module.apply(variables, x_BTD, inputs_of(x_BTD), method="read")
        return jnp.sum(jnp.sin(out))

    assert not jax.jit(jax.grad(loss))(x_BTD).any()


def test_p07_the_largest_grid_has_shapes():
    found = shapes(layer(n_sub_keys=46340))
    assert found["table"][0] == (46340**2, 6)
