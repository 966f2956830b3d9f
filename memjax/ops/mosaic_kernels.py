"""The kernels of the embedding bag for NVIDIA GPUs, in Mosaic GPU.

What: weighted sums of rows, the gradient of the weights, sums of sorted reads by row;
    `problem`, what they cannot read.
Why: twins of `triton_kernels` for the day jax drops its Triton; Hopper and newer.
When not: widths that are no multiple of 128, and FP8; see `triton_kernels`, which
    masks the rest of a row. Callers: `bag_kernels` decides who runs.

A program is a warpgroup of 128 threads that share a row, several rows under way at a
time. Ids outside the table count nothing. All sums are float32 in a fixed order, and
nothing is written by two programs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax.errors import ConfigError

Stored = tuple[jax.Array, ...]

_ROWS_AT_A_TIME = 4
_THREADS = 128
ROW_BLOCK = _THREADS
"""Rows are multiples of this wide."""
_MOST_ENTRIES = 4  # of a row that a thread reads at once


def problem(table: Sequence[Any]) -> str | None:
    """Why these kernels cannot read a table, or None."""
    width = table[0].shape[1]
    if len(table) > 1:
        return "FP8 tables, which 'triton' reads"
    if width % ROW_BLOCK:
        return f"rows of {width} entries; 'mosaic' has multiples of {ROW_BLOCK} only"
    return None


def bag_sums(
    table: Stored, ids_NK: jax.Array, weights_NK: jax.Array, interpret: bool
) -> jax.Array:
    """Sums [N, W] over k of weights_nk * table[ids_nk], float32. Sizes are not 0."""
    n_tokens, n_reads = ids_NK.shape

    def kernel(ids_ref: Any, weights_ref: Any, table_ref: Any, out_ref: Any) -> None:
        token = _program()
        first = token * n_reads
        out_ref[token] = _sum_of_reads(
            first, first + n_reads, ids_ref, weights_ref, table_ref
        )

    call = _call(kernel, n_tokens, (n_tokens, table[0].shape[1]), interpret)
    return call(ids_NK.reshape(-1), weights_NK.reshape(-1), table[0])


def bag_weights(
    table: Stored, ids_NK: jax.Array, cotangent_NW: jax.Array, interpret: bool
) -> jax.Array:
    """Products [N, K] of cotangent_n and table[ids_nk], float32. Sizes are not 0."""
    n_tokens, n_reads = ids_NK.shape

    def kernel(ids_ref: Any, cotangent_ref: Any, table_ref: Any, out_ref: Any) -> None:
        token = _program()
        first = token * n_reads
        cotangent = _row(cotangent_ref, token)

        def group(i: jax.Array, carry: int) -> int:
            reads = _reads(first, first + n_reads, i, ids_ref, table_ref.shape[0])
            rows = [_row(table_ref, row) for _, row, *_ in reads]
            # A read past the end is the last one, once more.
            for (at, _, inside, _), row in zip(reads, rows, strict=True):
                product = jnp.sum(row * cotangent)
                out_ref[at] = jnp.where(inside, product, 0.0)
            return carry

        lax.fori_loop(0, -(-n_reads // _ROWS_AT_A_TIME), group, 0)

    call = _call(kernel, n_tokens, (n_tokens * n_reads,), interpret)
    products_P = call(ids_NK.reshape(-1), cotangent_NW, table[0])
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
    """Sums [S, W] of weighted cotangents; as `triton_kernels.segment_sums`."""
    spans = (first_S, end_S) if further is None else (first_S, end_S, *further[:2])
    reads = (source_P,) if weights_P is None else (source_P, weights_P)
    values = (cotangent_NW,) if further is None else (cotangent_NW, further[2])

    def kernel(*refs: Any) -> None:
        refs, out_ref = refs[:-1], refs[-1]
        span_refs, refs = refs[: len(spans)], refs[len(spans) :]
        read_refs, value_refs = refs[: len(reads)], refs[len(reads) :]
        segment = _program()
        span = [ref[segment] for ref in span_refs]
        weights_ref = None if weights_P is None else read_refs[1]
        sums = _sum_of_reads(span[0], span[1], read_refs[0], weights_ref, value_refs[0])
        if further is not None:
            sums += _sum_of_reads(span[2], span[3], None, None, value_refs[1])
        out_ref[segment] = sums

    n_segments = len(first_S)
    call = _call(kernel, n_segments, (n_segments, cotangent_NW.shape[1]), interpret)
    return call(*spans, *reads, *values)


def _sum_of_reads(
    first: jax.Array, end: jax.Array, ids_ref: Any, weights_ref: Any, table_ref: Any
) -> jax.Array:
    """Sum over first <= p < end of weights[p] * table[ids[p]].

    Without ids the read p is of row p, without weights they are 1.
    """
    n_rows, width = table_ref.shape
    zeros = _plgpu().layout_cast(jnp.zeros(width, jnp.float32), _layout(width))

    def group(i: jax.Array, sums: jax.Array) -> jax.Array:
        reads = _reads(first, end, i, ids_ref, n_rows)
        rows = [_row(table_ref, row) for _, row, *_ in reads]
        for (at, _, inside, here), row in zip(reads, rows, strict=True):
            if weights_ref is not None:
                row = row * weights_ref[at].astype(jnp.float32)
            sums += jnp.where(inside & here, row, zeros)
        return sums

    n_groups = lax.div(end - first + _ROWS_AT_A_TIME - 1, _ROWS_AT_A_TIME)
    return lax.fori_loop(0, n_groups, group, zeros)


def _reads(
    first: jax.Array, end: jax.Array, i: jax.Array, ids_ref: Any, n_rows: int
) -> list[tuple[jax.Array, ...]]:
    """(read, row, is its id inside, is it before the end) of the reads of group i;
    read and row can be looked up in any case."""
    found = []
    for k in range(_ROWS_AT_A_TIME):
        at = first + i * _ROWS_AT_A_TIME + k
        read = jnp.minimum(at, end - 1)
        row = read if ids_ref is None else ids_ref[read]
        inside = (row >= 0) & (row < n_rows)
        found.append((read, jnp.where(inside, row, 0), inside, at < end))
    return found


def _row(table_ref: Any, row: jax.Array) -> jax.Array:
    """A row of a table as float32, spread over the threads of a program."""
    plgpu, width = _plgpu(), table_ref.shape[1]
    at = (table_ref.at[row],)
    if jax.__version_info__ < (0, 11):
        at = (*at, ())
    values = plgpu.load(*at, layout=_layout(width), optimized=False)
    if values.dtype == jnp.uint16:
        values = lax.bitcast_convert_type(values, jnp.bfloat16)
    return values.astype(jnp.float32)


def _layout(width: int) -> Any:
    entries = _MOST_ENTRIES
    while width % (entries * _THREADS):
        entries //= 2
    return _plgpu().Layout.WG_STRIDED((width,), vec_size=entries)


def _program() -> jax.Array:
    return lax.axis_index("program")


def _plgpu() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def _call(
    kernel: Callable[..., None],
    n_programs: int,
    shape: tuple[int, ...],
    interpret: bool,
) -> Callable[..., jax.Array]:
    """A launch of `kernel` whose result is float32."""
    plgpu = _plgpu()
    if interpret and jax.__version_info__ < (0, 11):
        raise ConfigError("kernel", "mosaic_interpreted", "jax 0.11 or newer for this")
    settings = {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(n_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **settings,
    )
