"""Sinkhorn balancing of an update that is never in one place.

What: `balance_streamed`, the factors of `balance_factors`, from blocks of rows.
Why: the momentum of a table on the host passes through the device block by block.
When not: an update on the device; see `sinkhorn`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.ops.sinkhorn import Sweep, divided_factor, root_of_sum, row_sizes
from memjax.ops.split import WHOLE


def balance_streamed(
    block: Callable[[slice], Any],
    parts: list[slice],
    *,
    keep: Callable[[np.ndarray], np.ndarray],
    n_iterations: int,
    eps: float,
    norm: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row factors, column factors, norms of the rows), as numpy float32.

    Args:
        block: rows of the update, float32 [n, W]; asked for several times.
        parts: the rows of each block, one after the other, from row 0.
        keep: (norm of each row) -> bool, the rows that take part.
        n_iterations, eps, norm: as in `balance_factors`.

    Cost: (n_iterations + 3) / 2 reads of the update.
    """
    measured = [jax.device_get(_sizes(block(part), norm)) for part in parts]
    peak_R, unit_R = (np.concatenate(x) for x in zip(*measured, strict=True))
    norm_R = unit_R * peak_R
    kept_R = keep(norm_R)
    safe_R = np.where(kept_R, peak_R, 1)
    with np.errstate(divide="ignore"):
        shrink_R = np.where(peak_R > 0, np.float32(1) / peak_R, np.float32(0))
        rows_R = np.where(kept_R, 1 / (unit_R + np.float32(eps) / safe_R), 0)
    rows_R = rows_R.astype(np.float32)
    columns_W = jnp.ones(block(parts[0]).shape[1], jnp.float32)

    def sweep(columns_W: jax.Array, row_step: bool, column_sums: bool) -> jax.Array:
        sums_W = jnp.zeros_like(columns_W)
        for part in parts:
            new_B, found_W = _swept(
                block(part),
                shrink_R[part],
                rows_R[part],
                columns_W,
                eps,
                norm,
                row_step,
                column_sums,
            )
            sums_W = sums_W + found_W
            if row_step:
                rows_R[part] = new_B
        return sums_W

    for pair in range(n_iterations // 2):
        sums_W = sweep(columns_W, pair > 0, True)
        columns_W = divided_factor(
            columns_W, root_of_sum(sums_W, norm), jnp.float32(eps)
        )
    if n_iterations > 1:
        sweep(columns_W, True, False)
    return rows_R * shrink_R, np.asarray(columns_W), norm_R


@partial(jax.jit, static_argnums=1)
def _sizes(update_BW: jax.Array, norm: str) -> tuple[jax.Array, jax.Array]:
    sizes = row_sizes(update_BW, norm=norm)
    return sizes.peak_R, sizes.norm_R


@partial(jax.jit, static_argnums=(5, 6, 7))
def _swept(
    update_BW: jax.Array,
    shrink_B: jax.Array,
    rows_B: jax.Array,
    columns_W: jax.Array,
    eps: jax.Array,
    norm: str,
    row_step: bool,
    column_sums: bool,
) -> tuple[jax.Array, jax.Array]:
    sweep = Sweep(
        update_BW, shrink_B, jnp.asarray(eps, jnp.float32), norm, 0, None, WHOLE
    )
    return sweep(rows_B, columns_W, row_step=row_step, column_sums=column_sums)
