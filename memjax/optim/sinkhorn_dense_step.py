"""The step of `sinkhorn_rows` over all rows of the table.

What: `dense_step`, the published step; it also fills the buffer of active rows anew.
Why: it is right whatever the rows outside the buffer hold, and rarely needed.
When not: called by hand; `sinkhorn_rows` decides when it is due.
"""

import jax
import jax.numpy as jnp
from jax import lax

from memjax.ops.rows import get_rows, load, set_rows, store
from memjax.ops.sinkhorn import balance_kept, row_sizes
from memjax.ops.split import Split
from memjax.optim.active_rows import (
    Entered,
    SinkhornRowsState,
    all_free,
    block_rows,
    decay,
)
from memjax.optim.sinkhorn_settings import SinkhornSettings


def dense_step(
    settings: SinkhornSettings,
    slack: float,
    entered: Entered,
    rate: jax.Array,
    table_RW: jax.Array,
    state: SinkhornRowsState,
    *,
    split: Split,
) -> tuple[jax.Array, SinkhornRowsState, jax.Array]:
    """Mask, balance and move all rows, and choose the active ones.

    Args:
        settings, slack: of the optimizer.
        entered: the rows of the step.
        rate: factor of the balanced update, with its sign.
        table_RW, state: after the rows entered, before anything was written.
        split: the part of the table at hand.

    Returns:
        (table, state, sum of the squares of the update here). The buffer holds the
        momentum after the step. Active are the rows above `slack` times the threshold
        of the mask and those of the step; when they are more than the slots, the first
        ones by number are kept.

    Cost: that of `sinkhorn_momentum`, and one temporary table.
    """
    beta = settings.beta
    n_rows, n_slots = len(state.place_R), len(state.ids_A)
    size = block_rows(table_RW.shape[1])
    age_R = state.step + 2 + state.place_R
    momentum_RW = load(state.momentum_RW).astype(jnp.float32)
    momentum_RW = momentum_RW * decay(beta, age_R)[:, None]
    momentum_RW = momentum_RW.at[state.ids_A].set(beta * state.active_AW, mode="drop")
    # Rows that were read stand in the buffer as look-aheads, or found no place.
    ids_U = entered.rows.ids_U
    ahead_RW = set_rows(momentum_RW, ids_U, beta * entered.before_UW)
    sizes = row_sizes(ahead_RW, norm=settings.norm, split=split)
    norm_R = beta * sizes.norm_R * sizes.peak_R
    n_all = n_rows if split.n_rows is None else split.n_rows
    mean = split.sum_over_rows(jnp.sum(norm_R)) / n_all
    rows_R, columns_W = balance_kept(
        ahead_RW,
        sizes,
        norm_R > settings.tau * mean,
        n_iterations=settings.n_iterations,
        eps=settings.eps / beta,
        norm=settings.norm,
        block_rows=size if size < n_rows else 0,
        split=split,
    )
    rows_R = rate * rows_R
    # The barriers keep the compiler from holding whole tables for a second use.
    table_RW, writes = settings.writer.add_all(
        table_RW, state.writes, ahead_RW * rows_R[:, None] * columns_W, split=split
    )
    ahead_RW, rows_R, columns_W, table_RW = lax.optimization_barrier(
        (ahead_RW, rows_R, columns_W, table_RW)
    )
    moved_RW = ahead_RW * rows_R[:, None] * columns_W
    square = jnp.sum(moved_RW * moved_RW)
    ahead_RW, square = lax.optimization_barrier((ahead_RW, square))
    momentum_RW = set_rows(ahead_RW, ids_U, entered.after_UW)
    active_R = set_rows(norm_R > slack * settings.tau * mean, ids_U, True)
    rank_R = lax.associative_scan(jnp.add, active_R.astype(jnp.int32)) - 1
    active_R = active_R & (rank_R < n_slots)
    n_active = jnp.sum(active_R, dtype=jnp.int32)
    ids_A = jnp.nonzero(active_R, size=n_slots, fill_value=n_rows)[0]
    after = row_sizes(momentum_RW, norm=settings.norm, split=split)
    outside_R = jnp.where(active_R, 0, after.norm_R * after.peak_R)
    state = state._replace(
        momentum_RW=store(momentum_RW.astype(settings.momentum_dtype)),
        place_R=jnp.where(active_R, rank_R, -2 - state.step),
        ids_A=ids_A.astype(jnp.int32),
        active_AW=get_rows(momentum_RW, ids_A),
        free_A=all_free(n_slots),
        counts_3=jnp.stack([n_slots - n_active, n_active, n_active]),
        outside_2=jnp.stack([jnp.sum(outside_R), jnp.max(outside_R, initial=0)]),
        writes=writes,
    )
    return table_RW, state, square
