"""N-gram embeddings: sums and averages from the definition, every option, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.layers.memory import MemoryInputs
from memjax.layers.ngram_embedding import NgramEmbedding, NgramEmbeddingConfig
from memjax.layers.row_grad import value_and_row_grad
from memjax.layers.table import READS, TABLES
from memjax.ops.polynomial_hash import FIRST_PRIME
from memjax.ops.row_gradient import dense_gradient, unique_rows
from memjax.ops.rows import store
from tests.layers.memory_calls import BFLOAT16, FLOAT32, D, as_float64, own_fields

VOCAB = 7
BASE = NgramEmbeddingConfig(orders=(2, 3), n_heads=2, rows_per_head=11, row_width=4)
BLT = NgramEmbeddingConfig(
    hash="polynomial",
    orders=(2, 3),
    n_heads=1,
    rows_per_head=11,
    row_width=None,
    average=False,
)
CHANGES = {
    "hash": "polynomial",
    "orders": (2, 4),
    "n_heads": 1,
    "rows_per_head": 12,
    "row_width": 5,
    "average": False,
    "gate": "sigmoid",
    "table_std": 0.1,
}
TOKENS = np.array([[1, 2, 3, 1, 2, 6], [4, 0, 5, 4, 1, 2]], np.int32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
X = jax.random.normal(jax.random.key(2), (2, 6, D))


def layer(config=BASE, dtypes=FLOAT32, **changes):
    config = dataclasses.replace(config, **changes)
    return NgramEmbedding(config, config.row_layout(VOCAB).n_rows, dtypes)


def inputs_of(module):
    segments = jnp.asarray(SEGMENTS)
    layout = module.config.row_layout(VOCAB)
    rows = layout.host_rows(TOKENS, segments_BT=SEGMENTS)
    return MemoryInputs(segments, jnp.zeros_like(segments), jnp.asarray(rows))


def filled(module):
    shapes = jax.eval_shape(
        lambda: module.init(jax.random.key(0), X, inputs_of(module), method="read")
    )
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), jnp.float32),
        {"params": shapes["params"]},
    )


def call(module, variables, x=X):
    @jax.jit
    def apply(variables, x):
        return module.apply(variables, x, inputs_of(module), method="read")

    return apply(variables, x)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("config", [BASE, BLT], ids=["longcat", "blt"])
def test_the_stream_becomes_the_sum_or_the_average(config, average):
    module = layer(config, average=average)
    variables = filled(module)
    params, x = as_float64(variables["params"]), as_float64(X)
    out = call(module, variables)
    rows_BTC = np.asarray(inputs_of(module).rows_BTC)
    n_columns, width = rows_BTC.shape[-1], params["table"].shape[1]
    for b, t in np.ndindex(*TOKENS.shape):
        total = np.zeros(D)
        for c, row in enumerate(rows_BTC[b, t]):
            value = params["table"][row]
            if config.row_width is not None:  # a map of its own for each table
                value = value @ params["value"]["kernel"][c * width : (c + 1) * width]
            total += value
        want = x[b, t] + total
        if average:
            want = want / (1 + n_columns)
        if SEGMENTS[b, t] == 0:
            want = x[b, t]
        np.testing.assert_allclose(out[b, t] + x[b, t], want, rtol=1e-4, atol=1e-5)


def test_every_field_changes_something():
    assert set(CHANGES) | {"primes"} == own_fields(NgramEmbeddingConfig)
    variables = filled(layer())
    shapes = jax.tree.map(jnp.shape, variables)
    out = call(layer(), variables)
    for field, value in CHANGES.items():
        primes = {"primes": (3, 5)} if field == "hash" else {}
        module = layer(**{field: value}, **primes)
        if field == "table_std":
            assert module.config.table_specs(D)["table"].std == value
            continue
        changed = filled(module)
        if jax.tree.map(jnp.shape, changed) != shapes:
            continue
        assert np.abs(call(module, changed) - out).max() > 1e-3, field
    one = call(layer(BLT), filled(layer(BLT)))
    assert np.abs(call(layer(BLT, primes=(5,)), filled(layer(BLT))) - one).max() > 1e-3
    named = layer(BLT, primes=(FIRST_PRIME,))
    np.testing.assert_array_equal(call(named, filled(named)), one)


def test_the_initial_scale_is_that_of_the_stream():
    assert BLT.table_specs(D)["table"].std == 1.0
    assert BASE.table_specs(D)["table"].std == 0.5


@pytest.mark.parametrize("config", [BASE, BLT], ids=["longcat", "blt"])
def test_tables_by_rows_have_the_dense_gradient(config):
    dense, module = layer(config), layer(config, table_mode="rows")
    variables = filled(dense)
    params = dict(variables["params"])
    split = {TABLES: {"table": store(params.pop("table"))}, "params": params}

    def loss(variables, module):
        out, state = module.apply(
            variables, X, inputs_of(module), method="read", mutable=[READS]
        )
        return jnp.sum(jnp.sin(out)), state

    want = jax.jit(jax.grad(lambda v: loss(v, dense)[0]))(variables)["params"]["table"]
    _, grads = jax.jit(value_and_row_grad(lambda v: loss(v, module)))(split)
    unique = unique_rows(grads.tables["table"], *want.shape)
    got = dense_gradient(unique, want.shape[0])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    step = jax.random.normal(jax.random.key(1), want.shape)
    ends = []
    for h in (1e-2, -1e-2):
        table = variables["params"]["table"] + h * step
        moved = {"params": {**variables["params"], "table": table}}
        ends.append(float(loss(moved, dense)[0]))
    slope = (ends[0] - ends[1]) / 2e-2
    assert float(jnp.sum(want * step)) == pytest.approx(slope, rel=1e-2, abs=1e-3)


def test_bfloat16_and_bad_rows():
    module = layer(BLT, BFLOAT16)
    variables = filled(layer(BLT))
    low = {"params": {"table": variables["params"]["table"].astype(jnp.bfloat16)}}
    got = call(module, low, X.astype(jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    want = call(layer(BLT), variables)
    np.testing.assert_allclose(got.astype(np.float32), want, atol=0.05)
    inputs = inputs_of(layer(BLT))
    bad = inputs.replace(rows_BTC=inputs.rows_BTC.at[1, 2, 0].set(2**31 - 1))
    out = layer(BLT).apply(variables, X, bad, method="read")
    assert np.isnan(out[1, 2]).all()
    np.testing.assert_allclose(out[0], want[0], atol=1e-6)
    with pytest.raises(ShapeError, match="rows_BTC"):
        bad = inputs.replace(rows_BTC=None)
        layer(BLT).apply(variables, X, bad, method="read")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hash": "fnv"}, r"memories\.hash = 'fnv'"),
        ({"orders": (3, 2)}, r"memories\.orders = \(3, 2\)"),
        ({"orders": 3}, r"memories\.orders = 3"),
        ({"orders": (1, 2)}, r"memories\.orders = \(1, 2\)"),
        ({"n_heads": 0}, r"memories\.n_heads = 0"),
        ({"rows_per_head": 2**30}, r"memories\.rows_per_head = .*together"),
        ({"primes": (3, 5)}, r"memories\.primes = \(3, 5\) .*'modular'"),
        ({"hash": "polynomial"}, r"memories\.primes = None .* 2 primes"),
        ({"hash": "polynomial", "primes": (3,)}, r"memories\.primes = \(3,\)"),
        ({"row_width": 0}, r"memories\.row_width = 0"),
        ({"gate": "tanh"}, r"memories\.gate = 'tanh'"),
        ({"table_std": -1.0}, r"memories\.table_std"),
        ({"average": 1.5}, r"memories\.average"),
    ],
    ids=str,
)
def test_what_is_not_allowed(change, text):
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(BASE, **change)
