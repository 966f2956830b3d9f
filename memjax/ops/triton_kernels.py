"""The kernels of the embedding bag for NVIDIA GPUs, in Triton.

What: weighted sums of rows, the gradient of the weights, sums of sorted reads by row,
    and rows of an FP8 table, each one launch; `problem`, what they cannot read.
Why: XLA writes the rows it gathers to memory before it adds them up; here a row goes
    from memory to registers, several at a time, and only sums are written.
When not: other platforms, and callers; `bag_kernels` decides who runs.

A table is a tuple: (table,) with float32, bfloat16, float16 or uint16 (the bits of
bfloat16), or (codes, scales) of `fp8`. XLA picks the scales of the reads: those of a
table of more than 2^32 bytes may be too few bytes to be addressed here. Ids outside the
table count nothing: no address is formed from them. All sums are float32, in an order
that only shapes decide. Nothing is written by two programs, so there are no atomic
additions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax.ops.kernel_values import decoded, wide

Stored = tuple[jax.Array, ...]

_ROWS_AT_A_TIME = 8
_MOST_COLUMNS = 512
_NAN_CODE = 0x7F


def problem(table: Sequence[Any]) -> str | None:
    """Why these kernels cannot read a table, or None.

    Offsets into arrays of up to 2^32 bytes have 32 bits and a sign, so that entries
    beyond 2^31 would be looked for before the array; of wider entries there are fewer.
    """
    size = math.prod(table[0].shape)
    if jnp.dtype(table[0].dtype).itemsize == 1 and 2**31 < size <= 2**32:
        return (
            f"tables of {size} bytes: Triton cannot address 1-byte entries in arrays "
            "of more than 2^31 and up to 2^32 bytes; divide the table"
        )
    return None


def bag_sums(
    table: Stored, ids_NK: jax.Array, weights_NK: jax.Array, interpret: bool
) -> jax.Array:
    """Sums [N, W] over k of weights_nk * table[ids_nk], float32. Sizes are not 0."""
    n_tokens, n_reads = ids_NK.shape
    n_rows, width = table[0].shape

    def kernel(ids_ref: Any, weights_ref: Any, *refs: Any) -> None:
        *table_refs, out_ref = refs
        token, columns = _at(0), _columns(width)
        first = token * n_reads
        sums = _sum_of_reads(
            first, first + n_reads, ids_ref, weights_ref, table_refs, columns, n_rows
        )
        _store(out_ref, token, columns, sums)

    ids_P = ids_NK.reshape(-1)
    call = _call(kernel, n_tokens, width, interpret, "bag_sums")
    return call(ids_P, weights_NK.reshape(-1), *_of_reads(table, ids_P))


def bag_weights(
    table: Stored, ids_NK: jax.Array, cotangent_NW: jax.Array, interpret: bool
) -> jax.Array:
    """Products [N, K] of cotangent_n and table[ids_nk], float32. Sizes are not 0."""
    n_tokens, n_reads = ids_NK.shape
    n_rows, width = table[0].shape
    step = _step(width)

    def kernel(ids_ref: Any, cotangent_ref: Any, *refs: Any) -> None:
        *table_refs, out_ref = refs
        token = _at(0)
        first = token * n_reads

        def group(i: jax.Array, carry: None) -> None:
            at = i * _ROWS_AT_A_TIME + jnp.arange(_ROWS_AT_A_TIME)
            here = at < n_reads
            ids = _load(ids_ref.at[first + at], here, 0)
            inside = here & (ids >= 0) & (ids < n_rows)

            def block(j: jax.Array, products: jax.Array) -> jax.Array:
                columns = j * step + jnp.arange(step), width
                rows = _rows(table_refs, ids, inside, columns, first + at)
                cotangent = _load(
                    cotangent_ref.at[token, columns[0]], columns[0] < width, 0
                )
                return products + jnp.sum(rows * wide(cotangent)[None, :], axis=1)

            zeros = jnp.zeros(_ROWS_AT_A_TIME, jnp.float32)
            products = _loop(0, -(-width // step), block, zeros)
            _plt().store(out_ref.at[first + at], products, mask=here)

        _loop(0, -(-n_reads // _ROWS_AT_A_TIME), group, None)

    ids_P = ids_NK.reshape(-1)
    call = _call(kernel, n_tokens, step, interpret, "bag_weights", ids_P.shape)
    products_P = call(ids_P, cotangent_NW, *_of_reads(table, ids_P))
    return products_P.reshape(n_tokens, n_reads)


def segment_sums(
    first_S: jax.Array,
    end_S: jax.Array,
    source_P: jax.Array,
    weights_P: jax.Array | None,
    cotangent_NW: jax.Array,
    further: tuple[jax.Array, jax.Array, jax.Array] | None,
    interpret: bool,
) -> jax.Array:
    """Sums [S, W] of weighted cotangents over the reads first_s .. end_s - 1, float32.

    Read p is weights_p * cotangent[source_p]. `further`, (first_S, end_S, parts_EW),
    adds the parts first_s .. end_s - 1 after them. An empty segment is 0.
    """
    n_tokens, width = cotangent_NW.shape
    spans = (first_S, end_S) if further is None else (first_S, end_S, *further[:2])
    reads = (source_P,) if weights_P is None else (source_P, weights_P)
    values = (cotangent_NW,) if further is None else (cotangent_NW, further[2])

    def kernel(*refs: Any) -> None:
        refs, out_ref = refs[:-1], refs[-1]
        span_refs, refs = refs[: len(spans)], refs[len(spans) :]
        read_refs, value_refs = refs[: len(reads)], refs[len(reads) :]
        segment, columns = _at(0), _columns(width)
        span = [_load(ref.at[segment]) for ref in span_refs]
        weights_ref = None if weights_P is None else read_refs[1]
        sums = _sum_of_reads(
            span[0],
            span[1],
            read_refs[0],
            weights_ref,
            value_refs[:1],
            columns,
            n_tokens,
        )
        if further is not None:
            n_parts = further[2].shape[0]
            sums = sums + _sum_of_reads(
                span[2], span[3], None, None, value_refs[1:], columns, n_parts
            )
        _store(out_ref, segment, columns, sums)

    operands = (*spans, *reads, *values)
    return _call(kernel, len(first_S), width, interpret, "segment_sums")(*operands)


def fp8_rows(table: Stored, ids_P: jax.Array, interpret: bool) -> jax.Array:
    """Rows [P, W] of (codes, scales), bfloat16; NaN for ids outside. No size is 0."""
    (n_reads,), (n_rows, width) = ids_P.shape, table[0].shape

    def kernel(ids_ref: Any, codes_ref: Any, scales_ref: Any, out_ref: Any) -> None:
        at = _at(0) * _ROWS_AT_A_TIME + jnp.arange(_ROWS_AT_A_TIME)
        here, columns = at < n_reads, _columns(width)
        ids = _load(ids_ref.at[at], here, 0)
        inside = (ids >= 0) & (ids < n_rows)
        table_refs = (codes_ref, scales_ref)
        rows = _rows(table_refs, ids, here & inside, columns, at, _NAN_CODE)
        _plt().store(
            out_ref.at[at[:, None], columns[0][None, :]],
            rows.astype(jnp.bfloat16),
            mask=here[:, None] & (columns[0] < width)[None, :],
        )

    n_programs = -(-n_reads // _ROWS_AT_A_TIME)
    out = (n_reads, width)
    call = _call(kernel, n_programs, width, interpret, "fp8_rows", out, jnp.bfloat16)
    return call(ids_P, *_of_reads(table, ids_P))


def _of_reads(table: Stored, ids_P: jax.Array) -> Stored:
    """A table as a kernel is handed it: FP8 with the scales [P, B] of the reads."""
    if len(table) == 1:
        return table
    return table[0], table[1].at[ids_P].get(mode="clip", wrap_negative_indices=False)


Columns = tuple[jax.Array, int]


def _sum_of_reads(
    first: jax.Array,
    end: jax.Array,
    ids_ref: Any,
    weights_ref: Any,
    table_refs: Sequence[Any],
    columns: Columns,
    n_rows: int,
) -> jax.Array:
    """Sum over first <= p < end of weights[p] * table[ids[p]], one row of columns.

    Without ids the read p is of row p, without weights they are 1. Several rows are
    under way at a time, which is what hides the latency of the memory.
    """

    def group(i: jax.Array, sums: jax.Array) -> jax.Array:
        at = first + i * _ROWS_AT_A_TIME + jnp.arange(_ROWS_AT_A_TIME)
        here = at < end
        ids = at if ids_ref is None else _load(ids_ref.at[at], here, 0)
        inside = here & (ids >= 0) & (ids < n_rows)
        rows = _rows(table_refs, ids, inside, columns, at)
        if weights_ref is not None:
            weights = wide(_load(weights_ref.at[at], here, 0))
            # What is outside counts nothing, whatever its weight.
            rows = rows * jnp.where(inside, weights, 0)[:, None]
        return sums + jnp.sum(rows, axis=0)

    n_groups = lax.div(end - first + _ROWS_AT_A_TIME - 1, _ROWS_AT_A_TIME)
    return _loop(0, n_groups, group, jnp.zeros(columns[0].shape, jnp.float32))


def _rows(
    table_refs: Sequence[Any],
    ids: jax.Array,
    inside: jax.Array,
    columns: Columns,
    reads: jax.Array,
    other: int = 0,
) -> jax.Array:
    """Some columns of some rows, float32; masked ones are not touched. `reads` are the
    numbers of the reads, whose scales come in their order."""
    at, width = columns
    mask = inside[:, None] & (at < width)[None, :]
    stored = _load(table_refs[0].at[ids[:, None], at[None, :]], mask, other)
    if len(table_refs) == 1:
        return wide(stored)
    block = width // table_refs[1].shape[1]
    scales_at = table_refs[1].at[reads[:, None], (at // block)[None, :]]
    return decoded(stored, _load(scales_at, mask, 0))


def _columns(width: int) -> Columns:
    """The columns of a program of a grid (reads, blocks of columns), and the width."""
    step = _step(width)
    return _at(1) * step + jnp.arange(step), width


def _step(width: int) -> int:
    """Columns at a time: a power of two, as every load and store must be."""
    return min(1 << (width - 1).bit_length(), _MOST_COLUMNS)


def _store(out_ref: Any, row: jax.Array, columns: Columns, values: jax.Array) -> None:
    at, width = columns
    _plt().store(out_ref.at[row, at], values, mask=at < width)


def _load(at: Any, mask: jax.Array | None = None, other: int = 0) -> jax.Array:
    if mask is None:
        return _plt().load(at)
    return _plt().load(at, mask=mask, other=jnp.asarray(other, at.dtype))


def _loop(first: int, end: Any, body: Callable[..., Any], start: Any) -> Any:
    return lax.fori_loop(jnp.int32(first), jnp.int32(end), body, start)


def _at(axis: int) -> jax.Array:
    from jax.experimental import pallas

    return pallas.program_id(axis)


def _plt() -> Any:
    from jax.experimental.pallas import triton

    return triton


def _call(
    kernel: Callable[..., None],
    n_programs: int,
    width: int,
    interpret: bool,
    name: str,
    shape: tuple[int, ...] | None = None,
    dtype: Any = jnp.float32,
) -> Callable[..., jax.Array]:
    """A launch of `kernel` over (n_programs, blocks of `width` columns)."""
    from jax.experimental import pallas

    step = _step(width)
    return pallas.pallas_call(
        kernel,
        grid=(n_programs, -(-width // step)),
        out_shape=jax.ShapeDtypeStruct(shape or (n_programs, width), dtype),
        interpret=interpret,
        name=name,
        compiler_params=_plt().CompilerParams(
            num_warps=min(max(step // 128, 1), 4), num_stages=1
        ),
    )
