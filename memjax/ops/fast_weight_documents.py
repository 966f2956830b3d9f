"""Fast weights with one memory for each document, whole or in pieces.

What: `fast_weight_documents` for rows of packed documents; `advance` and `finish` for
    texts that come in pieces.
Why: a document's reads must not depend on its neighbours, its batch, or on how the text
    was cut; and a copy of the values for each document would be too large.
When not: the published form, one memory for everything; see `fast_weights`.

One semantics: token t of a document belongs to chunk t // c. It reads the state that
the chunks before its own left, and a chunk is written when all its c tokens are there.
Values are the shared initial table and an `Overlay` of the rows a document wrote.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax.errors import ShapeError
from memjax.ops.document_chunks import ChunkPlaces, place_chunks
from memjax.ops.embedding_bag import gather_rows
from memjax.ops.fast_weight_chunk import (
    FastWeightOptions,
    FastWeights,
    Reads,
    read_chunk,
)
from memjax.ops.fast_weight_memory import (
    DocumentState,
    Memory,
    Tokens,
    empty_memory,
    forget,
    n_reads,
    read_memory,
    write_memory,
)
from memjax.ops.fast_weights import (
    check_memory,
    check_tokens,
    half_queries,
    wide_dtype,
)


class DocumentTrace(NamedTuple):
    """What happened to a piece.

    Attributes:
        reads: of every token, [B, T, ...]; padding reads the initial memory.
        losses_BMP: of the pairs of each written chunk, as in `Writes`; 0 where there is
            no chunk.
        address_BM: address loss of each written chunk, or 0.
        written_BM: bool, which of the M places hold a chunk.
    """

    reads: Reads
    losses_BMP: Array
    address_BM: Array
    written_BM: Array


def fast_weight_documents(
    initial: FastWeights,
    q: Array,
    v: Array,
    gate: Array | None,
    segments_BT: Array,
    options: FastWeightOptions,
) -> tuple[Array, DocumentTrace]:
    """Reads of rows that hold one or several documents each, all starting afresh.

    Args:
        initial: the memory a document begins with. Only rows that are read are read.
        q: [B, T, H * 2 * C], v: [B, T, W], gate: [B, T] or None (ones).
        segments_BT: int32, the document of each token inside its row; 0 is padding.
            Tokens of a document follow each other (padding between them is skipped).

    Returns:
        out [B, T, W] in float32 or wider, 0 at padding; the trace. A document has the
        outputs it would have alone.

    Raises:
        ShapeError, ConfigError: as `check_memory`; arrays of other shapes.

    Cost: every token is read twice at most, once from the initial memory (in parallel)
        and once from its document's (chunk by chunk, T // c steps). Beside the table a
        row needs T * H * K rows of width W. All gradients are exact, through all
        chunks, and keep the rows that were read, not the overlay of every step.

    Source: arXiv:2601.00671; the state for each document is ours.
    """
    check_memory(initial, options)
    check_tokens(initial, q, v, gate, None)
    _check_segments(q, segments_BT)
    capacity = q.shape[1] // options.chunk * options.chunk * n_reads(initial, options)
    tokens = _tokens(initial, q, v, gate)
    row = partial(_row, initial, capacity, None, options=options)
    out, trace, _ = jax.vmap(row)(tokens, segments_BT)
    return out, trace


def advance(
    initial: FastWeights,
    state: DocumentState,
    q: Array,
    v: Array,
    gate: Array | None,
    segments_BT: Array,
    options: FastWeightOptions,
) -> tuple[Array, DocumentTrace, DocumentState]:
    """Read a piece of text after what `state` has seen.

    A row goes on with the document of its state while the segment numbers say so;
    another number begins a new document, which forgets everything. Any cutting of a
    text into pieces gives the same outputs and the same state. Padding (segment 0) may
    stand anywhere and changes nothing.

    Args, returns, errors: as `fast_weight_documents`; and the new state.
    Cost: two reads of every token; where no row completes a chunk, nothing is written.
    """
    check_memory(initial, options)
    check_tokens(initial, q, v, gate, None)
    _check_segments(q, segments_BT)
    if state.segment.shape != q.shape[:1]:
        raise ShapeError("state", state.segment.shape, q.shape[:1])
    tokens = _tokens(initial, q, v, gate)

    def rows(writes: bool) -> Any:
        return jax.vmap(partial(_row, initial, 0, options=options, writes=writes))

    # Most single tokens complete no chunk; the write is then left out.
    n_tokens_B = state.count + jnp.sum(segments_BT > 0, axis=1)
    some = jnp.any(n_tokens_B >= options.chunk)
    return lax.cond(some, rows(True), rows(False), state, tokens, segments_BT)


def finish(
    initial: FastWeights, state: DocumentState, options: FastWeightOptions
) -> DocumentState:
    """Write the pending tokens as a short chunk, as the reference does at its end.

    The document may go on; its next token begins a chunk. A row without pending tokens
    is left as it is. The short chunk takes the place of a whole one in `max_tokens`.
    """
    if options.chunk == 1:
        return state

    def row(state: DocumentState) -> DocumentState:
        real_c = jnp.arange(options.chunk - 1) < state.count
        memory = state.memory
        some = state.count > 0
        memory, *_ = write_memory(initial, memory, state.pending, some, options, real_c)
        return state._replace(memory=memory, count=jnp.zeros_like(state.count))

    return jax.vmap(row)(state)


def _row(
    initial: FastWeights,
    capacity: int,
    state: DocumentState | None,
    tokens: tuple[Array, Array, Array],
    segments_T: Array,
    *,
    options: FastWeightOptions,
    writes: bool = True,
) -> tuple[Array, DocumentTrace, DocumentState | None]:
    """One row: pending tokens and piece in one line, then its chunks in order.

    `writes` False: there are too few tokens for a whole chunk.
    """
    reads = _first_reads(initial, state, tokens[0], segments_T, options)
    line, segments_R = Tokens(*tokens, reads), segments_T
    if state is not None:
        waiting = jnp.arange(options.chunk - 1) < state.count
        segments_R = jnp.concatenate([waiting * state.segment, segments_T])
        line = jax.tree.map(lambda *two: jnp.concatenate(two), state.pending, line)
    # Padding goes to the end, so that the tokens of a document are neighbours.
    order_R = jnp.argsort(segments_R == 0, stable=True)
    line, segments_R = jax.tree.map(lambda x: x[order_R], (line, segments_R))
    places = place_chunks(segments_R, options.chunk)
    if state is None:
        memory = empty_memory(initial, capacity, line.v.dtype)
        goes_on = jnp.zeros((), bool)
    else:
        memory, goes_on = state.memory, segments_R[0] == state.segment
    if writes and places.starts_M.size:
        reads, memory, trace = _chunks(initial, memory, goes_on, line, places, options)
    else:
        reads, trace = line.reads, _no_chunks(line, places, options)
    back_T = jnp.argsort(order_R)[-segments_T.size :]
    trace = trace._replace(reads=jax.tree.map(lambda x: x[back_T], reads))
    out = jnp.where(segments_T[:, None] > 0, trace.reads.out, 0)
    if state is None:
        return out, trace, None
    line = line._replace(reads=reads)
    after = _state_after(initial, state, memory, line, segments_R, places, options)
    return out, trace, after


def _first_reads(
    initial: FastWeights,
    state: DocumentState | None,
    q_HXC: Array,
    segments_T: Array,
    options: FastWeightOptions,
) -> Reads:
    """Reads of tokens whose chunk is the first of a document, or was begun before.

    What other tokens get here is replaced later.
    """

    def rows_of(slots: Array) -> Array:
        return gather_rows(initial.values_SW, slots).astype(q_HXC.dtype)

    reads = read_chunk(initial.keys_HXNC, rows_of, q_HXC, options)
    if state is None:
        return reads
    other = (segments_T > 0) & (segments_T != state.segment)
    goes_on = jnp.cumsum(other) == 0
    carried = read_memory(initial, state.memory, q_HXC, options)
    return jax.tree.map(
        lambda a, b: jnp.where(_along(goes_on, a), a, b), carried, reads
    )


def _chunks(
    initial: FastWeights,
    memory: Memory,
    goes_on: Array,
    line: Tokens,
    places: ChunkPlaces,
    options: FastWeightOptions,
) -> tuple[Reads, Memory, DocumentTrace]:
    """Write every whole chunk, and read the tokens after it."""
    c, size = options.chunk, places.position_R.size

    def step(carry: tuple[Memory, Reads], xs: Any) -> tuple[Any, Any]:
        memory, reads = carry
        chunk, next_q, start = xs
        active = start < size
        first = active & (places.position_R[jnp.minimum(start, size - 1)] == 0)
        memory = forget(initial, memory, first & ~(goes_on & (start == 0)))
        reads = jax.tree.map(partial(jnp.where, first), chunk.reads, reads)
        chunk = chunk._replace(reads=reads)
        memory, losses, address = write_memory(initial, memory, chunk, active, options)
        reads = read_memory(initial, memory, next_q, options)
        return (memory, reads), (reads, losses, address, active)

    at = places.starts_M[:, None] + jnp.arange(c)
    chunks = jax.tree.map(lambda x: x[jnp.minimum(at, size - 1)], line)
    next_q = line.q[jnp.minimum(at + c, size - 1)]
    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), chunks.reads)
    (memory, _), (later, losses, address, written) = lax.scan(
        step, (memory, nothing), (chunks, next_q, places.starts_M)
    )
    after, within = jnp.maximum(places.after_R, 0), places.position_R % c
    reads = jax.tree.map(
        lambda a, b: jnp.where(_along(places.after_R < 0, a), a, b[after, within]),
        line.reads,
        later,
    )
    return reads, memory, DocumentTrace(reads, losses, address, written)


def _no_chunks(
    line: Tokens, places: ChunkPlaces, options: FastWeightOptions
) -> DocumentTrace:
    n_chunks, n_pairs = places.starts_M.size, max(options.chunk - options.lookahead, 0)
    losses_MP = jnp.zeros((n_chunks, n_pairs), line.v.dtype)
    none_M = losses_MP.sum(axis=1)
    return DocumentTrace(line.reads, losses_MP, none_M, none_M > 0)


def _state_after(
    initial: FastWeights,
    state: DocumentState,
    memory: Memory,
    line: Tokens,
    segments_R: Array,
    places: ChunkPlaces,
    options: FastWeightOptions,
) -> DocumentState:
    """The state at the end of a line, whose last document is the one that goes on."""
    n_real = jnp.sum(segments_R > 0)
    last = jnp.maximum(n_real - 1, 0)
    seen = jnp.where(n_real > 0, places.position_R[last] + 1, 0)
    alone = places.position_R[last] == last
    goes_on = (n_real == 0) | (alone & (segments_R[0] == state.segment))
    # A new document too short for a chunk finds its predecessor's memory here.
    memory = forget(initial, memory, ~goes_on & (seen < options.chunk))
    count = (seen % options.chunk).astype(jnp.int32)
    kept = jnp.arange(options.chunk - 1)
    at = jnp.clip(n_real - count + kept, 0, segments_R.size - 1)
    pending = jax.tree.map(lambda x: jnp.where(_along(kept < count, x), x[at], 0), line)
    segment = jnp.where(n_real > 0, segments_R[last], state.segment)
    return DocumentState(memory, pending, count, segment)


def _along(flags: Array, like: Array) -> Array:
    """Flags of the first axis, to be broadcast against `like`."""
    return flags.reshape(-1, *(1,) * (like.ndim - 1))


def _tokens(
    initial: FastWeights, q: Array, v: Array, gate: Array | None
) -> tuple[Array, Array, Array]:
    dtype = wide_dtype(initial, q, v)
    gate = jnp.ones(q.shape[:2], dtype) if gate is None else gate
    q_HXC = half_queries(initial.keys_HXNC, q)
    return q_HXC.astype(dtype), v.astype(dtype), gate.astype(dtype)


def _check_segments(q: Array, segments_BT: Array) -> None:
    if segments_BT.shape != q.shape[:2]:
        raise ShapeError("segments_BT", segments_BT.shape, q.shape[:2])
