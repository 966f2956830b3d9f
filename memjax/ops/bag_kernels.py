"""Which program reads a table: XLA's, or a kernel of our own.

What: `KERNELS`; and for each part of an embedding bag a function that runs the form
    which was named, or on its own the one for the platform the program is for.
Why: one traced program lowers to kernels on NVIDIA GPUs and to XLA elsewhere; callers
    hold the plain form and know no back end.
When not: the kernels themselves; see `triton_kernels` and `mosaic_kernels`.

"auto" is XLA but on NVIDIA GPUs, where it is Triton. There, too, it is XLA for what a
kernel cannot read, and in a program for several devices outside `shard_map`: XLA cannot
divide a kernel, so that every device would do all of the work.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from memjax.errors import ConfigError
from memjax.ops.lowered_kernel import Form, lowered_kernel

KERNELS = ("auto", "xla", "triton", "mosaic")
# The kernels as ordinary programs, for tests and for a look at them without a GPU.
INTERPRETED = ("triton_interpreted", "mosaic_interpreted")
ITEM_READS = 64

Table = tuple[jax.Array, ...]

_TABLE_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16", "uint16")))


def check_kernel(field: str, kernel: str) -> None:
    """ConfigError unless `kernel` is one of KERNELS, or one of them interpreted."""
    if kernel not in (*KERNELS, *INTERPRETED):
        raise ConfigError(field, kernel, f"one of {KERNELS}")


def bag_sums(
    kernel: str,
    plain: Form,
    table: Table,
    ids_NK: jax.Array,
    weights_NK: jax.Array,
    *,
    nan_outside: bool,
) -> jax.Array:
    """Weighted sums [N, W] of rows: `plain(table, ids, weights)`, or a kernel's.

    Args:
        kernel: one of KERNELS or INTERPRETED.
        plain: the XLA form, a function of a module (not made anew for every call).
        table: (table,) or (codes, scales) as in `fp8`.
        nan_outside: an id outside makes its sum NaN; else it counts nothing.

    Raises:
        ConfigError: a kernel was named that cannot read this table.
    """
    operands = (table, ids_NK, weights_NK)
    form = _nan_sums if nan_outside else _sums
    out = (len(ids_NK), table[0].shape[1]), jnp.float32
    return _choose(kernel, plain, form, (), operands, table, (weights_NK,), out)


def bag_weights(
    kernel: str,
    plain: Form,
    table: Table,
    ids_NK: jax.Array,
    cotangent_NW: jax.Array,
    *,
    nan_outside: bool,
) -> jax.Array:
    """The gradient [N, K] of the weights; as `bag_sums`."""
    operands = (table, ids_NK, cotangent_NW)
    form = _nan_products if nan_outside else _products
    out = ids_NK.shape, cotangent_NW.dtype
    return _choose(kernel, plain, form, (), operands, table, (cotangent_NW,), out)


def fp8_rows(kernel: str, plain: Form, table: Table, ids_P: jax.Array) -> jax.Array:
    """Rows [P, W] of (codes, scales), bfloat16, NaN outside; as `bag_sums`."""
    out = (len(ids_P), table[0].shape[1]), jnp.bfloat16
    return _choose(kernel, plain, _rows, (), (table, ids_P), table, (), out)


def row_sums(
    kernel: str,
    plain: Form,
    static: tuple[int, ...],
    slot_P: jax.Array,
    order_P: jax.Array,
    reads_P: jax.Array,
    weights_P: jax.Array | None,
    cotangent_NW: jax.Array,
    n_inside: jax.Array,
) -> jax.Array:
    """Sums [U, W] of the reads of each unique row; see `row_gradient.unique_rows`.

    Args:
        kernel: as in `bag_sums`.
        plain: the XLA form, called with the numbers `static` and then the arrays.
        static: U first.
        slot_P: unique row of the reads in ascending order; U for those outside.
        order_P: numbers of the reads in that order.
        reads_P: row of the cotangents, for each read.
        weights_P: weights of the reads in float32; None means 1.
        cotangent_NW: the cotangents.
        n_inside: reads that are not outside.
    """
    operands = (slot_P, order_P, reads_P, weights_P, cotangent_NW, n_inside)
    table = (cotangent_NW,)
    weights = () if weights_P is None else (weights_P,)
    out = (static[0], cotangent_NW.shape[1]), jnp.float32
    return _choose(kernel, plain, _segmented, static, operands, table, weights, out)


def _choose(
    kernel: str,
    plain: Form,
    form: Form,
    static: tuple[int, ...],
    operands: tuple[Any, ...],
    table: Table,
    floats: Sequence[jax.Array],
    out: tuple[tuple[int, ...], Any],
) -> jax.Array:
    check_kernel("kernel", kernel)
    if kernel == "xla" or any(0 in x.shape for x in jax.tree.leaves(operands)):
        return plain(*static, *operands)
    back_end, _, interpreted = kernel.partition("_")
    back_end = "triton" if back_end == "auto" else back_end
    problem = _problem(back_end, table, floats)
    if problem and kernel == "auto":
        return plain(*static, *operands)
    if problem:
        raise ConfigError("kernel", kernel, f"'auto' or 'xla' for {problem}")
    run = _on(form, back_end, bool(interpreted))
    if interpreted:
        return run(*static, *operands)
    named = None if kernel == "auto" else kernel
    return lowered_kernel(plain, run, static, operands, out, named)


def _problem(back_end: str, table: Table, floats: Sequence[jax.Array]) -> str | None:
    """Why no kernel of a back end can do it, or None."""
    fp8 = len(table) == 2
    if not fp8 and table[0].dtype not in _TABLE_DTYPES:
        return f"tables of {table[0].dtype}"
    for array in floats:
        if jnp.result_type(array.dtype, jnp.float32) != jnp.float32:
            return f"numbers of {array.dtype}"
    return _module(back_end).problem(table)


def _module(back_end: str) -> ModuleType:
    if back_end == "mosaic":
        from memjax.ops import mosaic_kernels

        return mosaic_kernels
    from memjax.ops import triton_kernels

    return triton_kernels


@functools.cache
def _on(form: Callable[..., jax.Array], back_end: str, interpret: bool) -> Form:
    """A form on a back end, the same object at every call; traced once for all calls
    with equal shapes, as those of many layers are. Its numbers have 32 bits in the
    64-bit mode of jax, too."""

    def run(*operands: Any) -> jax.Array:
        with jax.enable_x64(False):
            return form(back_end, interpret, *operands)

    return jax.jit(run, static_argnums=(0, 1) if form is _segmented else ())


def _sums(
    back_end: str, interpret: bool, table: Table, ids_NK: jax.Array, x_NK: jax.Array
) -> jax.Array:
    return _module(back_end).bag_sums(table, ids_NK, x_NK, interpret)


def _nan_sums(
    back_end: str, interpret: bool, table: Table, ids_NK: jax.Array, x_NK: jax.Array
) -> jax.Array:
    sums_NW = _sums(back_end, interpret, table, ids_NK, x_NK)
    inside_N = jnp.all(_inside(table, ids_NK), axis=-1)
    return jnp.where(inside_N[:, None], sums_NW, jnp.nan)


def _products(
    back_end: str, interpret: bool, table: Table, ids_NK: jax.Array, x_NW: jax.Array
) -> jax.Array:
    products_NK = _module(back_end).bag_weights(table, ids_NK, x_NW, interpret)
    return products_NK.astype(x_NW.dtype)


def _nan_products(
    back_end: str, interpret: bool, table: Table, ids_NK: jax.Array, x_NW: jax.Array
) -> jax.Array:
    products_NK = _products(back_end, interpret, table, ids_NK, x_NW)
    return jnp.where(_inside(table, ids_NK), products_NK, jnp.nan)


def _inside(table: Table, ids: jax.Array) -> jax.Array:
    return (ids >= 0) & (ids < table[0].shape[0])


def _rows(back_end: str, interpret: bool, table: Table, ids_P: jax.Array) -> jax.Array:
    return _module(back_end).fp8_rows(table, ids_P, interpret)


def _segmented(
    back_end: str,
    interpret: bool,
    n_slots: int,
    block_reads: int,
    slot_P: jax.Array,
    order_P: jax.Array,
    reads_P: jax.Array,
    weights_P: jax.Array | None,
    cotangent_NW: jax.Array,
    n_inside: jax.Array,
) -> jax.Array:
    """The sums of `row_sums`, by two launches.

    The reads of a row are cut into items of ITEM_READS. The first launch sums the items
    of a row that come after its first one, each in a program of its own, so that a row
    that is read very often is no long program; the second sums the first items and
    adds the others in their order.
    """
    del block_reads  # of the plain form
    n_reads = len(slot_P)
    source_P = reads_P[order_P]
    weights_P = None if weights_P is None else weights_P[order_P]
    numbers_P = jnp.arange(n_reads, dtype=jnp.int32)
    starts_P = jnp.concatenate([jnp.ones(1, bool), slot_P[1:] != slot_P[:-1]])
    slots_P = jnp.where(starts_P, slot_P, n_slots)
    unused_U = jnp.full(n_slots, n_inside, jnp.int32)
    first_U = unused_U.at[slots_P].set(numbers_P, mode="drop")
    end_U = jnp.append(first_U[1:], n_inside)
    cut_U = jnp.minimum(first_U + ITEM_READS, end_U)
    sums = functools.partial(_module(back_end).segment_sums, interpret=interpret)
    # Each of them stands for ITEM_READS reads before it.
    n_items = n_reads // ITEM_READS
    if n_items == 0:
        return sums(first_U, cut_U, source_P, weights_P, cotangent_NW, None)
    items_U = (end_U - cut_U + ITEM_READS - 1) // ITEM_READS
    last_U = jnp.cumsum(items_U, dtype=jnp.int32)
    row_I = jnp.repeat(
        jnp.arange(n_slots, dtype=jnp.int32), items_U, total_repeat_length=n_items
    )
    number_I = jnp.arange(n_items, dtype=jnp.int32)
    nth_I = number_I - (last_U - items_U)[row_I]
    first_I = jnp.minimum(cut_U[row_I] + nth_I * ITEM_READS, end_U[row_I])
    end_I = jnp.minimum(first_I + ITEM_READS, end_U[row_I])
    end_I = jnp.where(number_I < last_U[-1], end_I, first_I)
    parts_IW = sums(first_I, end_I, source_P, weights_P, cotangent_NW, None)
    further = (last_U - items_U, last_U, parts_IW)
    return sums(first_U, cut_U, source_P, weights_P, cotangent_NW, further)
