"""Gradients of a table by the rows that were read, and their sums by unique row.

What: `RowGradient`, the factored gradient of reads; `unique_rows`, its sums per row.
Why: the cost follows the reads of a batch, whatever the size of the table.
When not: a table most of whose rows are read in every step; a dense gradient is as
    good there.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from memjax.errors import ConfigError, DataError, ShapeError
from memjax.ops import bag_kernels
from memjax.ops.row_sums import sort_reads, sum_reads
from memjax.ops.split import WHOLE, Split

_BLOCK_READS = 1024


def _refused(*_: Any) -> NoReturn:
    """Sums and products would change the row ids."""
    raise ConfigError(
        "gradient",
        "RowGradient",
        "an array in arithmetic and optax transforms, which would change row ids; a "
        "table is trained by memjax.apply_updates or memjax.table_optimizer(...).apply "
        "(scale= multiplies the gradient; micro-batches are joined as tuples)",
    )


class RowGradient(NamedTuple):
    """The gradient of one or many reads of one table, kept factored.

    A read n is value_n = sum over k of weights_nk * table[ids_nk]; the gradient of
    row r is the sum of weights_nk * cotangent_n over all (n, k) with ids_nk = r.

    A tree of arrays, for jit, scan and friends. Arithmetic on it raises ConfigError,
    and so does a map over its arrays that turns the ids into fractions, which is what
    an optax transform does. Not noticed: factors that are integers, or made so, as
    `optax.scale_by_schedule` does.

    Attributes:
        ids: int32 [..., K], K >= 1 rows a read; ids outside the table count nothing.
        weights: float [..., K]; None means 1.
        cotangent: float [..., W], gradient of the loss with respect to the read.
    """

    ids: jax.Array
    weights: jax.Array | None
    cotangent: jax.Array

    __add__ = __radd__ = __sub__ = __rsub__ = _refused
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refused
    __neg__ = __pow__ = _refused

    @property
    def n_reads(self) -> int:
        """How many (read, row) pairs there are."""
        return math.prod(self.ids.shape)


def _from_tree(_: None, leaves: Iterable[Any]) -> RowGradient:
    gradient = RowGradient(*leaves)
    dtype = getattr(gradient.ids, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
        _refused()
    return gradient


jax.tree_util.register_pytree_with_keys(
    RowGradient,
    lambda gradient: (
        tuple(
            (jax.tree_util.GetAttrKey(name), leaf)
            for name, leaf in zip(RowGradient._fields, gradient, strict=True)
        ),
        None,
    ),
    _from_tree,
    lambda gradient: (tuple(gradient), None),
)


class UniqueRows(NamedTuple):
    """The gradient of a table, one entry for each row that was read.

    Attributes:
        ids_U: int32, ascending and distinct; unused entries hold the number of rows
            of the table, which is out of range.
        sums_UW: float32 (or wider for wider cotangents), 0 in unused entries.
        count: int32 scalar, used entries.
    """

    ids_U: jax.Array
    sums_UW: jax.Array
    count: jax.Array


def unique_rows(
    gradients: RowGradient | Sequence[RowGradient],
    n_rows: int,
    width: int,
    *,
    split: Split = WHOLE,
    block_reads: int = _BLOCK_READS,
    kernel: str = "auto",
) -> UniqueRows:
    """Sum the gradients of all reads by row, in float32, in a fixed order.

    Reads are sorted by row (stable, so the reads of a row add up in their order) and
    their weighted cotangents are formed and added some at a time: nothing of the size
    reads x width exists beside the cotangents themselves and the result.

    Args:
        gradients: of the call sites that read the table, in a fixed order; or one.
        n_rows: rows of the table at hand. Reads of other rows are left out.
        width: columns of the table at hand.
        split: the part of the table; ids and cotangents are those of the whole table.
        block_reads: as `at_a_time` of `row_sums.sum_reads`, XLA's form.
        kernel: the program that adds, see `ops.bag_kernels`; one of its KERNELS.

    Returns:
        UniqueRows with min(reads, n_rows) entries; ids count from the first row at
        hand. No gradients: no entries.

    Raises:
        ShapeError: the axes of ids, weights and cotangent do not fit.
        DataError: ids are not integers.
        ConfigError: a kernel was named that is none, or cannot add these.

    Cost: a sort of the reads, one read of the cotangents per (read, row) pair, one
        write per pair. The same input gives the same bits; on accelerators the sums of
        a block are a product with a 0/1 matrix, so no atomic additions are involved.
        There a cotangent that is not finite makes all rows of its block NaN.
    """
    joined = _joined(gradients, n_rows, width, split)
    dtype = jnp.result_type(jnp.float32, joined.cotangent_NW)
    capacity = min(len(joined.rows_P), n_rows)
    if capacity == 0:
        empty = jnp.zeros((0,), jnp.int32), jnp.zeros((0, width), dtype)
        return UniqueRows(*empty, jnp.zeros((), jnp.int32))
    rows_P = joined.rows_P
    starts_P = jnp.concatenate([jnp.ones(1, bool), rows_P[1:] != rows_P[:-1]])
    inside_P = rows_P < n_rows
    slot_P = jnp.where(inside_P, lax.cumsum(starts_P.astype(jnp.int32)) - 1, capacity)
    ids_U = jnp.full(capacity, n_rows, jnp.int32).at[slot_P].set(rows_P, mode="drop")
    sums_UW = bag_kernels.row_sums(
        kernel,
        sum_reads,
        (capacity, block_reads),
        slot_P,
        *joined[1:],
        _count(inside_P),
    )
    return UniqueRows(ids_U, sums_UW, _count(inside_P & starts_P))


def table_gradient(
    gradient: RowGradient, n_rows: int, width: int, *, kernel: str = "auto"
) -> jax.Array:
    """The same sums as a whole table [R, W], float32 or wider.

    For small tables, and for those most of whose rows are read in every step: it costs
    a table of zeros. `kernel` as in `unique_rows`.
    """

    def at_once(gradient: RowGradient) -> jax.Array:
        joined = _joined(gradient, n_rows, width, WHOLE)
        if 0 in (n_rows, len(joined.rows_P)):
            dtype = jnp.result_type(jnp.float32, joined.cotangent_NW)
            return jnp.zeros((n_rows, width), dtype)
        n_inside = _count(joined.rows_P < n_rows)
        return sum_reads(n_rows, _BLOCK_READS, *joined, n_inside)

    def by_row(gradient: RowGradient) -> jax.Array:
        rows = unique_rows(gradient, n_rows, width, kernel=kernel)
        return dense_gradient(rows, n_rows)

    if kernel in ("auto", "xla"):
        return lax.platform_dependent(gradient, cpu=at_once, default=by_row)
    return by_row(gradient)


def dense_gradient(rows: UniqueRows, n_rows: int) -> jax.Array:
    """Sums by unique row as a whole table [R, W]; see also `table_gradient`."""
    zeros_RW = jnp.zeros((n_rows, rows.sums_UW.shape[1]), rows.sums_UW.dtype)
    return zeros_RW.at[rows.ids_U].set(rows.sums_UW, mode="drop")


class _Joined(NamedTuple):
    """The reads of all call sites, sorted by row; rows that are not here come last.

    rows_P is in this order, order_P the numbers of the reads in it; where its cotangent
    is and its weight (None: all are 1) stand by number.
    """

    rows_P: jax.Array
    order_P: jax.Array
    reads_P: jax.Array
    weights_P: jax.Array | None
    cotangent_NW: jax.Array


def _joined(
    gradients: RowGradient | Sequence[RowGradient],
    n_rows: int,
    width: int,
    split: Split,
) -> _Joined:
    if isinstance(gradients, RowGradient):
        gradients = (gradients,)
    flat = [_flat(gradient, split, width) for gradient in gradients if gradient.n_reads]
    dtype = jnp.result_type(jnp.float32, *(g.cotangent.dtype for g in flat))
    if not flat:
        none_P = jnp.zeros(0, jnp.int32)
        return _Joined(none_P, none_P, none_P, None, jnp.zeros((0, width), dtype))
    ids_P = jnp.concatenate([g.ids.reshape(-1) for g in flat])
    rows_P, order_P = sort_reads(split.local_ids(ids_P, n_rows))
    reads_P = jnp.concatenate(
        [
            offset + jnp.repeat(jnp.arange(len(g.ids), dtype=jnp.int32), g.ids.shape[1])
            for offset, g in zip(_offsets(flat), flat, strict=True)
        ]
    )
    weights_P = None
    if any(g.weights is not None for g in flat):
        weights_P = jnp.concatenate(
            [
                jnp.ones(g.n_reads, dtype)
                if g.weights is None
                else g.weights.reshape(-1).astype(dtype)
                for g in flat
            ]
        )
    cotangent_NW = jnp.concatenate([g.cotangent for g in flat])
    return _Joined(rows_P, order_P, reads_P, weights_P, cotangent_NW)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.int32)


def _offsets(flat: Sequence[RowGradient]) -> list[int]:
    """Where the cotangents of each gradient begin when all are joined."""
    offsets, total = [], 0
    for gradient in flat:
        offsets.append(total)
        total += len(gradient.ids)
    return offsets


def _flat(gradient: RowGradient, split: Split, width: int) -> RowGradient:
    """ids [N, K], weights [N, K], cotangent [N, W] of the columns at hand."""
    ids, weights, cotangent = gradient
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise DataError(f"row ids have dtype {ids.dtype}, allowed: integers")
    if cotangent.shape[:-1] != ids.shape[:-1]:
        raise ShapeError("cotangent", cotangent.shape, (*ids.shape[:-1], "width"))
    if weights is not None and weights.shape != ids.shape:
        raise ShapeError("weights", weights.shape, ids.shape)
    n_rows_read = ids.shape[-1]
    cotangent = cotangent.reshape(-1, cotangent.shape[-1])
    if split.column_axis is not None and cotangent.shape[-1] != width:
        first = split.first_column(width)
        cotangent = lax.dynamic_slice_in_dim(cotangent, first, width, axis=1)
    if cotangent.shape[-1] != width:
        raise ShapeError("cotangent", gradient.cotangent.shape, ("...", width))
    return RowGradient(
        ids.reshape(-1, n_rows_read).astype(jnp.int32),
        None if weights is None else weights.reshape(-1, n_rows_read),
        cotangent,
    )
