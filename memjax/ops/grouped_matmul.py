"""One matrix for each group of neighbouring rows, at the cost of the rows.

What: `grouped_matmul`: rows sorted by group, times the matrix of their group.
Why: `jax.lax.ragged_dot` says the same, but off the TPU it is carried out as a product
    with every matrix: G times the arithmetic (measured with jax 0.10.2 on a CPU).
When not: with one group it is a plain product, and for a few tiny matrices a product
    with all of them is quicker.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax.arrays import check_shape
from memjax.errors import ConfigError


def grouped_matmul(
    x_PD: Array, kernel_GDF: Array, sizes_G: Array, *, block_rows: int | None = None
) -> Array:
    """out[p] = x[p] @ kernel[g] for the group g that row p lies in.

    Args:
        x_PD: float rows; those of group 0 first, then those of group 1, and so on.
        kernel_GDF: a matrix for each group, of the dtype of `x_PD`.
        sizes_G: integers >= 0, rows of each group; their sum is at most P. They may
            change from call to call without a new compilation.
        block_rows: rows multiplied at once. None: a quarter of the mean group, so that
            half-empty blocks waste about an eighth of the arithmetic.

    Returns:
        [P, F] in the dtype of `x_PD`; rows beyond the last group are 0. A row depends
        on no other row.

    Raises:
        ShapeError: kernel or sizes do not fit.
        ConfigError: block_rows is below 1.

    Cost: a loop over blocks that stay inside a group, at most P / block_rows + G of
        them. Backward, for reverse mode only: the same for x, and for the kernels
        sums in float32 or wider, in a fixed order.
    """
    n_rows, width = x_PD.shape
    n_groups = kernel_GDF.shape[0]
    check_shape("kernel", kernel_GDF, (None, width, None))
    check_shape("sizes", sizes_G, (n_groups,))
    if block_rows is None:
        block_rows = max(8, -(-n_rows // (4 * n_groups)))
    if block_rows < 1:
        raise ConfigError("block_rows", block_rows, "None, or at least 1")
    if n_groups == 1:
        whole = x_PD @ kernel_GDF[0]
        return jnp.where(jnp.arange(n_rows)[:, None] < sizes_G[0], whole, 0)
    return _product(x_PD, kernel_GDF, sizes_G, block_rows)


class _Blocks(NamedTuple):
    """Where the blocks lie: the group and first row of each, the end of each group."""

    groups: Array
    starts: Array
    ends_G: Array
    n_used: Array

    @classmethod
    def of(cls, sizes_G: Array, n_rows: int, block_rows: int) -> "_Blocks":
        sizes_G = sizes_G.astype(jnp.int32)
        per_group_G = (sizes_G + block_rows - 1) // block_rows
        ends_G, last_G = jnp.cumsum(sizes_G), jnp.cumsum(per_group_G)
        number = jnp.arange(n_rows // block_rows + len(sizes_G), dtype=jnp.int32)
        groups = jnp.searchsorted(last_G, number, side="right").astype(jnp.int32)
        groups = jnp.minimum(groups, len(sizes_G) - 1)
        within = number - (last_G - per_group_G)[groups]
        starts = (ends_G - sizes_G)[groups] + within * block_rows
        return cls(groups, starts, ends_G, last_G[-1])


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x_PD: Array, kernel_GDF: Array, sizes_G: Array, block_rows: int) -> Array:
    return _rows(x_PD, kernel_GDF, sizes_G, block_rows, contracted=0)


def _forward(
    x_PD: Array, kernel_GDF: Array, sizes_G: Array, block_rows: int
) -> tuple[Array, Any]:
    out_PF = _rows(x_PD, kernel_GDF, sizes_G, block_rows, contracted=0)
    return out_PF, (x_PD, kernel_GDF, sizes_G)


def _backward(block_rows: int, saved: Any, bar_PF: Array) -> tuple[Array, Array, None]:
    x_PD, kernel_GDF, sizes_G = saved
    x_bar_PD = _rows(bar_PF, kernel_GDF, sizes_G, block_rows, contracted=1)
    blocks = _Blocks.of(sizes_G, len(x_PD), block_rows)
    x_PD, bar_PF = _padded(x_PD, block_rows), _padded(bar_PF, block_rows)
    wide = jnp.promote_types(kernel_GDF.dtype, jnp.float32)

    def add(i: Array, kernel_bar_GDF: Array) -> Array:
        start, group = blocks.starts[i], blocks.groups[i]
        own_b1 = (start + jnp.arange(block_rows) < blocks.ends_G[group])[:, None]
        x_bD = lax.dynamic_slice_in_dim(x_PD, start, block_rows)
        bar_bF = lax.dynamic_slice_in_dim(bar_PF, start, block_rows)
        term_DF = lax.dot_general(
            jnp.where(own_b1, x_bD, 0),
            jnp.where(own_b1, bar_bF, 0),
            (((0,), (0,)), ((), ())),
            preferred_element_type=wide,
        )
        return kernel_bar_GDF.at[group].add(term_DF)

    zeros_GDF = jnp.zeros(kernel_GDF.shape, wide)
    kernel_bar_GDF = lax.fori_loop(0, blocks.n_used, add, zeros_GDF)
    return x_bar_PD, kernel_bar_GDF.astype(kernel_GDF.dtype), None


_product.defvjp(_forward, _backward)


def _rows(
    x_PA: Array, kernel_GDF: Array, sizes_G: Array, block_rows: int, contracted: int
) -> Array:
    """x @ kernel[g] (contracted 0) or x @ kernel[g].T (contracted 1) of each row."""
    blocks = _Blocks.of(sizes_G, len(x_PA), block_rows)
    padded_PA = _padded(x_PA, block_rows)
    width = kernel_GDF.shape[2 - contracted]

    def write(i: Array, out_PB: Array) -> Array:
        # Blocks ascend: what one writes beyond its group, the next group overwrites.
        x_bA = lax.dynamic_slice_in_dim(padded_PA, blocks.starts[i], block_rows)
        out_bB = lax.dot_general(
            x_bA, kernel_GDF[blocks.groups[i]], (((1,), (contracted,)), ((), ()))
        )
        return lax.dynamic_update_slice_in_dim(
            out_PB, out_bB.astype(out_PB.dtype), blocks.starts[i], 0
        )

    out_PB = jnp.zeros((len(padded_PA), width), x_PA.dtype)
    out_PB = lax.fori_loop(0, blocks.n_used, write, out_PB)[: len(x_PA)]
    in_a_group_P1 = jnp.arange(len(x_PA))[:, None] < blocks.ends_G[-1]
    return jnp.where(in_a_group_P1, out_PB, 0)


def _padded(x_PA: Array, block_rows: int) -> Array:
    return jnp.pad(x_PA, ((0, block_rows), (0, 0)))
