"""One memory for a batch: equal to the oracle with every option, and its edges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.fast_weight_chunk import FastWeightOptions, FastWeights
from memjax.ops.fast_weights import fast_weight_shared
from tests.oracles import fast_weights as oracle

B, T, H, N, C, W = 2, 11, 2, 5, 3, 4
RNG = np.random.default_rng(1)
BASE = FastWeightOptions(k=3, chunk=4, lookahead=1)


def normal(*shape, scale=1.0):
    return jnp.asarray(scale * RNG.normal(size=shape), jnp.float32)


MEMORY = FastWeights(normal(H, 2, N, C), normal(N * N, W))
Q, V = normal(B, T, H * 2 * C), normal(B, T, W)
GATE = jnp.asarray(RNG.uniform(0.1, 1, (B, T)), jnp.float32)
MASK = jnp.asarray(RNG.uniform(size=(B, T)) < 0.7)


@partial(jax.jit, static_argnames="options")
def run(memory, q, v, gate, options, mask=None):
    return fast_weight_shared(memory, q, v, gate, options, mask=mask)


@pytest.mark.parametrize(
    ("changes", "masked"),
    [
        ({}, False),
        ({"score": "dot", "activation": "silu", "lookahead": 0}, True),
        ({"values_only": False, "activation": "relu", "lookahead": 2}, False),
        ({"values_only": False, "address_weight": None, "temperature": 0.6}, True),
        ({"grad_clip": True, "weight_decay": 0.02, "learning_rate": 0.5}, False),
        ({"rule": "contractive", "address_weight": 0.3}, True),
        (
            {
                "values_only": False,
                "activation": "silu",
                "score": "dot",
                "k": 9,
                "learning_rate": 0.05,
            },
            False,
        ),
        ({"lookahead": 4, "grad_clip": True}, False),
    ],
)
def test_equals_the_oracle(changes, masked):
    options = replace(BASE, **changes)
    mask = MASK if masked else None
    out, after, trace = run(MEMORY, Q, V, GATE, options, mask)
    want = oracle.text(*MEMORY, Q, V, GATE, mask, options, short_last=True)
    close = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(trace.reads.slots, want["slots"])
    close(out, want["out"])
    close(after.keys_HXNC, want["keys"])
    close(after.values_SW, want["values"])
    close(trace.losses_BP, np.concatenate(want["losses"], axis=1))
    close(trace.address_M, want["address"])


def test_pieces_cut_at_chunks_equal_the_whole():
    whole, after, _ = run(MEMORY, Q, V, GATE, BASE)
    memory, parts = MEMORY, []
    for start in (0, 4, 8):
        piece = slice(start, start + 4)
        out, memory, _ = run(memory, Q[:, piece], V[:, piece], GATE[:, piece], BASE)
        parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), memory, after)


def test_a_chunk_without_pairs_writes_no_values_and_jit_equals_no_jit():
    options = replace(BASE, lookahead=3, values_only=False)
    short = (Q[:, :3], V[:, :3], GATE[:, :3])
    got = fast_weight_shared(MEMORY, *short, options)
    _, after, trace = got
    np.testing.assert_array_equal(after.values_SW, MEMORY.values_SW)
    assert trace.losses_BP.shape == (B, 0)
    assert np.any(np.asarray(after.keys_HXNC) != MEMORY.keys_HXNC)
    jitted = run(MEMORY, *short, options)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), got, jitted)


def test_all_tokens_masked_write_nothing():
    options = replace(BASE, address_weight=0)
    _, after, _ = run(MEMORY, Q, V, GATE, options, jnp.zeros((B, T), bool))
    jax.tree.map(np.testing.assert_array_equal, after, MEMORY)


def test_outer_gradients_equal_finite_differences():
    """Also through the keys' own update, which is a gradient of a gradient."""
    options = replace(BASE, values_only=False, temperature=2.0)
    weigh = normal(B, T, W)

    @jax.jit
    def loss(inputs):
        memory, q, v, gate = inputs
        return jnp.sum(fast_weight_shared(memory, q, v, gate, options)[0] * weigh)

    inputs = (MEMORY, Q, V, GATE)
    gradient = jax.jit(jax.grad(loss))(inputs)
    for part in range(5):
        leaves, tree = jax.tree.flatten(inputs)
        bars = jax.tree.leaves(gradient)
        way = np.asarray(RNG.normal(size=leaves[part].shape), np.float32)
        step = 1e-3 / np.linalg.norm(way)

        def at(amount, part=part, way=way, leaves=leaves, tree=tree):
            moved = list(leaves)
            moved[part] = leaves[part] + amount * way
            return float(loss(jax.tree.unflatten(tree, moved)))

        numeric = (at(step) - at(-step)) / (2 * step)
        exact = float(np.sum(np.asarray(bars[part]) * way))
        np.testing.assert_allclose(exact, numeric, rtol=3e-2, atol=0.05)


def test_bfloat16_is_read_and_written_in_float32():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (MEMORY, Q, V, GATE))
    out, after, _ = run(*narrow, BASE)
    assert out.dtype == after.values_SW.dtype == after.keys_HXNC.dtype == jnp.float32
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    np.testing.assert_allclose(out, run(*wide, BASE)[0], atol=1e-5)


def test_the_second_call_compiles_nothing():
    run(MEMORY, Q, V, GATE, BASE)
    before = run._cache_size()
    run(MEMORY, Q + 1, V, GATE, replace(BASE))
    assert run._cache_size() == before


def test_a_nan_query_is_seen():
    """P04: never a believable number; here all rows share the memory afterwards."""
    out, _, trace = run(MEMORY, Q.at[0, 1, 0].set(jnp.nan), V, GATE, BASE)
    assert np.isnan(out[0, 1]).all()
    assert np.isnan(trace.reads.scores[0, 1, 0]).all()
    first = np.arange(T) < 4
    alone, _, _ = run(MEMORY, Q, V, GATE, BASE)
    np.testing.assert_array_equal(out[1, first], alone[1, first])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "cosine"}, "score = 'cosine'"),
        ({"activation": "gelu"}, "activation = 'gelu'"),
        ({"rule": "sgd"}, "rule = 'sgd'"),
        ({"chunk": 0}, "chunk = 0"),
        ({"lookahead": -1}, "lookahead = -1"),
        ({"k": 0}, "k = 0"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0"),
        ({"address_weight": float("inf")}, "address_weight = inf"),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(BASE, **changes)


def test_shapes_that_do_not_fit():
    with pytest.raises(ConfigError, match="k = 26"):
        fast_weight_shared(MEMORY, Q, V, GATE, replace(BASE, k=26))
    with pytest.raises(ShapeError, match=r"q has shape \(2, 11, 11\)"):
        fast_weight_shared(MEMORY, Q[..., 1:], V, GATE, BASE)
    with pytest.raises(ShapeError, match="v has shape"):
        fast_weight_shared(MEMORY, Q, V[:, 1:], GATE, BASE)
    with pytest.raises(ShapeError, match="mask has shape"):
        fast_weight_shared(MEMORY, Q, V, GATE, BASE, mask=MASK[:1])
    with pytest.raises(ShapeError, match="values_SW has shape"):
        fast_weight_shared(MEMORY._replace(values_SW=V[0]), Q, V, GATE, BASE)
