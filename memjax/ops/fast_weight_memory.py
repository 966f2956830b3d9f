"""The fast weights of one document: sub-keys of its own, and an overlay of values.

What: `Memory` and `DocumentState`, how a memory is read and how a chunk is written.
Why: what a document changed is small; the initial table stays where it is.
When not: the order of reads and writes in a text is `fast_weight_documents`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError
from memjax.ops.fast_weight_chunk import (
    FastWeightOptions,
    FastWeights,
    Reads,
    read_chunk,
    write_chunk,
)
from memjax.ops.fast_weights import check_memory
from memjax.ops.overlay import (
    Overlay,
    add_rows,
    clear_overlay,
    empty_overlay,
    read_overlay,
    scale_overlay,
)


class Tokens(NamedTuple):
    """Tokens and what they read, [..., T, ...]: q_HXC, v_W, gate, reads."""

    q: Array
    v: Array
    gate: Array
    reads: Reads


class Memory(NamedTuple):
    """What one document has made of the initial memory."""

    keys_HXNC: Array
    overlay: Overlay


class DocumentState(NamedTuple):
    """Where each row of a batch stands in its text; all arrays have a leading axis B.

    Attributes:
        memory: after the chunks written so far.
        pending: the tokens of the unfinished chunk, first ones first, c - 1 places.
        count: int32 [B], how many tokens are pending.
        segment: int32 [B], number of the document; 0 before the first token.
    """

    memory: Memory
    pending: Tokens
    count: Array
    segment: Array


def initial_state(
    initial: FastWeights,
    n_batch: int,
    max_tokens: int,
    options: FastWeightOptions,
    dtype: Any = jnp.float32,
) -> DocumentState:
    """The state of B rows before their first token.

    Args:
        max_tokens: tokens that a document may have. Beyond them, rounded up to whole
            chunks, its outputs are NaN.
        dtype: of the arithmetic, the widest of what `advance` will be given.

    Raises:
        ConfigError: max_tokens is below 1.
    """
    check_memory(initial, options)
    if max_tokens < 1:
        raise ConfigError("max_tokens", max_tokens, "an integer >= 1")
    heads, halves, _, width = initial.keys_HXNC.shape
    n_chunks = -(-max_tokens // options.chunk)
    capacity = n_chunks * options.chunk * n_reads(initial, options)
    places = options.chunk - 1
    shape_HK = (places, heads, options.k)
    n_values = initial.values_SW.shape[1]
    pending = Tokens(
        jnp.zeros((places, heads, halves, width), dtype),
        jnp.zeros((places, n_values), dtype),
        jnp.zeros((places,), dtype),
        Reads(
            jnp.zeros(shape_HK, dtype),
            jnp.zeros(shape_HK, jnp.int32),
            jnp.zeros(shape_HK, dtype),
            jnp.zeros((places, n_values), dtype),
        ),
    )
    zero = jnp.zeros((), jnp.int32)
    state = DocumentState(empty_memory(initial, capacity, dtype), pending, zero, zero)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (n_batch, *x.shape)), state)


def empty_memory(initial: FastWeights, capacity: int, dtype: Any) -> Memory:
    n_slots, width = initial.values_SW.shape
    overlay = empty_overlay(n_slots, width, capacity, dtype)
    return Memory(initial.keys_HXNC.astype(dtype), overlay)


def n_reads(initial: FastWeights, options: FastWeightOptions) -> int:
    """Rows read by a token."""
    return initial.keys_HXNC.shape[0] * options.k


def write_memory(
    initial: FastWeights,
    memory: Memory,
    chunk: Tokens,
    active: Array,
    options: FastWeightOptions,
    real_c: Array | None = None,
) -> tuple[Memory, Array, Array]:
    """The memory after one chunk; the same memory and zeros where not `active`."""
    one = jax.tree.map(lambda x: x[None], chunk)
    writes = write_chunk(
        memory.keys_HXNC,
        partial(read_overlay, memory.overlay, initial.values_SW),
        one.q,
        one.v,
        one.gate,
        one.reads,
        options,
        real_Bc=None if real_c is None else real_c[None],
    )
    overlay = memory.overlay
    if options.weight_decay:
        factor = 1 - options.learning_rate * options.weight_decay
        overlay = scale_overlay(overlay, factor, active)
    overlay = add_rows(overlay, writes.slots_N, writes.rows_NW, active)
    keys = jnp.where(active, writes.keys_HXNC, memory.keys_HXNC)
    losses = jnp.where(active, writes.losses_BP[0], 0)
    return Memory(keys, overlay), losses, jnp.where(active, writes.address, 0)


def read_memory(
    initial: FastWeights, memory: Memory, q_HXC: Array, options: FastWeightOptions
) -> Reads:
    rows_of = partial(read_overlay, memory.overlay, initial.values_SW)
    return read_chunk(memory.keys_HXNC, rows_of, q_HXC, options)


def forget(initial: FastWeights, memory: Memory, when: Array) -> Memory:
    """The initial memory where `when`, a bool scalar, is True."""
    keys = initial.keys_HXNC.astype(memory.keys_HXNC.dtype)
    return Memory(
        jnp.where(when, keys, memory.keys_HXNC),
        clear_overlay(memory.overlay, len(initial.values_SW), when),
    )
