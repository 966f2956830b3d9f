"""Dot products of vectors with rows of a table that are chosen for each of them.

What: `row_dots`, with its gradient: the first half of a read of experts.
Why: the plain form stores every row it reads, for all tokens, until the backward pass.
When not: weighted sums of rows are `embedding_bag`, which this is the transpose of.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from memjax.errors import ShapeError
from memjax.ops.embedding_bag import row_ids, weighted_sums, weights_gradient
from memjax.ops.order import wait_for
from memjax.ops.row_gradient import RowGradient, table_gradient
from memjax.ops.rows import value_dtype


def row_dots(
    table_RW: jax.Array, ids: Any, x: jax.Array, kernel: str = "auto"
) -> jax.Array:
    """out_k = x . table[ids_k] for every vector.

    Args:
        table_RW: rows x width, any float dtype.
        ids: integers [..., K]; of the host: checked (`row_ids`).
        x: float [..., W].
        kernel: the program that reads, see `ops.bag_kernels`; one of its KERNELS.

    Returns:
        [..., K] in float32, or wider for wider inputs. An id outside the table gives
        NaN; no vectors or K = 0 give an empty array.

    Raises:
        ShapeError: the axes of ids, x and table do not fit.

    Cost: K reads of W entries a vector, a few vectors at a time, so that [..., K, W]
        is never formed. Backward: the rows are read once more for x; the table's
        gradient is a whole table, summed by unique row, so it is for tables that are
        ordinary parameters.
    """
    table_RW, x = jnp.asarray(table_RW), jnp.asarray(x)
    ids = row_ids(ids, table_RW.shape[0])
    width = table_RW.shape[1]
    if ids.ndim == 0 or x.shape != (*ids.shape[:-1], width):
        raise ShapeError("x", tuple(x.shape), (*ids.shape[:-1], width))
    dtype = jnp.result_type(value_dtype(table_RW), x, jnp.float32)
    if math.prod(ids.shape) == 0:
        return jnp.zeros(ids.shape, dtype)
    n = math.prod(ids.shape[:-1])
    flat_NW = x.reshape(n, width).astype(dtype)
    dots_NK: Any = _dots(kernel, table_RW, ids.reshape(n, -1), flat_NW)
    return dots_NK.reshape(ids.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dots(
    kernel: str, table_RW: jax.Array, ids_NK: jax.Array, x_NW: jax.Array
) -> jax.Array:
    # The weights of a bag have just this gradient.
    return weights_gradient(table_RW, ids_NK, x_NW, kernel=kernel)


def _forward(
    kernel: str, table_RW: jax.Array, ids_NK: jax.Array, x_NW: jax.Array
) -> tuple[jax.Array, Any]:
    return _dots(kernel, table_RW, ids_NK, x_NW), (table_RW, ids_NK, x_NW)


def _backward(
    kernel: str, saved: Any, bar_NK: jax.Array
) -> tuple[jax.Array, None, jax.Array]:
    table_RW, ids_NK, x_NW = saved
    x_bar_NW = weighted_sums(table_RW, ids_NK, bar_NK, kernel=kernel)
    x_bar_NW = x_bar_NW.astype(x_NW.dtype)
    # The table is read before its update, which then needs no copy of it.
    gradient = RowGradient(ids_NK, bar_NK, wait_for(x_NW, x_bar_NW))
    table_bar_RW = table_gradient(gradient, *table_RW.shape, kernel=kernel)
    return table_bar_RW.astype(table_RW.dtype), None, x_bar_NW


_dots.defvjp(_forward, _backward)
