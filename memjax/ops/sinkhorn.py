"""Sinkhorn balancing of a table of updates, with carried scaling vectors.

What: mask the weak rows, then make rows and columns of unit norm in turn.
Why: the direction of the table optimizer; one pure function a notebook can try.
When not: doubly stochastic matrices; this balances norms, it does not sum to one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memjax.errors import ConfigError, ShapeError

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

    Returns:
        BalanceFactors in the workspace dtype. A row that is zero or masked and a
        column that is zero over the kept rows have factor 0. All-zero updates,
        and tables without rows, give zeros, never NaN.

    Raises:
        ShapeError: `update_RW` has not two axes.
        ConfigError: n_iterations is even or below 1, or norm is unknown.

    Cost: about (n_iterations + 1) / 2 reads of the update; memory O(R + W) plus
        one workspace copy when the dtype is narrower than float32.
    Source: arXiv:2609.19969 section 2.5, Algorithm 1, steps 3 and 4. Differs: the
        factors are carried instead of the matrix being rewritten (section 3.1.3
        there); equal to the plain loop up to rounding.
    """
    check_balance_arguments(n_iterations=n_iterations, norm=norm)
    if update_RW.ndim != 2:
        raise ShapeError("update", tuple(update_RW.shape), "two axes (rows, width)")
    dtype = workspace_dtype(update_RW.dtype)
    update_RW = update_RW.astype(dtype)
    eps = jnp.asarray(eps, dtype)

    peak_R = jnp.max(jnp.abs(update_RW), axis=1, initial=0.0)
    peak_R = jnp.where(peak_R < jnp.finfo(dtype).tiny, 0.0, peak_R)
    shrink_R = jnp.where(peak_R > 0, 1 / jnp.where(peak_R > 0, peak_R, 1), 0.0)
    norm_R = _root(jnp.sum(_power(update_RW * shrink_R[:, None], norm), 1), norm)

    peak = jnp.max(peak_R, initial=0.0)
    share_R = norm_R * (peak_R / jnp.where(peak > 0, peak, 1))
    kept_R = (share_R > jnp.asarray(tau, dtype) * jnp.mean(share_R)) & (peak_R > 0)

    # Step k = 1 is row-wise and needs no further read: U / (|U| + eps) is
    # (U / peak) / (|U| / peak + eps / peak).
    safe_R = jnp.where(kept_R, peak_R, 1)
    rows_R = jnp.where(kept_R, 1 / (norm_R + eps / safe_R), 0.0)
    columns_W = jnp.ones(update_RW.shape[1], dtype)
    for _ in range(n_iterations // 2):
        scaled_RW = update_RW * shrink_R[:, None]
        column_norm_W = _root(
            jnp.sum(_power(rows_R[:, None], norm) * _power(scaled_RW, norm), 0), norm
        )
        columns_W = _divide(columns_W, column_norm_W, eps)
        row_norm_R = _root(
            jnp.sum(_power(scaled_RW, norm) * _power(columns_W, norm), 1), norm
        )
        rows_R = _divide(rows_R, row_norm_R, eps)
    return BalanceFactors(rows_R * shrink_R, columns_W, kept_R)


def sinkhorn_balance(
    update_RW: jax.Array,
    *,
    n_iterations: int = 11,
    tau: float = 1e-3,
    eps: float = 1e-20,
    norm: str = "l2",
) -> jax.Array:
    """The masked and balanced update: kept rows have norm 1, masked rows are 0.

    Arguments, errors and source as in `balance_factors`.

    Returns:
        balanced_RW in the workspace dtype (float32 for bfloat16 input).
    """
    factors = balance_factors(
        update_RW, n_iterations=n_iterations, tau=tau, eps=eps, norm=norm
    )
    update_RW = update_RW.astype(factors.rows_R.dtype)
    return update_RW * factors.rows_R[:, None] * factors.columns_W


def _power(x: jax.Array, norm: str) -> jax.Array:
    return x * x if norm == "l2" else jnp.abs(x)


def _root(x: jax.Array, norm: str) -> jax.Array:
    return jnp.sqrt(x) if norm == "l2" else x


def _divide(factor: jax.Array, norm: jax.Array, eps: jax.Array) -> jax.Array:
    """factor / (factor * norm + eps), and 0 where there is nothing to divide."""
    length = factor * norm
    return jnp.where(length > 0, factor / jnp.where(length > 0, length + eps, 1), 0.0)
