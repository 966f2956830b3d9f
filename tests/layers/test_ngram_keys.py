"""Product keys over n-grams: a slow oracle, the laws of sharing, the address loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.layers.memory import MemoryInputs
from memjax.layers.ngram_keys import NgramKeys, NgramKeysConfig
from memjax.layers.record import LOSSES, METRICS
from memjax.layers.row_grad import value_and_row_grad
from memjax.layers.table import READS, TABLES
from memjax.ops.row_gradient import dense_gradient, unique_rows
from memjax.ops.rows import store
from tests.layers.memory_calls import BFLOAT16, FLOAT32, D, as_float64, own_fields
from tests.oracles.address_entropy import address_entropy
from tests.oracles.memory_reads import reads

VOCAB = 7
BASE = NgramKeysConfig(
    layers=(0,), order=2, code_width=3, n_heads=2, n_sub_keys=4, key_width=4, k=3
)
CHANGES = {
    "order": 3,
    "code_width": 2,
    "n_heads": 1,
    "n_sub_keys": 5,
    "key_width": 6,
    "k": 2,
    "activation": "relu",
    "address_weight": 0.5,
    "gate": "none",
    "value_width": 4,
    "table_std": 0.1,
}
TOKENS = np.array([[1, 2, 3, 1, 2, 6], [4, 0, 5, 4, 1, 2]], np.int32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
X = jax.random.normal(jax.random.key(2), (2, 6, D))


def layer(dtypes=FLOAT32, **changes):
    config = dataclasses.replace(BASE, **changes)
    return NgramKeys(config, config.row_layout(VOCAB).n_rows, dtypes)


def inputs_of(module, tokens=TOKENS, segments=SEGMENTS):
    segments = jnp.asarray(segments)
    layout = module.config.row_layout(VOCAB)
    rows = layout.rows(jnp.asarray(tokens), segments_BT=segments)
    return MemoryInputs(segments, jnp.zeros_like(segments), rows)


def filled(module, seed=0):
    """Normal numbers of deviation 0.5 in every parameter."""
    shapes = jax.eval_shape(
        lambda: module.init(jax.random.key(0), X, inputs_of(module), method="read")
    )
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), jnp.float32),
        {"params": shapes["params"]},
    )


def call(module, variables, inputs, x=X, **options):
    @jax.jit
    def apply(variables, x, inputs):
        return module.apply(
            variables, x, inputs, method="read", mutable=[METRICS, LOSSES], **options
        )

    return apply(variables, x, inputs)


@pytest.fixture(scope="module")
def base():
    module = layer()
    variables = filled(module)
    return variables, *call(module, variables, inputs_of(module))


def slow(params, config, rows, x):
    """Output, half scores, slots and weights of one token in float64."""
    code = np.concatenate([params["embedding"][row] for row in rows])
    query = code @ params["query"]["kernel"] + params["query"]["bias"]
    q_HXC = query.reshape(config.n_heads, 2, -1)
    scores = np.einsum("hxc,hxnc->hxn", q_HXC, params["keys"])
    slots, weights = reads(q_HXC, params["keys"], config.k, config.activation)
    out = np.zeros(params["table"].shape[1])
    for slot, weight in zip(slots.ravel(), weights.ravel(), strict=True):
        out += weight * params["table"][slot]
    if "value" in params:
        out = out @ params["value"]["kernel"]
    if config.gate == "sigmoid":
        gate = params["token_gate"]
        out = out / (1 + np.exp(-(x @ gate["kernel"] + gate["bias"])))
    return out, scores, slots, weights


@pytest.mark.parametrize(
    "changes", [{}, {"value_width": 4, "activation": "relu", "gate": "none"}], ids=str
)
def test_it_reads_what_the_oracle_reads(changes):
    module = layer(**changes)
    variables, inputs = filled(module), inputs_of(module)
    out, state = call(module, variables, inputs)
    params, x = as_float64(variables["params"]), as_float64(X)
    scores = []
    for b, t in np.ndindex(*TOKENS.shape):
        rows = np.asarray(inputs.rows_BTC)[b, t]
        want, halves, slots, weights = slow(params, module.config, rows, x[b, t])
        scores.append(halves)
        np.testing.assert_array_equal(state[METRICS]["slots"][b, t], slots)
        np.testing.assert_allclose(state[METRICS]["weights"][b, t], weights, atol=1e-5)
        real = SEGMENTS[b, t] > 0
        np.testing.assert_allclose(out[b, t], want * real, rtol=1e-4, atol=1e-5)
    entropy = address_entropy(np.array(scores), 3, SEGMENTS.ravel() > 0)
    assert state[METRICS]["address_entropy"] == pytest.approx(entropy, rel=1e-4)
    assert state[LOSSES]["address"] == pytest.approx(-0.01 * entropy, rel=1e-4)


def test_no_ngram_owns_a_row(base):
    """Equal codes, equal reads; and any n-gram can be sent to any other's rows."""
    variables, _, state = base
    params = variables["params"]
    module = layer()
    per_place = VOCAB + 1
    merged = params["embedding"]
    for place in range(2):  # tokens 4 and 2 get one code
        merged = merged.at[place * per_place + 4].set(merged[place * per_place + 2])
    same = {"params": {**params, "embedding": merged}}
    one, two = TOKENS.copy(), TOKENS.copy()
    one[0, 1], two[0, 1] = 2, 4
    ones = np.ones_like(SEGMENTS)
    got = [
        call(module, same, inputs_of(module, tokens, ones))[0] for tokens in (one, two)
    ]
    np.testing.assert_array_equal(*got)
    separate = call(module, variables, inputs_of(module, two, ones))[0]
    assert np.abs(separate - got[1]).max() > 1e-3
    weights = np.asarray(state[METRICS]["weights"])
    assert weights.max() < 1 and (weights > 0).all()  # never one row alone
    rows = {tuple(w) for w in np.asarray(inputs_of(module).rows_BTC).reshape(-1, 2)}
    slots = np.asarray(state[METRICS]["slots"])
    assert len(rows) * slots[0, 0].size > 16 >= len(np.unique(slots))


def test_gradient_reaches_codes_query_keys_and_rows(base):
    variables, _, _ = base
    module, inputs = layer(), inputs_of(layer())
    way = jax.random.normal(jax.random.key(7), X.shape)

    @jax.jit
    def loss(params):
        out = module.apply({"params": params}, X, inputs, method="read")
        return jnp.sum(out * way)

    grads = jax.jit(jax.grad(loss))(variables["params"])
    for name in ("embedding", "keys", "table"):
        leaf = variables["params"][name]
        direction = jax.random.normal(jax.random.key(3), leaf.shape)
        ends = [
            float(loss({**variables["params"], name: leaf + h * direction}))
            for h in (2e-3, -2e-3)
        ]
        slope = (ends[0] - ends[1]) / 4e-3
        got = float(jnp.sum(grads[name] * direction))
        assert got == pytest.approx(slope, rel=2e-2, abs=2e-3)
        assert abs(got) > 1e-3
    unread = np.ones(16, bool)
    unread[np.unique(np.asarray(inputs.rows_BTC))] = False
    assert not np.asarray(grads["embedding"])[unread].any()


def test_the_address_loss_spreads_the_reads(base):
    variables, _, _ = base
    module, inputs = layer(address_weight=1.0), inputs_of(layer())

    @jax.jit
    def loss(params):
        _, state = module.apply(
            {"params": params}, X, inputs, method="read", mutable=[LOSSES]
        )
        return state[LOSSES]["address"]

    params = variables["params"]
    before, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert all(np.abs(grads[name]).max() > 1e-4 for name in ("embedding", "keys"))
    assert not np.asarray(grads["table"]).any()
    after = loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    assert after < before
    none = layer(address_weight=0.0)
    assert LOSSES not in call(none, variables, inputs)[1]


def test_tables_by_rows_have_the_dense_gradient(base):
    variables, _, _ = base
    module, inputs = layer(table_mode="rows"), inputs_of(layer())
    params = dict(variables["params"])
    split = {TABLES: {"table": store(params.pop("table"))}, "params": params}

    def loss(variables, module):
        out, state = module.apply(
            variables, X, inputs, method="read", mutable=[READS, LOSSES]
        )
        total = jnp.sum(jnp.sin(out)) + state[LOSSES]["address"]
        return total, state

    want = jax.jit(jax.grad(lambda v: loss(v, layer())[0]))(variables)["params"]
    _, grads = jax.jit(value_and_row_grad(lambda v: loss(v, module)))(split)
    got = dense_gradient(unique_rows(grads.tables["table"], 16, D), 16)
    np.testing.assert_allclose(got, want["table"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads.params["keys"], want["keys"], atol=1e-5)


def test_a_bad_id_is_nan_and_no_other_read_changes(base):
    variables, out, _ = base
    tokens = TOKENS.copy()
    tokens[0, 1] = VOCAB
    bad, state = call(layer(), variables, inputs_of(layer(), tokens))
    assert np.isnan(bad[0, 1:3]).all()
    np.testing.assert_array_equal(bad[1], out[1])
    np.testing.assert_array_equal(bad[0, 3:5], out[0, 3:5])
    assert state[METRICS]["non_finite_scores"] == 2 * 2


def test_bfloat16(base):
    variables, out, _ = base
    low = jax.tree.map(lambda leaf: leaf, variables)
    low["params"] = {**low["params"]}
    low["params"]["table"] = low["params"]["table"].astype(jnp.bfloat16)
    x = X.astype(jnp.bfloat16)
    got, state = call(layer(BFLOAT16), low, inputs_of(layer()), x)
    assert got.dtype == jnp.bfloat16
    assert state[METRICS]["weights"].dtype == jnp.float32
    scale = np.abs(out).max()
    np.testing.assert_allclose(got.astype(np.float32), out, atol=0.1 * scale)


def test_every_field_changes_something(base):
    assert set(CHANGES) == own_fields(NgramKeysConfig)
    variables, out, state = base
    shapes = jax.tree.map(jnp.shape, variables["params"])
    for field, value in CHANGES.items():
        module = layer(**{field: value})
        if jax.tree.map(jnp.shape, filled(module)["params"]) != shapes:
            continue
        if field == "table_std":
            (spec,) = module.config.table_specs(D).values()
            assert spec.std == value
            continue
        other, changed = call(module, variables, inputs_of(module))
        differs = np.abs(other - out).max() > 1e-4
        assert differs or changed[LOSSES] != state[LOSSES], field


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": 1}, r"memories\.k = 1"),
        ({"k": 17}, r"memories\.k = 17"),
        ({"key_width": 3}, r"memories\.key_width = 3"),
        ({"order": 0}, r"memories\.order = 0"),
        ({"activation": "silu"}, r"memories\.activation = 'silu'"),
        ({"gate": "tanh"}, r"memories\.gate = 'tanh'"),
        ({"address_weight": -1.0}, r"memories\.address_weight = -1\.0"),
        ({"value_width": 0}, r"memories\.value_width = 0"),
        ({"table_std": -1.0}, r"memories\.table_std = -1\.0"),
        ({"n_sub_keys": 46341}, "46340"),
    ],
    ids=str,
)
def test_what_is_not_allowed(change, text):
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(BASE, **change)


def test_rows_are_needed(base):
    with pytest.raises(ShapeError, match="rows_BTC"):
        segments = jnp.asarray(SEGMENTS)
        layer().apply(base[0], X, MemoryInputs(segments, segments), method="read")
    with pytest.raises(ConfigError, match=r"memories\.order = 2"):
        BASE.row_layout(2**30 + 2)
