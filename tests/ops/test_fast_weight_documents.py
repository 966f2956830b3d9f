"""A memory for each document: packed, alone, in pieces, always the same numbers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.document_chunks import place_chunks
from memjax.ops.fast_weight_chunk import FastWeightOptions, FastWeights
from memjax.ops.fast_weight_documents import advance, fast_weight_documents, finish
from memjax.ops.fast_weight_memory import initial_state
from memjax.ops.fast_weights import fast_weight_shared
from tests.oracles import fast_weights as oracle

T, H, C, W = 24, 2, 3, 4
RNG = np.random.default_rng(2)
OPTIONS = FastWeightOptions(k=2, chunk=4, lookahead=1, weight_decay=0.03)
# Documents of every length around the chunk, padding inside and at the end.
SEGMENTS = jnp.asarray(
    [
        [1] * 9 + [2] * 4 + [3] * 3 + [4] + [5] * 7,
        [1] * 2 + [2] * 13 + [3] * 5 + [0] * 4,
    ],
    jnp.int32,
)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


# S = 81 slots: more than the 96 writes of a row would need is a dense overlay.
SMALL = FastWeights(normal(H, 2, 9, C), normal(81, W))
LARGE = FastWeights(normal(H, 2, 11, C), normal(121, W))
Q, V = normal(2, T, H * 2 * C), normal(2, T, W)
GATE = jnp.asarray(RNG.uniform(0.1, 1, (2, T)), jnp.float32)

documents = jax.jit(fast_weight_documents, static_argnames="options")
shared = jax.jit(fast_weight_shared, static_argnames="options")
piece = jax.jit(advance, static_argnames="options")
start = jax.jit(initial_state, static_argnums=(1, 2, 3))
close = partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)


def lone(memory, options, row, number):
    """Outputs of one document by the oracle, and where they belong."""
    at = np.flatnonzero(np.asarray(SEGMENTS[row]) == number)
    tokens = (np.asarray(x)[row : row + 1, at] for x in (Q, V, GATE))
    q, v, gate = tokens
    want = oracle.text(*memory, q, v, gate, None, options, short_last=False)
    return at, want


@pytest.mark.parametrize("memory", [SMALL, LARGE], ids=["dense", "log"])
@pytest.mark.parametrize("changes", [{}, {"values_only": False, "grad_clip": True}])
def test_every_document_of_a_row_equals_the_oracle_alone(memory, changes):
    options = replace(OPTIONS, **changes)
    out, trace = documents(memory, Q, V, GATE, SEGMENTS, options)
    for row in range(2):
        losses, address = [], []
        for number in range(1, int(SEGMENTS[row].max()) + 1):
            at, want = lone(memory, options, row, number)
            np.testing.assert_array_equal(trace.reads.slots[row, at], want["slots"][0])
            close(out[row, at], want["out"][0], atol=2e-4)
            losses += [x[0] for x in want["losses"]]
            address += want["address"]
        n = len(address)
        np.testing.assert_array_equal(trace.written_BM[row], np.arange(6) < n)
        close(trace.losses_BMP[row, :n], losses, atol=2e-4)
        close(trace.address_BM[row, :n], address)
        assert not np.any(trace.losses_BMP[row, n:])
    assert not np.any(np.asarray(out)[np.asarray(SEGMENTS) == 0])


def test_p11_a_document_reads_nothing_of_others_in_any_order():
    out, _ = documents(SMALL, Q, V, GATE, SEGMENTS, OPTIONS)
    turned, _ = documents(SMALL, Q[::-1], V[::-1], GATE[::-1], SEGMENTS[::-1], OPTIONS)
    np.testing.assert_array_equal(turned[::-1], out)
    # Document B = 5 of row 0, alone: the others are taken away, then moved first.
    alone, _ = documents(
        SMALL, Q, V, GATE, jnp.where(SEGMENTS == 5, SEGMENTS, 0), OPTIONS
    )
    close(alone[0, 17:], out[0, 17:])
    order = jnp.roll(jnp.arange(T), 7)
    moved, _ = documents(
        SMALL, Q[:, order], V[:, order], GATE[:, order], SEGMENTS[:, order], OPTIONS
    )
    close(moved[0, :7], out[0, 17:])


def test_p11_carrying_over_needs_the_same_document_number():
    a, b = slice(0, 8), slice(8, 16)
    one = jnp.ones((2, 8), jnp.int32)
    state = start(SMALL, 2, 16, OPTIONS)
    _, _, state = piece(SMALL, state, Q[:, a], V[:, a], GATE[:, a], one, OPTIONS)
    rest = (Q[:, b], V[:, b], GATE[:, b])
    carried, _, _ = piece(SMALL, state, *rest, one, OPTIONS)
    fresh, _, after = piece(SMALL, state, *rest, 2 * one, OPTIONS)
    alone, _ = documents(SMALL, *rest, one, OPTIONS)
    close(fresh, alone)
    assert np.all(np.max(np.abs(carried - fresh), axis=-1) > 1e-3)
    _, _, want = piece(SMALL, start(SMALL, 2, 16, OPTIONS), *rest, 2 * one, OPTIONS)
    jax.tree.map(close, after, want)


def test_p12_an_update_is_read_by_later_chunks_only():
    """One chunk of 8 tokens, the last one changed: nothing before it moves."""
    options = replace(OPTIONS, chunk=8)
    before, _ = documents(SMALL, Q, V, GATE, SEGMENTS * 0 + 1, options)
    after, _ = documents(
        SMALL,
        Q.at[:, 7].add(1),
        V.at[:, 7].add(1),
        GATE.at[:, 7].multiply(0.5),
        SEGMENTS * 0 + 1,
        options,
    )
    np.testing.assert_array_equal(after[:, :7], before[:, :7])
    assert np.all(np.max(np.abs(after - before)[:, 8:16], axis=(1, 2)) > 1e-3)


def test_causality_by_gradient():
    """An output depends on earlier chunks of its document and on its own query."""

    @jax.jit
    def jacobian(memory, q, v, gate):
        def outputs(tokens):
            out, _ = fast_weight_documents(
                memory, *tokens, SEGMENTS[:1], replace(OPTIONS, values_only=False)
            )
            return jnp.sum(out, axis=-1)[0]

        bars = jax.jacrev(outputs)((q, v, gate))
        return [jnp.sum(jnp.abs(bar[:, 0]).reshape(T, T, -1), axis=-1) for bar in bars]

    q_bar, v_bar, gate_bar = jacobian(LARGE, Q[:1], V[:1], GATE[:1])
    segments = np.asarray(SEGMENTS[0])
    begin = np.array([np.flatnonzero(segments == s)[0] for s in segments])
    chunk = (np.arange(T) - begin) // OPTIONS.chunk
    same = segments[:, None] == segments
    earlier = same & (chunk[:, None] > chunk)
    assert not np.any(q_bar[~(earlier | np.eye(T, dtype=bool))])
    assert not np.any(v_bar[~earlier]) and not np.any(gate_bar[~earlier])
    # The last token of a chunk has no target, the first one is nobody's.
    within = (np.arange(T) - begin) % OPTIONS.chunk
    # A later token need not read a slot that this one wrote, but many do.
    assert np.mean(q_bar[earlier] > 0) > 0.5
    assert np.mean(gate_bar[earlier & (within < 3)] > 0) > 0.5
    assert np.mean(v_bar[earlier & (within > 0)] > 0) > 0.5
    assert not np.any(gate_bar[:, within == 3]) and not np.any(v_bar[:, within == 0])


@pytest.mark.parametrize("memory", [SMALL, LARGE], ids=["dense", "log"])
def test_any_cutting_gives_the_same_outputs_and_state(memory):
    whole = piece(memory, start(memory, 2, T, OPTIONS), Q, V, GATE, SEGMENTS, OPTIONS)
    close(whole[0], documents(memory, Q, V, GATE, SEGMENTS, OPTIONS)[0])
    for cuts in (range(1, T), (3, 10, 17)):
        state, parts = start(memory, 2, T, OPTIONS), []
        for a, b in zip((0, *cuts), (*cuts, T), strict=True):
            tokens = (x[:, a:b] for x in (Q, V, GATE, SEGMENTS))
            out, _, state = piece(memory, state, *tokens, OPTIONS)
            parts.append(out)
        close(jnp.concatenate(parts, axis=1), whole[0])
        jax.tree.map(close, state, whole[2])


def test_padding_anywhere_changes_nothing():
    """Rows of one batch may get pieces of different length, or none at all."""
    state, want = start(LARGE, 2, T, OPTIONS), start(LARGE, 2, T, OPTIONS)
    segments = jnp.ones((2, 7), jnp.int32)
    for keep in ([0, 1, 4, 5, 6], [], [2, 3, 6]):
        some = jnp.zeros((2, 7), jnp.int32).at[:, jnp.array(keep, int)].set(1)
        out, _, state = piece(
            LARGE, state, Q[:, :7], V[:, :7], GATE[:, :7], some, OPTIONS
        )
        assert not np.any(np.asarray(out)[np.asarray(some) == 0])
        for t in keep:
            at = slice(t, t + 1)
            one, _, want = piece(
                LARGE, want, Q[:, at], V[:, at], GATE[:, at], segments[:, :1], OPTIONS
            )
            close(out[:, at], one)
    jax.tree.map(close, state, want)


def test_finish_writes_what_the_batch_form_writes_at_its_end():
    options = replace(OPTIONS, values_only=False)
    one = jnp.ones((1, 11), jnp.int32)
    tokens = (Q[:1, :11], V[:1, :11], GATE[:1, :11])
    want, after, _ = shared(LARGE, *tokens, options)
    state = start(LARGE, 1, 16, options)
    out, _, state = piece(LARGE, state, *tokens, one, options)
    close(out, want)
    ended = jax.jit(finish, static_argnames="options")(LARGE, state, options)
    close(ended.memory.keys_HXNC[0], after.keys_HXNC)
    probe = (Q[1:, :11], V[1:, :11], GATE[1:, :11])
    got, _, _ = piece(LARGE, ended, *probe, one, options)
    close(got[:, :4], shared(after, *probe, options)[0][:, :4])
    assert int(ended.count[0]) == 0
    again = jax.jit(finish, static_argnames="options")(LARGE, ended, options)
    jax.tree.map(np.testing.assert_array_equal, again, ended)


def test_gradients_equal_those_of_the_batch_form():
    """Whose gradients are checked against recorded and numeric ones."""
    options = replace(OPTIONS, values_only=False)
    weigh = normal(1, T, W)

    def loss(form, inputs):
        memory, *tokens = inputs
        if form is fast_weight_documents:
            out = form(memory, *tokens, jnp.ones((1, T), jnp.int32), options)[0]
        else:
            out = form(memory, *tokens, options)[0]
        return jnp.sum(out * weigh)

    inputs = (LARGE, Q[:1], V[:1], GATE[:1])
    got, want = (
        jax.jit(jax.grad(partial(loss, form)))(inputs)
        for form in (fast_weight_documents, fast_weight_shared)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(a, b, atol=1e-4 * float(jnp.max(jnp.abs(b))), rtol=1e-3)


def test_more_tokens_than_the_state_holds_are_nan():
    options = replace(OPTIONS, chunk=2, weight_decay=0.0)
    state = start(LARGE, 2, 4, options)
    one = jnp.ones((2, 8), jnp.int32)
    tokens = (Q[:, :8], V[:, :8], GATE[:, :8])
    out, _, _ = piece(LARGE, state, *tokens, one, options)
    assert np.isfinite(out[:, :6]).all() and np.isnan(out[:, 6:]).all()


def test_a_nan_stays_in_its_document():
    """P04: its own later outputs are NaN, all others are bit-equal."""
    bad, _ = documents(SMALL, Q.at[0, 1, 0].set(jnp.nan), V, GATE, SEGMENTS, OPTIONS)
    good, _ = documents(SMALL, Q, V, GATE, SEGMENTS, OPTIONS)
    assert np.isnan(bad[0, 1]).all()
    other = np.arange(T) > 8
    np.testing.assert_array_equal(bad[0, other], good[0, other])
    np.testing.assert_array_equal(bad[1], good[1])


def test_temporary_memory_is_smaller_than_the_table():
    """Shapes only: 65536 slots, 17 MB of values; a step with its gradients needs 3."""
    n, width = 256, 64
    options = FastWeightOptions(k=2, chunk=8)

    def loss(q, v, gate, memory):
        segments = jnp.ones((2, 32), jnp.int32)
        out, _ = fast_weight_documents(memory, q, v, gate, segments, options)
        return jnp.sum(out**2)

    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    memory = FastWeights(shape((1, 2, n, 4)), shape((n * n, width)))
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    q, v, gate = shape((2, 32, 8)), shape((2, 32, width)), shape((2, 32))
    analysis = step.lower(q, v, gate, memory).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < n * n * width * 4 / 4


def test_chunks_are_counted_from_the_start_of_each_document():
    places = place_chunks(jnp.array([7] * 5 + [2] * 2 + [3] * 4 + [0]), 2)
    np.testing.assert_array_equal(
        places.position_R, [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 0]
    )
    np.testing.assert_array_equal(places.starts_M, [0, 2, 5, 7, 9, 12])
    np.testing.assert_array_equal(
        places.after_R, [-1, -1, 0, 0, 1, -1, -1, -1, -1, 3, 3, -1]
    )


def test_errors_say_what_is_wrong():
    with pytest.raises(ShapeError, match="segments_BT has shape"):
        fast_weight_documents(SMALL, Q, V, GATE, SEGMENTS[:1], OPTIONS)
    with pytest.raises(ConfigError, match="max_tokens = 0"):
        initial_state(SMALL, 2, 0, OPTIONS)
    with pytest.raises(ShapeError, match="state has shape"):
        advance(SMALL, start(SMALL, 3, 4, OPTIONS), Q, V, GATE, SEGMENTS, OPTIONS)
    with pytest.raises(ConfigError, match="k = 82"):
        fast_weight_documents(SMALL, Q, V, GATE, SEGMENTS, replace(OPTIONS, k=82))
