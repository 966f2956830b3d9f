"""Fast weights behind product keys: a memory that learns the text it reads.

What: `fast_weight_shared`, one memory that a whole batch reads and writes chunk by
    chunk, and the checks and the trace that all forms share.
Why: it is the published form, whose recorded numbers ours must reproduce.
When not: in a model: sequences read each other. One memory for each document is
    `fast_weight_documents`.

Source: arXiv:2601.00671, with what its released code does where the two differ.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax.errors import ShapeError
from memjax.ops.fast_weight_chunk import (
    FastWeightOptions,
    FastWeights,
    Reads,
    read_chunk,
    write_chunk,
)
from memjax.ops.product_keys import check_selection


class Trace(NamedTuple):
    """What happened while a text was read.

    Attributes:
        reads: of every token, [B, T, ...].
        losses_BP: of every pair of a token and its target, chunk by chunk.
        address_M: address loss of every chunk, before its update.
    """

    reads: Reads
    losses_BP: Array
    address_M: Array


def check_memory(weights: FastWeights, options: FastWeightOptions) -> None:
    """Raise unless sub-keys and values fit each other and K.

    Raises:
        ShapeError: the keys are not [H, 2, N, C], or the values not [N * N, W].
        ConfigError: k is outside 1..N * N.
    """
    keys, values = weights.keys_HXNC, weights.values_SW
    if keys.ndim != 4 or keys.shape[1] != 2:
        raise ShapeError("keys_HXNC", keys.shape, "[H, 2, N, C]")
    n_slots = keys.shape[2] ** 2
    if values.ndim != 2 or values.shape[0] != n_slots:
        raise ShapeError("values_SW", values.shape, f"[{n_slots}, W]")
    check_selection(options.k, n_slots)


def fast_weight_shared(
    weights: FastWeights,
    q: Array,
    v: Array,
    gate: Array | None,
    options: FastWeightOptions,
    *,
    mask: Array | None = None,
) -> tuple[Array, FastWeights, Trace]:
    """One memory for all sequences of a batch: the published form.

    Chunks are tokens [0, c), [c, 2c), ... of all sequences together; a last short one
    is written too. Documents are ignored: sequences read each other's writes, and what
    a batch writes stays for the next one if the caller passes the new memory on.
    Cutting the text elsewhere than at multiples of c gives other results.

    Args:
        weights: the memory before the first token; arithmetic is in float32 or wider,
            and so is the new memory.
        q: [B, T, H * 2 * C], v: [B, T, W], gate: [B, T] or None (ones).
        mask: [B, T] or None, see `write_chunk`.

    Returns:
        What every token reads [B, T, W]; the new memory; the trace.

    Raises:
        ShapeError, ConfigError: as `check_memory`; q, v, gate or mask of other shapes.

    Cost: a dense copy of the values, updated in place under jit.
    Source: arXiv:2601.00671, training form of the released code.
    """
    check_memory(weights, options)
    check_tokens(weights, q, v, gate, mask)
    dtype = wide_dtype(weights, q, v)
    n_whole = q.shape[1] // options.chunk
    tokens = half_queries(weights.keys_HXNC, q), v, gate, mask
    state, tokens = jax.tree.map(lambda x: x.astype(dtype), (weights, tokens))

    def step(state: FastWeights, tokens: Any) -> tuple[FastWeights, Any]:
        q_HXC, v_BcW, gate_Bc, mask_Bc = tokens
        keys, values = state

        def rows_of(slots: Array) -> Array:
            return values[slots]

        reads = read_chunk(keys, rows_of, q_HXC, options)
        writes = write_chunk(
            keys, rows_of, q_HXC, v_BcW, gate_Bc, reads, options, mask_Bc=mask_Bc
        )
        if options.weight_decay:
            values = values * (1 - options.learning_rate * options.weight_decay)
        values = values.at[writes.slots_N].add(writes.rows_NW, mode="drop")
        seen = Trace(reads, writes.losses_BP, writes.address)
        return FastWeights(writes.keys_HXNC, values), seen

    def chunks(x: Array) -> Array:
        whole = x[:, : n_whole * options.chunk]
        whole = whole.reshape(x.shape[0], n_whole, options.chunk, *x.shape[2:])
        return jnp.moveaxis(whole, 1, 0)

    traces = []
    if n_whole:
        state, seen = lax.scan(step, state, jax.tree.map(chunks, tokens))
        joined = jax.tree.map(_joined, (seen.reads, seen.losses_BP))
        traces.append(Trace(joined[0], joined[1], seen.address_M))
    if q.shape[1] % options.chunk:
        last = jax.tree.map(lambda x: x[:, n_whole * options.chunk :], tokens)
        state, seen = step(state, last)
        traces.append(seen._replace(address_M=seen.address_M[None]))
    reads, losses = jax.tree.map(
        lambda *parts: jnp.concatenate(parts, axis=1),
        *[(seen.reads, seen.losses_BP) for seen in traces],
    )
    address_M = jnp.concatenate([seen.address_M for seen in traces])
    return reads.out, state, Trace(reads, losses, address_M)


def check_tokens(
    weights: FastWeights, q: Array, v: Array, gate: Array | None, mask: Array | None
) -> None:
    """ShapeError unless queries, values, gates and masks are those of one text."""
    heads, halves, _, width = weights.keys_HXNC.shape
    if q.ndim != 3 or q.shape[1] == 0:
        raise ShapeError("q", q.shape, "[B, T, H * 2 * C] with T >= 1")
    for name, array, want in (
        ("q", q, (*q.shape[:2], heads * halves * width)),
        ("v", v, (*q.shape[:2], weights.values_SW.shape[1])),
        ("gate", gate, q.shape[:2]),
        ("mask", mask, q.shape[:2]),
    ):
        if array is not None and array.shape != want:
            raise ShapeError(name, array.shape, want)


def wide_dtype(weights: FastWeights, q: Array, v: Array) -> Any:
    """The dtype of the arithmetic: that of all inputs, but float32 at least."""
    return jnp.result_type(weights.keys_HXNC, weights.values_SW, q, v, jnp.float32)


def half_queries(keys_HXNC: Array, q: Array) -> Array:
    """Queries [..., H * 2 * C] as [..., H, 2, C]."""
    heads, halves, _, width = keys_HXNC.shape
    return q.reshape(*q.shape[:-1], heads, halves, width)


def _joined(x_MBc: Array) -> Array:
    """Chunks [M, B, c, ...] one after the other, [B, M * c, ...]."""
    x = jnp.moveaxis(x_MBc, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
