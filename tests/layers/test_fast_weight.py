"""The fast-weight layer: parameters, options, documents, carried state, records."""

from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.layers.fast_weight import FAST_WEIGHTS, FastWeightMemory, l2_norm, z_score
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.layers.memory import MemoryConfig, MemoryInputs
from memjax.layers.precision import Dtypes
from memjax.layers.record import METRICS
from memjax.ops.fast_weight_chunk import FastWeightOptions

B, T, D = 2, 9, 6
DTYPES = Dtypes(*(jnp.float32,) * 4)
BASE = FastWeightConfig(
    n_sub_keys=4, key_width=4, value_width=3, n_heads=2, k=2, chunk=2, gate_outputs=2
)
# Documents of one short chunk: nothing is written, and little is compiled.
QUIET = replace(BASE, chunk=16)
SHARED = replace(BASE, state="shared", initial="fixed")
RNG = np.random.default_rng(4)
X = jnp.asarray(RNG.normal(size=(B, T, D)), jnp.float32)
SEGMENTS = jnp.asarray([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2], jnp.int32)


def inputs_of(segments):
    return MemoryInputs(segments, jnp.zeros_like(segments))


def filled(config, dtypes=DTYPES):
    """Variables, biases too, drawn alike for all configs of the same shapes."""
    layer = FastWeightMemory(config, dtypes)
    shapes = jax.eval_shape(
        partial(layer.init, method="read"),
        jax.random.key(0),
        X,
        inputs_of(SEGMENTS),
    )
    shapes = {k: v for k, v in shapes.items() if k in ("params", FAST_WEIGHTS)}
    rng = np.random.default_rng(5)
    return jax.tree.map(
        lambda x: jnp.asarray(0.7 * rng.normal(size=x.shape), x.dtype), shapes
    )


@partial(jax.jit, static_argnums=(0,), static_argnames=("train", "drop", "carry"))
def apply(config, variables, x, segments, *, train=False, drop=False, carry=False):
    out, state = FastWeightMemory(config, DTYPES).apply(
        variables,
        x,
        inputs_of(segments),
        train=train,
        drop=drop,
        method="read",
        mutable=[METRICS, FAST_WEIGHTS] if carry else [METRICS],
        rngs={"dropout": jax.random.key(3)} if train else {},
    )
    return out, state[METRICS], state.get(FAST_WEIGHTS)


def read(config, x=X, segments=SEGMENTS, **options):
    return apply(config, filled(config), x, segments, **options)


CHANGES = {
    "n_sub_keys": 5,
    "key_width": 6,
    "value_width": 4,
    "n_heads": 1,
    "gated_loss": False,
    "query_norm": "l2",
    "target_zscore": False,
    "fuse": "sum",
    "gate_outputs": 3,
    "norm_eps": 0.5,
    "state": "shared",
    "mode": "capped",
}


WRITTEN = ("gated_loss", "state")


@pytest.fixture(scope="module")
def base():
    return np.asarray(read(BASE)[0])


@pytest.fixture(scope="module")
def quiet():
    return np.asarray(read(QUIET)[0])


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_the_output_or_the_parameters(field, base, quiet):
    changes = {field: CHANGES[field]}
    if field == "state":
        changes["initial"] = "fixed"
    before, want = (BASE, base) if field in WRITTEN else (QUIET, quiet)
    config = replace(before, **changes)
    variables = filled(config)
    shapes = partial(jax.tree.map, jnp.shape)
    if shapes(variables) == shapes(filled(before)):
        out = apply(config, variables, X, SEGMENTS)[0]
        assert np.max(np.abs(out - want)) > 1e-4


def test_every_setting_reaches_the_mathematics():
    changes = {
        "k": 3,
        "chunk": 5,
        "lookahead": 0,
        "score": "dot",
        "activation": "relu",
        "temperature": 2.0,
        "learning_rate": 0.5,
        "weight_decay": 0.1,
        "grad_clip": True,
        "address_weight": None,
        "values_only": False,
        "rule": "contractive",
    }
    assert set(changes) == {field.name for field in fields(FastWeightOptions)}
    for name, value in changes.items():
        assert getattr(replace(BASE, **{name: value}).options, name) == value
    elsewhere = {field.name for field in fields(MemoryConfig)} - {"mode"}
    own = {field.name for field in fields(FastWeightConfig)} - elsewhere
    # Tested below: who learns the memory, and what padding writes.
    assert own - set(CHANGES) - set(changes) == {"initial", "mask_padding"}


def test_parameters_and_where_the_memory_lives():
    memory = {"keys": (2, 2, 4, 2), "table": (16, 3)}
    shapes = jax.tree.map(jnp.shape, filled(BASE))
    assert {name: shapes["params"].pop(name) for name in memory} == memory
    linears = {"query": (D, 8), "value": (D, 3), "token_gate": (D, 2), "out": (3, D)}
    for name, shape in linears.items():
        assert shapes["params"].pop(name) == {"kernel": shape, "bias": shape[1:]}
        assert shapes["params"].pop(f"{name}_norm") == {"scale": shape[:1]}
    assert shapes == {"params": {}}
    fixed = filled(replace(BASE, initial="fixed"))["params"]
    assert "fixed_keys" in fixed and "fixed_table" in fixed
    carried = filled(SHARED)
    assert "keys" not in carried["params"] and "table" not in carried["params"]
    shapes = jax.tree.map(jnp.shape, carried[FAST_WEIGHTS])
    assert shapes == {"keys": (2, 2, 4, 2), "values": (16, 3)}
    assert list(BASE.table_specs(D)) == ["table"]
    (spec,) = replace(BASE, initial="fixed").table_specs(D).values()
    assert (spec.n_rows, spec.width, spec.reads) == (16, 3, 4)


def test_initial_values():
    config = replace(BASE, n_sub_keys=32, key_width=16, value_width=64)
    for state in ({}, {"state": "shared", "initial": "fixed"}):
        layer = FastWeightMemory(replace(config, **state), DTYPES)
        init = jax.jit(partial(layer.init, method="read"))
        drawn = init(jax.random.key(0), X[:1, :1], inputs_of(SEGMENTS[:1, :1]))
        tree = drawn[FAST_WEIGHTS] if state else drawn["params"]
        keys, values = tree["keys"], tree["values" if state else "table"]
        assert 0.24 < np.max(np.abs(keys)) <= 0.25
        np.testing.assert_allclose(np.std(values), 1 / 8, rtol=0.02)


@pytest.mark.parametrize("initial", ["learned", "fixed"])
def test_who_learns_the_initial_memory(initial):
    config = replace(BASE, initial=initial)
    prefix = "" if initial == "learned" else "fixed_"
    other = filled(BASE)["params"]
    params = filled(config)["params"]
    # The same numbers under both names.
    params = {name: other[name.removeprefix("fixed_")] for name in params}

    @jax.jit
    def graded(params):
        def loss(params):
            return jnp.sum(apply(config, {"params": params}, X, SEGMENTS)[0] ** 2)

        return jax.value_and_grad(loss)(params)

    value, grads = graded(params)
    np.testing.assert_allclose(value, np.sum(np.asarray(read(BASE)[0]) ** 2), rtol=1e-5)
    for name in ("keys", "table"):
        moved = np.any(np.asarray(grads[prefix + name]) != 0)
        assert moved == (initial == "learned")
    assert all(
        np.any(grads[n]["kernel"] != 0) for n in ("query", "value", "token_gate")
    )


def test_dropped_reads_are_the_residual_bit_for_bit():
    assert not np.any(read(QUIET, drop=True)[0])
    dropped, _, _ = read(replace(QUIET, dropout=0.999), train=True)
    assert not np.any(dropped)
    convex = replace(QUIET, mode="convex")
    params = filled(convex)["params"]
    dense = np.asarray(X @ params["dense"]["kernel"])
    got, _, _ = read(convex, drop=True)
    np.testing.assert_allclose(got, dense, atol=1e-5)


def test_p11_documents_do_not_see_their_neighbours(base):
    """P11: B after A equals B alone, and the order of the batch does not matter."""
    turned, _, _ = read(BASE, X[::-1], SEGMENTS[::-1])
    np.testing.assert_array_equal(turned[::-1], base)
    alone, _, _ = read(BASE, jnp.roll(X, -5, axis=1), jnp.roll(SEGMENTS, -5, axis=1))
    np.testing.assert_allclose(alone[0, :4], base[0, 5:], atol=1e-5)
    other = read(BASE, X.at[0, :5].add(1))[0]
    np.testing.assert_allclose(other[0, 5:], base[0, 5:], atol=1e-5)


def test_p11_a_shared_state_is_an_explicit_choice_and_couples_the_batch():
    with pytest.raises(ConfigError, match="'fixed' when state = 'shared'"):
        replace(BASE, state="shared")
    plain = read(SHARED)[0]
    moved = read(SHARED, X.at[0, :2].add(1))[0]
    assert np.any(moved[1] != plain[1])


def test_p12_and_causality():
    """The first token of a document's next chunk sees a change, the same chunk none."""
    config = replace(BASE, chunk=8)
    x = jnp.concatenate([X, X], axis=1)
    segments = jnp.ones((B, 2 * T), jnp.int32)
    before = read(config, x, segments)[0]
    after = read(config, x.at[:, 7].add(1), segments)[0]
    np.testing.assert_array_equal(after[:, :7], before[:, :7])
    assert np.all(np.max(np.abs(after - before)[:, 8:16], axis=(1, 2)) > 1e-4)


def test_the_shared_state_changes_in_training_only():
    variables = filled(SHARED)
    out, _, state = apply(SHARED, variables, X, SEGMENTS, train=True, carry=True)
    assert np.any(state["values"] != variables[FAST_WEIGHTS]["values"])
    assert np.any(state["keys"] != variables[FAST_WEIGHTS]["keys"])
    same, _, kept = apply(SHARED, variables, X, SEGMENTS, carry=True)
    np.testing.assert_array_equal(same, out)
    jax.tree.map(np.testing.assert_array_equal, kept, variables[FAST_WEIGHTS])
    assert apply(SHARED, variables, X, SEGMENTS, train=True)[2] is None
    carried = {**variables, FAST_WEIGHTS: state}
    assert np.any(apply(SHARED, carried, X, SEGMENTS)[0] != out)
    # Nothing is written while the variables are made.
    layer = FastWeightMemory(SHARED, DTYPES)
    init = jax.jit(partial(layer.init, method="read", train=True))
    twice = [init(jax.random.key(0), x, inputs_of(SEGMENTS)) for x in (X, 2 * X)]
    jax.tree.map(np.testing.assert_array_equal, *(v[FAST_WEIGHTS] for v in twice))


def test_masked_padding_writes_nothing():
    masked = replace(SHARED, mask_padding=True, address_weight=0)
    padding = SEGMENTS.at[0].set(0)
    variables = filled(masked)
    options = {"train": True, "carry": True}
    _, _, state = apply(masked, variables, X, padding * 0, **options)
    jax.tree.map(np.testing.assert_array_equal, state, variables[FAST_WEIGHTS])
    _, _, some = apply(masked, variables, X, padding, **options)
    plain = replace(masked, mask_padding=False)
    _, _, everything = apply(plain, variables, X, padding, **options)
    assert np.any(some["values"] != everything["values"])
    with pytest.raises(ConfigError, match="padding belongs to no document"):
        replace(BASE, mask_padding=True)


def test_records():
    _, records, _ = read(BASE, X.at[1, 0].set(jnp.nan).at[1, 8].set(jnp.nan))
    assert records["slots"].shape == records["weights"].shape == (B, T, 2, 2)
    assert records["slots"].dtype == jnp.int32
    # Padding is not counted; the document of the NaN is ill to its end.
    assert 2 <= records["non_finite_scores"] <= 14
    _, records, _ = read(BASE)
    assert records["non_finite_scores"] == 0
    gate = np.asarray(records["gate"])
    assert gate.shape == (B, T) and np.ptp(gate) > 0.01
    np.testing.assert_allclose(np.sum(records["weights"], axis=(-2, -1)), 1, atol=1e-6)
    assert records["inner_loss"] > 0 and records["address_loss"] < 0
    _, short, _ = read(QUIET)
    assert short["inner_loss"] == short["address_loss"] == 0


def test_bfloat16_streams():
    dtypes = Dtypes(jnp.float32, jnp.bfloat16, jnp.float32, jnp.float32)
    layer = FastWeightMemory(SHARED, dtypes)
    out = jax.jit(partial(layer.apply, method="read"))(
        filled(SHARED), X.astype(jnp.bfloat16), inputs_of(SEGMENTS)
    )
    assert out.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(out, np.float32)).all()


def test_normalisers():
    x = jnp.array([[1.0, 2.0, 6.0], [2.0, 2.0, 2.0]])
    got = z_score(x)
    np.testing.assert_allclose(got[0], (x[0] - 3) / (np.sqrt(7.0) + 1e-6), rtol=1e-6)
    assert not np.any(got[1])
    slope = jax.grad(lambda x: jnp.sum(z_score(x) * jnp.arange(3.0)))(x)
    assert np.isfinite(slope).all()
    np.testing.assert_allclose(l2_norm(x)[0], x[0] / np.sqrt(41 + 1e-6), rtol=1e-6)
    assert not np.any(l2_norm(0 * x))


def test_flops_count_scores_and_rows():
    # 2 * H * N * key_width multiply-adds of scores, 2 * H * K * W of rows, per use.
    scores, rows = 2 * 2 * 4 * 4, 2 * 2 * 2 * 3
    assert BASE.flops_per_token == 4 * scores + 3 * rows
    assert SHARED.flops_per_token == 3 * scores + 2 * rows
    quiet = replace(BASE, address_weight=None)
    assert quiet.flops_per_token == 2 * scores + 3 * rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_sub_keys": 46341}, "memories.n_sub_keys = 46341"),
        ({"k": 17}, "memories.k = 17 is not allowed: 1 to 16"),
        ({"k": 0}, "memories.k = 0"),
        ({"key_width": 5}, "memories.key_width = 5"),
        ({"value_width": 1}, "memories.value_width = 1"),
        ({"n_heads": 0}, "memories.n_heads = 0"),
        ({"gate_outputs": 0}, "memories.gate_outputs = 0"),
        ({"chunk": 0}, "memories.chunk = 0"),
        ({"lookahead": -1}, "memories.lookahead = -1"),
        ({"score": "cosine"}, "memories.score = 'cosine'"),
        ({"rule": "sgd"}, "memories.rule = 'sgd'"),
        ({"temperature": 0.0}, "memories.temperature = 0.0"),
        ({"query_norm": "rms"}, "memories.query_norm = 'rms'"),
        ({"fuse": "mean"}, "memories.fuse = 'mean'"),
        ({"state": "row"}, "memories.state = 'row'"),
        ({"initial": "zero"}, "memories.initial = 'zero'"),
        ({"norm_eps": 0.0}, "memories.norm_eps = 0.0"),
        ({"table_mode": "rows"}, "memories.table_mode = 'rows'"),
        ({"shared_table": "pool"}, "memories.shared_table = 'pool'"),
        ({"gated_loss": 3}, "memories.gated_loss = 3"),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(BASE, **changes)
