"""Sinkhorn momentum of a table at the cost of its active rows.

What: `sinkhorn_rows`, the published optimizer, exactly, for row gradients.
Why: a row that was read once keeps moving for about 150 steps, so updating only the
    rows of the step is not the published optimizer, and updating all rows costs a pass
    over the table for each iteration.
When not: tables whose rows are mostly read in every step; use the dense transform.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from memjax.errors import ConfigError
from memjax.ops.row_gradient import UniqueRows
from memjax.ops.rows import check_table, set_rows
from memjax.ops.sinkhorn import balance_kept, row_sizes
from memjax.ops.split import WHOLE, Split
from memjax.optim.active_rows import (
    Entered,
    Held,
    SinkhornRowsState,
    block_rows,
    enter,
    init_active,
    leave,
    repartition_active,
)
from memjax.optim.row_write import RowWriter
from memjax.optim.sinkhorn_dense_step import dense_step
from memjax.optim.sinkhorn_settings import SinkhornSettings
from memjax.optim.sinkhorn_streamed import streamed_step
from memjax.optim.table_optimizer import Metrics, TableOptimizer


def sinkhorn_rows(
    learning_rate: optax.ScalarOrSchedule,
    *,
    capacity: int,
    gamma: float = 0.18,
    beta: float = 0.95,
    n_iterations: int = 11,
    tau: float = 1e-3,
    eps: float = 1e-20,
    norm: str = "l2",
    slack: float = 0.25,
    momentum_dtype: Any = "float32",
    writer: RowWriter | None = None,
    held_reads: int | None = None,
) -> TableOptimizer:
    """The optimizer `sinkhorn_momentum`, exactly, at the cost of the active rows.

    A row without a gradient only decays: its momentum and look-ahead shrink by beta a
    step. Rows whose look-ahead could pass the mask are kept in a buffer and moved at
    every step; a row leaves it when its norm falls to slack * tau of the mean row norm,
    about log(slack * tau) / log(beta) = 160 steps after its last read, and its decay is
    made up for when it is read again. The sum of the norms outside enters the mean, and
    the largest is compared with the mask at every step: if a row outside could pass it
    (the mean fell faster than beta a step), or the buffer is full, that step is done
    densely, over all rows, and counted. A row that was read in the step never leaves in
    it: its momentum is not yet its look-ahead divided by beta.

    Args:
        learning_rate: a number, or a schedule from step to number.
        capacity: rows in the buffer, over all devices; read rows times 40 is typical.
            Rounded up to whole blocks.
        gamma, beta, n_iterations, tau, eps, norm: as in `sinkhorn_momentum`; beta > 0.
        slack: how far below the mask a row must fall to leave, 0 <= slack < 1.
        momentum_dtype: dtype (name) of the momentum of rows outside the buffer.
        writer: how rows are written; plain by default.
        held_reads: for a table of which only some rows are at hand (`Split.n_rows`
            says how many there are): most distinct rows of a step. A dense step is
            then counted and not done; `SinkhornRowsState.held` has what
            `sinkhorn_streamed.streamed_step` needs to do it before the next step.

    Returns:
        A TableOptimizer with the metrics "update_norm", "active_rows", and the counts
        so far "dense_steps" (a row outside could have passed) and "overflow_steps".

    Raises:
        ConfigError: an argument is out of range.

    Cost: memory, one momentum like the table, one int32 a row, and the buffer. Time of
        an ordinary step: (n_iterations + 5) / 2 + 1 reads and one write of the buffer,
        and one write of the table's rows that move. A dense step: that of
        `sinkhorn_momentum`, with a few vectors of R entries and one temporary table.
    Source: arXiv:2609.19969 section 2.5, Algorithm 1; the sparse form is ours. Differs
        from the dense transform by rounding only. The running sum outside decays by
        beta a step, so its rounding error stays below 1 / (1 - beta) roundings, and it
        weighs at most slack * tau in the mean: it needs no recomputation.
    """
    settings = SinkhornSettings(
        owner="sinkhorn_rows",
        learning_rate=learning_rate,
        gamma=gamma,
        beta=beta,
        n_iterations=n_iterations,
        tau=tau,
        eps=eps,
        norm=norm,
        momentum_dtype=momentum_dtype,
        writer=RowWriter() if writer is None else writer,
    )
    settings.check_range("slack", slack, 1)
    if beta == 0:
        allowed = "above 0; without momentum sinkhorn_touched_rows is the same"
        raise ConfigError("sinkhorn_rows.beta", beta, allowed)
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ConfigError(
            "sinkhorn_rows.capacity", capacity, "an integer, at least 1 row"
        )
    form = _SinkhornRows(settings, capacity, slack, held_reads)
    streamed = None if held_reads is None else partial(streamed_step, settings, slack)
    return TableOptimizer(
        form.init, form.apply, form.mean, repartition_active, streamed
    )


@dataclass(frozen=True)
class _SinkhornRows:
    settings: SinkhornSettings
    capacity: int
    slack: float
    held_reads: int | None = None

    def init(self, table_RW: jax.Array, split: Split = WHOLE) -> SinkhornRowsState:
        check_table(table_RW)
        n_parts = 1 if split.row_axis is None else lax.axis_size(split.row_axis)
        settings = self.settings
        state = init_active(
            table_RW,
            -(-self.capacity // n_parts),
            settings.momentum_dtype,
            settings.writer.init(table_RW),
        )
        if self.held_reads is None:
            return state
        n_rows, width = table_RW.shape
        zeros_UW = jnp.zeros((self.held_reads, width), jnp.float32)
        ids_U = jnp.full(self.held_reads, n_rows, jnp.int32)
        return state._replace(held=Held(jnp.zeros((), bool), ids_U, zeros_UW, zeros_UW))

    def mean(self, table_RW: jax.Array, state: SinkhornRowsState) -> jax.Array:
        return self.settings.writer.mean(table_RW, state.writes)

    def apply(
        self,
        rows: UniqueRows,
        state: SinkhornRowsState,
        table_RW: jax.Array,
        split: Split = WHOLE,
    ) -> tuple[jax.Array, SinkhornRowsState, Metrics]:
        settings, beta, norm = self.settings, self.settings.beta, self.settings.norm
        n_slots, width = state.active_AW.shape
        rate = settings.rate(state.step, width, split)
        state, entered = enter(state, rows, beta=beta, norm=norm, split=split)
        state = state._replace(writes=settings.writer.begin(state.writes))

        size = min(block_rows(width), n_slots)
        n_blocks = (state.counts_3[1] + size - 1) // size
        sizes = row_sizes(
            state.active_AW, norm=norm, block_rows=size, n_blocks=n_blocks, split=split
        )
        n_all = table_RW.shape[0] if split.n_rows is None else split.n_rows
        norm_A = (beta**2) * sizes.norm_R * sizes.peak_R
        total = split.sum_over_rows(jnp.sum(norm_A) + beta * state.outside_2[0])
        mean = total / n_all
        bound = split.max_over_rows(beta * state.outside_2[1])
        passes = bound > settings.tau * mean
        dense = entered.overflow | passes
        n_blocks = jnp.where(dense, 0, n_blocks)
        kept_A = norm_A > settings.tau * mean
        rows_A, columns_W = balance_kept(
            state.active_AW,
            sizes,
            kept_A,
            n_iterations=settings.n_iterations,
            eps=settings.eps / beta**2,
            norm=norm,
            block_rows=size,
            n_blocks=n_blocks,
            split=split,
        )
        # Masked rows have factor 0; leaving them out spares a write of each.
        table_RW, writes, square = settings.writer.add_blocks(
            table_RW,
            state.writes,
            jnp.where(kept_A, state.ids_A, table_RW.shape[0]),
            state.active_AW,
            rate * rows_A,
            columns_W,
            size=size,
            n_blocks=n_blocks,
            split=split,
        )
        # A row that was read in this step has another momentum; it may leave later.
        light_A = norm_A <= self.slack * settings.tau * mean
        light_A = set_rows(light_A, entered.slot_U, False) & ~dense
        state = leave(state._replace(writes=writes), norm_A, light_A, beta=beta)
        if state.held is None:
            # A loop of at most one trip: `lax.cond` would copy the donated tables.
            _, table_RW, state, square = lax.while_loop(
                lambda carry: carry[0],
                partial(self._dense_once, split, entered, rate),
                (dense, table_RW, state, square),
            )
        else:
            state = state._replace(held=self._held(dense, entered, len(table_RW)))
        scale_A = jnp.where(dense, 1.0, jnp.where(light_A, 0.0, beta))
        slot_U = jnp.where(dense, n_slots, entered.slot_U)
        active_AW = state.active_AW * scale_A[:, None]
        state = state._replace(
            active_AW=set_rows(active_AW, slot_U, entered.after_UW),
            step=state.step + 1,
            dense_steps=state.dense_steps + (passes & ~entered.overflow),
            overflow_steps=state.overflow_steps + entered.overflow,
        )
        square = split.sum_over_columns(split.sum_over_rows(square))
        metrics = {
            "update_norm": jnp.sqrt(square),
            "active_rows": split.sum_over_rows(state.counts_3[2]),
            "dense_steps": state.dense_steps,
            "overflow_steps": state.overflow_steps,
        }
        return table_RW, state, metrics

    def _held(self, due: jax.Array, entered: Entered, n_rows: int) -> Held:
        rest = (self.held_reads or 0) - len(entered.rows.ids_U)
        ids_U = jnp.pad(entered.rows.ids_U, (0, rest), constant_values=n_rows)
        before_UW, after_UW = (
            jnp.pad(rows_UW, ((0, rest), (0, 0)))
            for rows_UW in (entered.before_UW, entered.after_UW)
        )
        return Held(due, ids_U, before_UW, after_UW)

    def _dense_once(
        self, split: Split, entered: Entered, rate: jax.Array, carry: Any
    ) -> Any:
        """The dense step as the body of a loop that ends after it."""
        _, table_RW, state, _ = carry
        table_RW, state, square = dense_step(
            self.settings, self.slack, entered, rate, table_RW, state, split=split
        )
        return jnp.zeros((), bool), table_RW, state, square
