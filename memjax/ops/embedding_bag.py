"""Reads of a table: single rows, and weighted sums of rows.

What: `gather_rows` and `embedding_bag`, each with its gradient; `row_ids`, the check of
    ids that come from the host.
Why: an id outside the table must be seen, the plain formulations of a weighted sum
    store every row they read for the backward pass, and bfloat16 sums stop growing.
When not: writing rows; see `rows` and the table optimizers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from memjax.errors import DataError, ShapeError
from memjax.ops import bag_kernels
from memjax.ops.order import wait_for
from memjax.ops.row_gradient import RowGradient, table_gradient
from memjax.ops.rows import get_rows, load, value_dtype

ReadRows = Callable[[jax.Array, jax.Array], jax.Array]

_UNROLLED = 16
_TOKENS_AT_A_TIME = 16


def row_ids(ids: Any, n_rows: int) -> jax.Array:
    """Row ids as int32, checked when they come from the host.

    Args:
        ids: integers of any shape; numpy arrays and lists are checked here, arrays on
            the device are not (a read outside the table is NaN there).
        n_rows: rows of the table.

    Raises:
        DataError: an id of the host is not an integer, below 0, or at least n_rows.
    """
    if isinstance(ids, jax.Array):
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise DataError(f"row ids have dtype {ids.dtype}, allowed: integers")
        if ids.dtype.itemsize > 4:
            # Cut to 32 bits, 2**32 would be row 0.
            ids = jnp.where((ids >= 0) & (ids < n_rows), ids, n_rows)
        return ids.astype(jnp.int32)
    host = np.asarray(ids)
    if not np.issubdtype(host.dtype, np.integer):
        raise DataError(f"row ids have dtype {host.dtype}, allowed: integers")
    wrong = host[(host < 0) | (host >= n_rows)]
    if wrong.size:
        raise DataError(
            f"row id {wrong.flat[0]} (and {wrong.size - 1} more) is outside the table, "
            f"allowed: 0 <= id < {n_rows}"
        )
    return jnp.asarray(host.astype(np.int32))


def gather_rows(table_RW: jax.Array, ids: Any, kernel: str = "auto") -> jax.Array:
    """Rows of a table, [..., W]: numbers in the dtype of the table.

    Args:
        table_RW: rows x width; uint16 holds the bits of bfloat16.
        ids: integers [...]; of the host: checked (`row_ids`).
        kernel: the program that sums the gradient, see `ops.bag_kernels`; the read is
            XLA's, and so is the gradient of a wide table unless a kernel is named.

    Returns:
        A read outside the table is NaN, never another row (floating tables).

    Raises:
        ConfigError: a kernel was named that is none.

    Cost: a read of W entries an id. The gradient is a whole table; that of a bfloat16
        table is summed in float32 and rounded once. Reads outside have none.
    """
    bag_kernels.check_kernel("kernel", kernel)
    ids = row_ids(ids, table_RW.shape[0])
    narrow = table_RW.dtype in (jnp.bfloat16, jnp.float16)
    named = kernel not in ("auto", "xla")
    if narrow or named and jnp.issubdtype(table_RW.dtype, jnp.floating):
        return _gather_by_row(kernel, table_RW, ids)
    return _gather(table_RW, ids)


def _gather(table_RW: jax.Array, ids: jax.Array) -> jax.Array:
    rows = table_RW.at[ids].get(
        mode="fill", fill_value=_nan(table_RW), wrap_negative_indices=False
    )
    return load(rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_by_row(kernel: str, table_RW: jax.Array, ids: jax.Array) -> jax.Array:
    return _gather(table_RW, ids)


def _gather_forward(
    kernel: str, table_RW: jax.Array, ids: jax.Array
) -> tuple[jax.Array, Any]:
    return _gather(table_RW, ids), (ids, jnp.zeros((table_RW.shape[0], 0)))


def _gather_backward(
    kernel: str, saved: Any, cotangent: jax.Array
) -> tuple[jax.Array, None]:
    ids, like_R0 = saved
    gradient = RowGradient(ids[..., None], None, cotangent)
    shape = len(like_R0), cotangent.shape[-1]
    table_bar_RW = table_gradient(gradient, *shape, kernel=kernel)
    return table_bar_RW.astype(cotangent.dtype), None


_gather_by_row.defvjp(_gather_forward, _gather_backward)


def embedding_bag(
    table_RW: jax.Array, ids: Any, weights: jax.Array, kernel: str = "auto"
) -> jax.Array:
    """Weighted sums of rows: out = sum over k of weights_k * table[ids_k].

    Args:
        table_RW: rows x width; uint16 holds the bits of bfloat16.
        ids: integers [..., K]; of the host: checked (`row_ids`).
        weights: float [..., K].
        kernel: the program that reads, see `ops.bag_kernels`; one of its KERNELS.

    Returns:
        [..., W] in float32, or wider for wider inputs, summed in that dtype in the
        order of k (kernels: eight rows at a time). An id outside the table makes its
        sum NaN, whatever its weight; K = 0 gives zeros.

    Raises:
        ShapeError: ids and weights differ in shape.
        ConfigError: a kernel was named that is none, or cannot read this table.

    Cost: K reads of W entries a token. Backward: the rows are read once more for the
        weights; the table's gradient is summed by unique row and is a whole table, so
        it is for small tables. Where the gradient stops at the table it is not formed.
    """
    ids = row_ids(ids, table_RW.shape[0])
    check_weights(ids, weights)
    flat = (math.prod(ids.shape[:-1]), ids.shape[-1])
    sums_NW: Any = _bag(kernel, table_RW, ids.reshape(flat), weights.reshape(flat))
    return sums_NW.reshape(*ids.shape[:-1], table_RW.shape[1])


def check_weights(ids: jax.Array, weights: jax.Array) -> None:
    """ShapeError unless there is one weight for each id [..., K]."""
    if ids.ndim == 0:
        raise ShapeError("ids", ids.shape, ("...", "reads"))
    if ids.shape != weights.shape:
        raise ShapeError("weights", weights.shape, ids.shape)


def weighted_sums(
    table_RW: jax.Array,
    ids_NK: jax.Array,
    weights_NK: jax.Array,
    *,
    nan_outside: bool = True,
    kernel: str = "auto",
) -> jax.Array:
    """The sums of `embedding_bag` for ids [N, K], without a gradient rule.

    With `nan_outside` False an id outside the table counts nothing.
    """
    plain = _nan_sums if nan_outside else _zero_sums
    return bag_kernels.bag_sums(
        kernel, plain, (table_RW,), ids_NK, weights_NK, nan_outside=nan_outside
    )


def _nan_sums(
    table: bag_kernels.Table, ids_NK: jax.Array, weights_NK: jax.Array
) -> jax.Array:
    table_RW = table[0]
    # One look at the ids of a token instead of one at each entry of each row.
    inside_NK = (ids_NK >= 0) & (ids_NK < len(table_RW))
    safe_NK = jnp.where(inside_NK, ids_NK, 0)
    sums_NW = plain_sums(table_RW, safe_NK, weights_NK, _read_inside)
    return jnp.where(jnp.all(inside_NK, axis=1, keepdims=True), sums_NW, jnp.nan)


def _read_inside(table_RW: jax.Array, ids_N: jax.Array) -> jax.Array:
    """Rows as numbers, for ids that are known to be inside."""
    return load(table_RW.at[ids_N].get(mode="promise_in_bounds"))


def _zero_sums(
    table: bag_kernels.Table, ids_NK: jax.Array, weights_NK: jax.Array
) -> jax.Array:
    return plain_sums(table[0], ids_NK, weights_NK, get_rows)


def plain_sums(
    table_RW: jax.Array, ids_NK: jax.Array, weights_NK: jax.Array, read: ReadRows
) -> jax.Array:
    """Weighted sums in XLA's terms; `read` gives rows for ids."""
    n_reads, n_rows_read = ids_NK.shape
    dtype = jnp.result_type(value_dtype(table_RW), weights_NK, jnp.float32)

    def add(sums_NW: jax.Array, ids_Nk: jax.Array, weights_Nk: jax.Array) -> jax.Array:
        for k in range(ids_Nk.shape[1]):
            rows_NW = read(table_RW, ids_Nk[:, k]).astype(dtype)
            sums_NW = sums_NW + rows_NW * weights_Nk[:, k, None].astype(dtype)
        return sums_NW

    def group(i: jax.Array, sums_NW: jax.Array) -> jax.Array:
        at = i * _UNROLLED
        return add(
            sums_NW,
            lax.dynamic_slice_in_dim(ids_NK, at, _UNROLLED, 1),
            lax.dynamic_slice_in_dim(weights_NK, at, _UNROLLED, 1),
        )

    # Groups keep the program small when many rows are read for a token.
    done = n_rows_read // _UNROLLED * _UNROLLED
    sums_NW = jnp.zeros((n_reads, table_RW.shape[1]), dtype)
    if done:
        sums_NW = lax.fori_loop(0, done // _UNROLLED, group, sums_NW)
    return add(sums_NW, ids_NK[:, done:], weights_NK[:, done:])


def weights_gradient(
    table_RW: jax.Array,
    ids_NK: jax.Array,
    cotangent_NW: jax.Array,
    *,
    nan_outside: bool = True,
    kernel: str = "auto",
) -> jax.Array:
    """Gradient [N, K] of the weights: products of the cotangent and the rows read."""
    plain = _nan_products if nan_outside else _zero_products
    return bag_kernels.bag_weights(
        kernel, plain, (table_RW,), ids_NK, cotangent_NW, nan_outside=nan_outside
    ).astype(cotangent_NW.dtype)


def _nan_products(
    table: bag_kernels.Table, ids_NK: jax.Array, cotangent_NW: jax.Array
) -> jax.Array:
    return plain_products(table[0], ids_NK, cotangent_NW, gather_rows)


def _zero_products(
    table: bag_kernels.Table, ids_NK: jax.Array, cotangent_NW: jax.Array
) -> jax.Array:
    return plain_products(table[0], ids_NK, cotangent_NW, get_rows)


def plain_products(
    table_RW: jax.Array, ids_NK: jax.Array, cotangent_NW: jax.Array, read: ReadRows
) -> jax.Array:
    """The gradient of the weights in XLA's terms; `read` gives rows for ids."""

    def of_token(token: tuple[jax.Array, jax.Array]) -> jax.Array:
        ids_K, cotangent_W = token
        rows_KW = read(table_RW, ids_K).astype(cotangent_W.dtype)
        return jnp.matmul(rows_KW, cotangent_W, precision=lax.Precision.HIGHEST)

    return lax.map(of_token, (ids_NK, cotangent_NW), batch_size=_TOKENS_AT_A_TIME)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bag(
    kernel: str, table_RW: jax.Array, ids_NK: jax.Array, weights_NK: jax.Array
) -> jax.Array:
    return weighted_sums(table_RW, ids_NK, weights_NK, kernel=kernel)


def _bag_forward(
    kernel: str, table_RW: Any, ids_NK: Any, weights_NK: Any
) -> tuple[jax.Array, Any]:
    """Keeps the table for the gradient of the weights, and the weights for its own.

    Each is None where that gradient is not asked for: nothing of the size of the table
    then occurs in the program.
    """
    values = (table_RW.value, ids_NK.value, weights_NK.value)
    kept = (
        table_RW.value if weights_NK.perturbed else None,
        ids_NK.value,
        weights_NK.value if table_RW.perturbed else None,
        jnp.zeros((table_RW.value.shape[0], 0), table_RW.value.dtype),
        jnp.zeros(0, weights_NK.value.dtype),
    )
    return weighted_sums(*values, kernel=kernel), kept


def _bag_backward(kernel: str, saved: Any, cotangent_NW: Any) -> tuple[Any, None, Any]:
    if isinstance(cotangent_NW, SymbolicZero):
        return None, None, None
    table_RW, ids_NK, weights_NK, like_R0, like_0 = saved
    table_bar_RW = weights_bar_NK = None
    if table_RW is not None:
        weights_bar_NK = weights_gradient(table_RW, ids_NK, cotangent_NW, kernel=kernel)
        weights_bar_NK = weights_bar_NK.astype(like_0.dtype)
    if weights_NK is not None:
        # The table is read before its update, which then needs no copy of it.
        cotangent_NW = wait_for(cotangent_NW, weights_bar_NK)
        gradient = RowGradient(ids_NK, weights_NK, cotangent_NW)
        shape = len(like_R0), cotangent_NW.shape[-1]
        table_bar_RW = table_gradient(gradient, *shape, kernel=kernel)
        table_bar_RW = table_bar_RW.astype(like_R0.dtype)
    return table_bar_RW, None, weights_bar_NK


_bag.defvjp(_bag_forward, _bag_backward, symbolic_zeros=True)


def _nan(table_RW: jax.Array) -> Any:
    """NaN in the dtype of a stored table."""
    if table_RW.dtype == jnp.uint16:
        return np.uint16(0x7FC0)
    return jnp.nan if jnp.issubdtype(table_RW.dtype, jnp.floating) else None
