"""Sinkhorn balancing of a table of updates, with carried scaling vectors.

What: mask the weak rows, then make rows and columns of unit norm in turn.
Why: the direction of the table optimizer; one pure function a notebook can try.
When not: doubly stochastic matrices; this balances norms, it does not sum to one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memjax.errors import ConfigError, ShapeError
from memjax.ops.split import WHOLE, Split

NORMS = ("l1", "l2")


class BalanceFactors(NamedTuple):
    """What one balancing found: the result is `update * rows * columns`.

    Attributes:
        rows_R: factor of each row, 0 for a masked or zero row.
        columns_W: factor of each column, 0 for a column without any entry.
        kept_R: bool, True for the rows above the threshold.
    """

    rows_R: jax.Array
    columns_W: jax.Array
    kept_R: jax.Array


def check_balance_arguments(
    *, n_iterations: Any, norm: Any, field: str = "sinkhorn"
) -> None:
    """Raise ConfigError unless the static arguments of a balancing are usable.

    Args:
        n_iterations: a python int, odd and at least 1, so that rows come last.
        norm: one of `NORMS`.
        field: dotted name that stands before the argument in the message.
    """
    if isinstance(n_iterations, bool) or not isinstance(n_iterations, int):
        raise ConfigError(
            f"{field}.n_iterations",
            n_iterations,
            "a python int, known when the step is compiled (a static argument)",
        )
    if n_iterations < 1 or n_iterations % 2 == 0:
        raise ConfigError(
            f"{field}.n_iterations",
            n_iterations,
            "an odd number from 1 up, so that the last step is over rows",
        )
    if norm not in NORMS:
        raise ConfigError(f"{field}.norm", norm, f"one of {list(NORMS)}")


def workspace_dtype(dtype: Any) -> Any:
    """The dtype a balancing computes in: float32, or the input's when wider."""
    return jnp.promote_types(dtype, jnp.float32)


def balance_factors(
    update_RW: jax.Array,
    *,
    n_iterations: int = 11,
    tau: float = 1e-3,
    eps: float = 1e-20,
    norm: str = "l2",
    block_rows: int | None = None,
    split: Split = WHOLE,
) -> BalanceFactors:
    """Row and column factors of a balanced update; the matrix is only read.

    Rows whose norm is at most `tau` times the mean row norm (zero rows count in
    the mean) are masked. Then, for k = 1 .. n_iterations, odd k divides every row
    by its norm plus eps and even k every column by its norm plus eps. Only the
    two vectors of factors change; they start from one at every call.

    Every row is first divided by its largest absolute entry, a factor that
    belongs to the row's own vector, so squares neither overflow nor vanish and
    the first division by `norm + eps` keeps its literal meaning. In float32 an
    entry below 1e-19 of its row's largest counts as 0, as does a row whose
    largest entry is below the smallest normal number.

    Args:
        update_RW: rows x width, any float dtype; float32 inside, or wider.
        n_iterations: odd, at least 1.
        tau: rows at or below tau * mean row norm are masked; 0 masks zero rows.
        eps: added to every norm before the division.
        norm: "l2" (the published form) or "l1".
        block_rows: rows taken at a time by one sweep, 0 for the whole matrix; None
            decides by the backend (`default_block_rows`). A matrix whose rows are
            sharded by the compiler wants 0. The result is the same up to rounding.
        split: how the matrix is divided over mesh axes, inside `shard_map`.

    Returns:
        BalanceFactors in the workspace dtype. A row that is zero or masked and a
        column that is zero over the kept rows have factor 0. All-zero updates,
        and tables without rows, give zeros, never NaN.

    Raises:
        ShapeError: `update_RW` has not two axes.
        ConfigError: n_iterations is even or below 1, or norm is unknown.

    Cost: with blocks (n_iterations + 5) / 2 reads of the update, two of them for
        peak and norm, because the row statistics of step k and the column
        statistics of step k + 1 come from one read; n_iterations + 2 without. Memory
        O(R + W), plus a workspace copy when the dtype is narrower than float32.
    Source: arXiv:2609.19969 section 2.5, Algorithm 1, steps 3 and 4. Differs: the
        factors are carried instead of the matrix being rewritten (section 3.1.3
        there); equal to the plain loop up to rounding.
    """
    check_balance_arguments(n_iterations=n_iterations, norm=norm)
    if update_RW.ndim != 2:
        raise ShapeError("update", tuple(update_RW.shape), "two axes (rows, width)")
    dtype = workspace_dtype(update_RW.dtype)
    update_RW = update_RW.astype(dtype)
    if block_rows is None:
        block_rows = default_block_rows(*update_RW.shape)
    sizes = row_sizes(update_RW, norm=norm, split=split)
    n_rows = update_RW.shape[0] if split.n_rows is None else split.n_rows
    share_R = sizes.norm_R * (sizes.peak_R / jnp.where(sizes.peak > 0, sizes.peak, 1))
    mean = split.sum_over_rows(jnp.sum(share_R)) / max(n_rows, 1)
    kept_R = (share_R > jnp.asarray(tau, dtype) * mean) & (sizes.peak_R > 0)
    rows_R, columns_W = balance_kept(
        update_RW,
        sizes,
        kept_R,
        n_iterations=n_iterations,
        eps=eps,
        norm=norm,
        block_rows=block_rows,
        split=split,
    )
    return BalanceFactors(rows_R, columns_W, kept_R)


def sinkhorn_balance(
    update_RW: jax.Array,
    *,
    n_iterations: int = 11,
    tau: float = 1e-3,
    eps: float = 1e-20,
    norm: str = "l2",
    block_rows: int | None = None,
) -> jax.Array:
    """The masked and balanced update: kept rows have norm 1, masked rows are 0.

    Arguments, errors and source as in `balance_factors`.

    Returns:
        balanced_RW in the workspace dtype (float32 for bfloat16 input).
    """
    factors = balance_factors(
        update_RW,
        n_iterations=n_iterations,
        tau=tau,
        eps=eps,
        norm=norm,
        block_rows=block_rows,
    )
    update_RW = update_RW.astype(factors.rows_R.dtype)
    return update_RW * factors.rows_R[:, None] * factors.columns_W


def default_block_rows(n_rows: int, width: int) -> int:
    """Rows per block where blocks pay, on a single CPU device; else 0.

    There a block of 65536 entries stays in the second-level cache between the row
    and the column statistics, and its squares never become a matrix in memory.
    Accelerators fuse the whole matrix well, and slicing rows that are sharded over
    several devices would gather them.
    """
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return 0
    block_rows = max(1, 65536 // max(width, 1))
    return block_rows if n_rows > 2 * block_rows else 0


class RowSizes(NamedTuple):
    """What one read of an update tells about its rows.

    Attributes:
        peak_R: largest absolute entry, 0 where it is below the smallest normal.
        norm_R: norm of the row divided by its peak; the row's norm is the product.
        peak: the largest entry of all rows.
    """

    peak_R: jax.Array
    norm_R: jax.Array
    peak: jax.Array


def row_sizes(
    update_RW: jax.Array,
    *,
    norm: str = "l2",
    block_rows: int = 0,
    n_blocks: jax.Array | None = None,
    split: Split = WHOLE,
) -> RowSizes:
    """Peaks and norms of the rows of an update in a workspace dtype.

    Arguments as in `balance_kept`; blocks are read only when n_blocks is given, rows
    beyond them have size 0.
    """
    n_rows, width = update_RW.shape
    if n_blocks is None or block_rows == 0 or split.column_axis is not None:
        peak_R, norm_R = _block_sizes(update_RW, norm, split)
    else:

        def measure(i: jax.Array, sizes_2R: jax.Array) -> jax.Array:
            at = i * block_rows
            block_BW = lax.dynamic_slice_in_dim(update_RW, at, block_rows)
            block_BW = lax.optimization_barrier(block_BW)
            sizes_2B = jnp.stack(_block_sizes(block_BW, norm, split))
            return lax.dynamic_update_slice_in_dim(sizes_2R, sizes_2B, at, 1)

        peak_R, norm_R = lax.fori_loop(
            0, n_blocks, measure, jnp.zeros((2, n_rows), update_RW.dtype)
        )
    peak = split.max_over_rows(jnp.max(peak_R, initial=0.0))
    return RowSizes(peak_R, norm_R, peak)


def _block_sizes(
    update_BW: jax.Array, norm: str, split: Split
) -> tuple[jax.Array, jax.Array]:
    peak_B = jnp.max(jnp.abs(update_BW), axis=1, initial=0.0)
    peak_B = split.max_over_columns(peak_B)
    peak_B = jnp.where(peak_B < jnp.finfo(update_BW.dtype).tiny, 0.0, peak_B)
    power_B = jnp.sum(_power(update_BW * _inverse(peak_B)[:, None], norm), 1)
    return peak_B, root_of_sum(split.sum_over_columns(power_B), norm)


def balance_kept(
    update_RW: jax.Array,
    sizes: RowSizes,
    kept_R: jax.Array,
    *,
    n_iterations: int,
    eps: float | jax.Array,
    norm: str,
    block_rows: int,
    n_blocks: jax.Array | None = None,
    split: Split = WHOLE,
) -> tuple[jax.Array, jax.Array]:
    """(row factors, column factors) of the kept rows; the others have factor 0.

    Args:
        update_RW: rows x width, float32 or wider.
        sizes: of the same update.
        kept_R: bool, the rows that take part.
        n_iterations, eps, norm, block_rows, split: as in `balance_factors`. A matrix
            whose columns are divided is always swept whole.
        n_blocks: how many leading blocks hold kept rows, when that is less than all
            (a traced number); the rows must then be a whole number of blocks.
    """
    dtype = update_RW.dtype
    added = jnp.asarray(eps, dtype)
    # Step k = 1 is row-wise and needs no further read: U / (|U| + eps) is
    # (U / peak) / (|U| / peak + eps / peak).
    safe_R = jnp.where(kept_R, sizes.peak_R, 1)
    shrink_R = _inverse(sizes.peak_R)
    rows_R = jnp.where(kept_R, 1 / (sizes.norm_R + added / safe_R), 0.0)
    columns_W = jnp.ones(update_RW.shape[1], dtype)
    if split.column_axis is not None:
        block_rows = 0
    sweep = Sweep(update_RW, shrink_R, added, norm, block_rows, n_blocks, split)
    for pair in range(n_iterations // 2):
        rows_R, sums_W = sweep(rows_R, columns_W, row_step=pair > 0, column_sums=True)
        columns_W = divided_factor(
            columns_W, root_of_sum(split.sum_over_rows(sums_W), norm), added
        )
    if n_iterations > 1:
        rows_R, _ = sweep(rows_R, columns_W, row_step=True, column_sums=False)
    return rows_R * shrink_R, columns_W


class Sweep(NamedTuple):
    """One read of the matrix: a row step and the column sums after it.

    Attributes:
        update_RW: the matrix, never written.
        shrink_R: 1 / largest absolute entry of each row, 0 for a zero row.
        eps: added to every norm.
        norm: "l1" or "l2".
        block_rows: rows per block, 0 for all at once.
        n_blocks: leading blocks to read, None for all rows.
        split: how the matrix is divided.
    """

    update_RW: jax.Array
    shrink_R: jax.Array
    eps: jax.Array
    norm: str
    block_rows: int
    n_blocks: jax.Array | None
    split: Split

    def __call__(
        self,
        rows_R: jax.Array,
        columns_W: jax.Array,
        *,
        row_step: bool,
        column_sums: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """(row factors, sums over rows of powers of the scaled entries)."""
        n_rows = self.update_RW.shape[0]
        size = self.block_rows
        weights_W = _power(columns_W, self.norm)

        def take(array: jax.Array, start: Any, length: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, start, length)

        def block(
            start: Any, length: int, new_R: jax.Array, sums_W: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            update_BW = take(self.update_RW, start, length)
            shrink_B = take(self.shrink_R, start, length)
            power_BW = _power(update_BW * shrink_B[:, None], self.norm)
            # Without the barrier the squares are formed once per consumer.
            power_BW = lax.optimization_barrier(power_BW)
            rows_B = take(rows_R, start, length)
            if row_step:
                norm_B = root_of_sum(_dot(power_BW, weights_W), self.norm)
                rows_B = divided_factor(rows_B, norm_B, self.eps)
                new_R = lax.dynamic_update_slice_in_dim(new_R, rows_B, start, 0)
            if column_sums:
                sums_W = sums_W + _dot(_power(rows_B, self.norm), power_BW)
            return new_R, sums_W

        if size == 0:
            power_RW = _power(self.update_RW * self.shrink_R[:, None], self.norm)
            if row_step:
                power_R = self.split.sum_over_columns(jnp.sum(power_RW * weights_W, 1))
                rows_R = divided_factor(
                    rows_R, root_of_sum(power_R, self.norm), self.eps
                )
            sums_W = jnp.zeros_like(weights_W)
            if column_sums:
                sums_W = jnp.sum(power_RW * _power(rows_R, self.norm)[:, None], 0)
            return rows_R, sums_W
        n_blocks, n_left = divmod(n_rows, size)
        if self.n_blocks is not None:
            n_blocks, n_left = self.n_blocks, 0
        # The new factors go to a vector of their own: written into the one they are
        # read from, the whole vector would be copied at every block.
        new_R, sums_W = lax.fori_loop(
            0,
            n_blocks,
            lambda i, carry: block(i * size, size, *carry),
            (jnp.zeros_like(rows_R), jnp.zeros_like(weights_W)),
        )
        if n_left:
            new_R, sums_W = block(n_blocks * size, n_left, new_R, sums_W)
        return (new_R if row_step else rows_R), sums_W


def _inverse(x: jax.Array) -> jax.Array:
    """1 / x, and 0 for 0."""
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _power(x: jax.Array, norm: str) -> jax.Array:
    return x * x if norm == "l2" else jnp.abs(x)


def root_of_sum(x: jax.Array, norm: str) -> jax.Array:
    """A norm from the sum of its powers: of squares for "l2", of sizes for "l1"."""
    return jnp.sqrt(x) if norm == "l2" else x


def divided_factor(factor: jax.Array, norm: jax.Array, eps: jax.Array) -> jax.Array:
    """factor / (factor * norm + eps), and 0 where there is nothing to divide."""
    length = factor * norm
    return jnp.where(length > 0, factor / jnp.where(length > 0, length + eps, 1), 0.0)
