"""Sinkhorn momentum of a table at the cost of its active rows.

What: `sinkhorn_rows`, the exact form; `sinkhorn_touched_rows`, a different and worse
    optimizer that only looks at the rows of the step, for ablations.
Why: a row that was read once keeps moving for about 150 steps, so updating only the
    rows of the step is not the published optimizer, and updating all rows costs a pass
    over the table for each iteration.
When not: tables whose rows are mostly read in every step; use the dense transform.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from memjax.errors import ConfigError
from memjax.ops.row_gradient import UniqueRows
from memjax.ops.rows import carrier_of, get_rows, load, set_rows, store
from memjax.ops.sinkhorn import (
    balance_kept,
    check_balance_arguments,
    default_block_rows,
    row_sizes,
)
from memjax.ops.split import WHOLE, Split
from memjax.optim.row_write import RowWriter, WriteState
from memjax.optim.table_optimizer import Metrics, TableOptimizer


class SinkhornRowsState(NamedTuple):
    """State of `sinkhorn_rows` for R rows, W columns and a buffer of A slots.

    Attributes:
        step: int32 scalar, steps done.
        momentum_RW: momentum of the rows outside the buffer, as of the step in place_R.
        place_R: int32; s >= 0: the row is in slot s of the buffer; -1 - t: it is
            outside, and momentum_RW holds its momentum after step t.
        ids_A: int32, row of each slot; R in a free slot.
        active_AW: float32, momentum of the rows in the buffer; 0 in a free slot.
        free_A: int32, the free slots, in the first n_free entries.
        counts_3: int32: n_free; slots that were ever used since the last dense step;
            rows in the buffer.
        outside_2: float32: sum, and a bound from above, of the norms of the momentum of
            the rows outside.
        dense_steps: int32 scalar, dense steps as a row outside could pass the mask.
        overflow_steps: int32 scalar, dense steps as the buffer was full.
        writes: state of the writer.
    """

    step: jax.Array
    momentum_RW: jax.Array
    place_R: jax.Array
    ids_A: jax.Array
    active_AW: jax.Array
    free_A: jax.Array
    counts_3: jax.Array
    outside_2: jax.Array
    dense_steps: jax.Array
    overflow_steps: jax.Array
    writes: WriteState


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
) -> TableOptimizer:
    """The optimizer `sinkhorn_momentum`, exactly, at the cost of the active rows.

    A row without a gradient only decays: its momentum and look-ahead shrink by beta a
    step. Rows whose look-ahead could pass the mask are kept in a buffer and moved at
    every step; a row leaves it when its norm falls to slack * tau of the mean row norm,
    about log(slack * tau) / log(beta) = 160 steps after its last read, and its decay is
    made up for when it is read again. The sum of the norms outside enters the mean, and
    the largest is compared with the mask at every step: if a row outside could pass it
    (the mean fell faster than beta a step), or the buffer is full, that step is done
    densely, over all rows, and counted.

    Args:
        learning_rate: a number, or a schedule from step to number.
        capacity: rows in the buffer, over all devices; read rows times 40 is typical.
            Rounded up to whole blocks.
        gamma, beta, n_iterations, tau, eps, norm: as in `sinkhorn_momentum`; beta > 0.
        slack: how far below the mask a row must fall to leave, 0 <= slack < 1.
        momentum_dtype: dtype (name) of the momentum of rows outside the buffer.
        writer: how rows are written; plain by default.

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
    check_balance_arguments(n_iterations=n_iterations, norm=norm, field="sinkhorn_rows")
    for name, value, low, high in (
        ("beta", beta, 0, 1),
        ("tau", tau, 0, 1),
        ("slack", slack, 0, 1),
    ):
        if not low <= value < high or (name == "beta" and value == 0):
            allowed = f"a number from {low} up and below {high}"
            if name == "beta":
                allowed += ", not 0: without momentum sinkhorn_touched_rows is the same"
            raise ConfigError(f"sinkhorn_rows.{name}", value, allowed)
    if capacity < 1:
        raise ConfigError("sinkhorn_rows.capacity", capacity, "at least 1 row")
    form = _SinkhornRows(
        learning_rate=learning_rate,
        capacity=capacity,
        gamma=gamma,
        beta=beta,
        n_iterations=n_iterations,
        tau=tau,
        eps=eps,
        norm=norm,
        slack=slack,
        momentum_dtype=jnp.dtype(momentum_dtype),
        writer=RowWriter() if writer is None else writer,
    )
    return TableOptimizer(form.init, form.apply, form.mean)


class _Step(NamedTuple):
    """What a step knows before it decides between its two forms.

    Attributes:
        rows: the gradient.
        slot_U: buffer slot of each row that was read; A where it has none.
        before_UW: what stands in the buffer for that row: its look-ahead / beta**2.
        after_UW: its momentum after this step.
        rate: factor of the balanced update, with its sign.
        split: the part of the table at hand.
    """

    rows: UniqueRows
    slot_U: jax.Array
    before_UW: jax.Array
    after_UW: jax.Array
    rate: jax.Array
    split: Split


@dataclass(frozen=True)
class _SinkhornRows:
    learning_rate: Any
    capacity: int
    gamma: float
    beta: float
    n_iterations: int
    tau: float
    eps: float
    norm: str
    slack: float
    momentum_dtype: Any
    writer: RowWriter

    def init(self, table_RW: jax.Array, split: Split = WHOLE) -> SinkhornRowsState:
        n_rows, width = table_RW.shape
        n_parts = 1 if split.row_axis is None else lax.axis_size(split.row_axis)
        n_slots = min(-(-self.capacity // n_parts), n_rows)
        size = min(block_rows(width), n_slots)
        n_slots = -(-n_slots // size) * size
        return SinkhornRowsState(
            step=jnp.zeros((), jnp.int32),
            momentum_RW=jnp.zeros((n_rows, width), carrier_of(self.momentum_dtype)),
            place_R=jnp.full(n_rows, -1, jnp.int32),
            ids_A=jnp.full(n_slots, n_rows, jnp.int32),
            active_AW=jnp.zeros((n_slots, width), jnp.float32),
            # Low slots are taken first, from the end.
            free_A=jnp.arange(n_slots - 1, -1, -1, dtype=jnp.int32),
            counts_3=jnp.array([n_slots, 0, 0], jnp.int32),
            outside_2=jnp.zeros(2, jnp.float32),
            dense_steps=jnp.zeros((), jnp.int32),
            overflow_steps=jnp.zeros((), jnp.int32),
            writes=self.writer.init(table_RW),
        )

    def mean(self, table_RW: jax.Array, state: SinkhornRowsState) -> jax.Array:
        return self.writer.mean(table_RW, state.writes)

    def apply(
        self,
        rows: UniqueRows,
        state: SinkhornRowsState,
        table_RW: jax.Array,
        split: Split = WHOLE,
    ) -> tuple[jax.Array, SinkhornRowsState, Metrics]:
        beta, n_rows = self.beta, table_RW.shape[0]
        n_slots, width = state.active_AW.shape
        rate = self.learning_rate
        rate = rate(state.step) if callable(rate) else rate
        if split.column_axis is not None:
            width = width * lax.axis_size(split.column_axis)
        factor = width**0.5 if self.norm == "l2" else float(width)
        rate = jnp.asarray(rate, jnp.float32) * jnp.float32(-self.gamma * factor)

        # Rows that were read enter the buffer.
        real_U = rows.ids_U < n_rows
        place_U = get_rows(state.place_R, rows.ids_U)
        enters_U = real_U & (place_U < 0)
        rank_U = jnp.cumsum(enters_U, dtype=jnp.int32) - 1
        n_enter = jnp.sum(enters_U, dtype=jnp.int32)
        n_free, n_used, n_active = state.counts_3
        overflow = split.max_over_rows((n_enter > n_free).astype(jnp.int32)) > 0
        popped_U = state.free_A.at[n_free - 1 - rank_U].get(
            mode="fill", fill_value=n_slots, wrap_negative_indices=False
        )
        slot_U = jnp.where(enters_U, popped_U, place_U)
        slot_U = jnp.where(real_U, slot_U, n_slots)

        stored_UW = get_rows(state.momentum_RW, rows.ids_U)
        age_U = state.step + 1 + place_U
        stored_UW = stored_UW.astype(jnp.float32) * self._decay(age_U)[:, None]
        held_UW = get_rows(state.active_AW, slot_U)
        past_UW = jnp.where(enters_U[:, None], stored_UW, held_UW)
        grad_UW = rows.sums_UW.astype(jnp.float32)
        after_UW = beta * past_UW + (1 - beta) * grad_UW
        before_UW = past_UW + ((1 - beta**2) / beta**2) * grad_UW
        step = _Step(rows, slot_U, before_UW, after_UW, rate, split)

        left = split.sum_over_columns(jnp.sum(jnp.square(stored_UW), 1)) ** 0.5
        if self.norm == "l1":
            left = split.sum_over_columns(jnp.sum(jnp.abs(stored_UW), 1))
        entered = jnp.sum(jnp.where(enters_U, left, 0))
        total, bound = state.outside_2
        outside_2 = beta * jnp.stack([jnp.maximum(total - entered, 0), bound])
        n_used = jnp.maximum(
            n_used, jnp.max(jnp.where(slot_U < n_slots, slot_U + 1, 0), initial=0)
        )
        state = state._replace(
            ids_A=set_rows(state.ids_A, slot_U, rows.ids_U),
            active_AW=set_rows(state.active_AW, slot_U, before_UW),
            place_R=set_rows(state.place_R, rows.ids_U, slot_U),
            counts_3=jnp.stack(
                [jnp.maximum(n_free - n_enter, 0), n_used, n_active + n_enter]
            ),
            outside_2=outside_2,
            writes=self.writer.begin(state.writes),
        )
        return self._finish(state, table_RW, step, overflow)

    def _finish(
        self,
        state: SinkhornRowsState,
        table_RW: jax.Array,
        step: _Step,
        overflow: jax.Array,
    ) -> tuple[jax.Array, SinkhornRowsState, Metrics]:
        """Decide between the two forms of a step, and do it."""
        split, beta = step.split, self.beta
        n_slots, width = state.active_AW.shape
        size = min(block_rows(width), n_slots)
        n_blocks = (state.counts_3[1] + size - 1) // size
        sizes = row_sizes(
            state.active_AW,
            norm=self.norm,
            block_rows=size,
            n_blocks=n_blocks,
            split=split,
        )
        n_all = table_RW.shape[0] if split.n_rows is None else split.n_rows
        norm_A = (beta**2) * sizes.norm_R * sizes.peak_R
        total = split.sum_over_rows(jnp.sum(norm_A) + beta * state.outside_2[0])
        mean = total / n_all
        bound = split.max_over_rows(beta * state.outside_2[1])
        passes = bound > self.tau * mean
        dense = overflow | passes
        n_blocks = jnp.where(dense, 0, n_blocks)
        kept_A = norm_A > self.tau * mean
        rows_A, columns_W = balance_kept(
            state.active_AW,
            sizes,
            kept_A,
            n_iterations=self.n_iterations,
            eps=self.eps / beta**2,
            norm=self.norm,
            block_rows=size,
            n_blocks=n_blocks,
            split=split,
        )
        writing = partial(self._write, step, size, state, kept_A, rows_A, columns_W)
        table_RW, writes, square = lax.fori_loop(
            0,
            n_blocks,
            writing,
            (table_RW, state.writes, jnp.zeros((), jnp.float32)),
        )
        # A row that was read in this step has another momentum; it may leave later.
        light_A = norm_A <= self.slack * self.tau * mean
        light_A = set_rows(light_A, step.slot_U, False) & ~dense
        state = self._leave(state._replace(writes=writes), norm_A, light_A)
        _, table_RW, state, square = lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (jnp.zeros((), bool), *self._dense(step, *carry[1:])),
            (dense, table_RW, state, square),
        )
        scale_A = jnp.where(dense, 1.0, jnp.where(light_A, 0.0, beta))
        slot_U = jnp.where(dense, n_slots, step.slot_U)
        active_AW = state.active_AW * scale_A[:, None]
        state = state._replace(
            active_AW=set_rows(active_AW, slot_U, step.after_UW),
            step=state.step + 1,
            dense_steps=state.dense_steps + (passes & ~overflow),
            overflow_steps=state.overflow_steps + overflow,
        )
        square = split.sum_over_columns(split.sum_over_rows(square))
        metrics = {
            "update_norm": jnp.sqrt(square),
            "active_rows": split.sum_over_rows(state.counts_3[2]),
            "dense_steps": state.dense_steps,
            "overflow_steps": state.overflow_steps,
        }
        return table_RW, state, metrics

    def _write(
        self,
        step: _Step,
        size: int,
        state: SinkhornRowsState,
        kept_A: jax.Array,
        rows_A: jax.Array,
        columns_W: jax.Array,
        i: jax.Array,
        carry: tuple[jax.Array, WriteState, jax.Array],
    ) -> tuple[jax.Array, WriteState, jax.Array]:
        """Move the table's rows of one block of the buffer."""
        table_RW, writes, square = carry

        def take(array: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, i * size, size)

        ids_B = jnp.where(take(kept_A), take(state.ids_A), len(state.place_R))
        delta_BW = take(state.active_AW) * (step.rate * take(rows_A))[:, None]
        delta_BW = lax.optimization_barrier(delta_BW * columns_W)
        table_RW, writes = self.writer.add(
            table_RW, writes, ids_B, delta_BW, split=step.split
        )
        return table_RW, writes, square + jnp.sum(delta_BW * delta_BW)

    def _leave(
        self,
        state: SinkhornRowsState,
        norm_A: jax.Array,
        light_A: jax.Array,
    ) -> SinkhornRowsState:
        """Light rows leave the buffer with the momentum they have after this step."""
        n_rows, n_slots = len(state.place_R), len(state.ids_A)
        light_A = light_A & (state.ids_A < n_rows)
        n_free, n_used, n_active = state.counts_3
        rank_A = jnp.cumsum(light_A, dtype=jnp.int32) - 1
        n_leaves = rank_A[-1] + 1
        slots_A = jnp.arange(n_slots, dtype=jnp.int32)
        free_A = state.free_A.at[jnp.where(light_A, n_free + rank_A, n_slots)].set(
            slots_A, mode="drop"
        )
        size = min(512, n_slots)

        def write(i: jax.Array, carry: Any) -> Any:
            momentum_RW, place_R = carry
            at_B = i * size + jnp.arange(size, dtype=jnp.int32)
            at_B = jnp.where(at_B < n_leaves, n_free + at_B, n_slots)
            slots_B = free_A.at[at_B].get(mode="fill", fill_value=n_slots)
            ids_B = state.ids_A.at[slots_B].get(mode="fill", fill_value=n_rows)
            rows_BW = get_rows(state.active_AW, slots_B)
            momentum_RW = set_rows(momentum_RW, ids_B, self.beta * rows_BW)
            return momentum_RW, set_rows(place_R, ids_B, -2 - state.step)

        momentum_RW, place_R = lax.fori_loop(
            0,
            (n_leaves + size - 1) // size,
            write,
            (state.momentum_RW, state.place_R),
        )
        norm_A = jnp.where(light_A, norm_A / self.beta, 0)
        return state._replace(
            momentum_RW=momentum_RW,
            place_R=place_R,
            ids_A=jnp.where(light_A, n_rows, state.ids_A),
            free_A=free_A,
            counts_3=jnp.stack([n_free + n_leaves, n_used, n_active - n_leaves]),
            outside_2=jnp.stack(
                [
                    state.outside_2[0] + jnp.sum(norm_A),
                    jnp.maximum(state.outside_2[1], jnp.max(norm_A)),
                ]
            ),
        )

    def _dense(
        self,
        step: _Step,
        table_RW: jax.Array,
        state: SinkhornRowsState,
        square: jax.Array,
    ) -> tuple[jax.Array, SinkhornRowsState, jax.Array]:
        """The step over all rows; the buffer is filled anew."""
        split, beta = step.split, self.beta
        n_rows, n_slots = len(state.place_R), len(state.ids_A)
        age_R = state.step + 2 + state.place_R
        momentum_RW = load(state.momentum_RW).astype(jnp.float32)
        momentum_RW = momentum_RW * self._decay(age_R)[:, None]
        momentum_RW = momentum_RW.at[state.ids_A].set(
            beta * state.active_AW, mode="drop"
        )
        # Rows that were read stand in the buffer as look-aheads, or found no place.
        ids_U = step.rows.ids_U
        ahead_RW = set_rows(momentum_RW, ids_U, beta * step.before_UW)
        sizes = row_sizes(ahead_RW, norm=self.norm, split=split)
        norm_R = beta * sizes.norm_R * sizes.peak_R
        n_all = n_rows if split.n_rows is None else split.n_rows
        mean = split.sum_over_rows(jnp.sum(norm_R)) / n_all
        rows_R, columns_W = balance_kept(
            ahead_RW,
            sizes,
            norm_R > self.tau * mean,
            n_iterations=self.n_iterations,
            eps=self.eps / beta,
            norm=self.norm,
            block_rows=default_block_rows(*ahead_RW.shape),
            split=split,
        )
        rows_R = step.rate * rows_R
        # The barriers keep the compiler from holding whole tables for a second use.
        table_RW, writes = self.writer.add_all(
            table_RW,
            state.writes,
            ahead_RW * rows_R[:, None] * columns_W,
            split=split,
        )
        ahead_RW, rows_R, columns_W, table_RW = lax.optimization_barrier(
            (ahead_RW, rows_R, columns_W, table_RW)
        )
        moved_RW = ahead_RW * rows_R[:, None] * columns_W
        square = square + jnp.sum(moved_RW * moved_RW)
        ahead_RW, square = lax.optimization_barrier((ahead_RW, square))
        momentum_RW = set_rows(ahead_RW, ids_U, step.after_UW)
        active_R = norm_R > self.slack * self.tau * mean
        rank_R = jnp.cumsum(active_R, dtype=jnp.int32) - 1
        active_R = active_R & (rank_R < n_slots)
        n_active = jnp.sum(active_R, dtype=jnp.int32)
        ids_A = jnp.nonzero(active_R, size=n_slots, fill_value=n_rows)[0]
        after = row_sizes(momentum_RW, norm=self.norm, split=split)
        outside_R = jnp.where(active_R, 0, after.norm_R * after.peak_R)
        state = state._replace(
            momentum_RW=store(momentum_RW.astype(self.momentum_dtype)),
            place_R=jnp.where(active_R, rank_R, -2 - state.step),
            ids_A=ids_A.astype(jnp.int32),
            active_AW=get_rows(momentum_RW, ids_A),
            free_A=jnp.arange(n_slots - 1, -1, -1, dtype=jnp.int32),
            counts_3=jnp.stack([n_slots - n_active, n_active, n_active]),
            outside_2=jnp.stack([jnp.sum(outside_R), jnp.max(outside_R, initial=0)]),
            writes=writes,
        )
        return table_RW, state, square

    def _decay(self, age: jax.Array) -> jax.Array:
        """beta to the power of a number of steps, float32."""
        return jnp.float32(self.beta) ** age.astype(jnp.float32)


def block_rows(width: int) -> int:
    """Slots of the buffer that one pass works on at a time.

    On a CPU a block stays in the second-level cache; accelerators take the whole
    buffer, of which then all slots are read.
    """
    return max(1, 65536 // width) if jax.default_backend() == "cpu" else 2**30
