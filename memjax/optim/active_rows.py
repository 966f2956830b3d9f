"""The rows of a table that are in play, kept in a buffer of fixed size.

What: `SinkhornRowsState`, and rows that enter and leave its buffer.
Why: `sinkhorn_rows` looks at the buffer at every step and at the table hardly ever.
When not: optimizers in which a row that is not read stands still.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax.ops.row_gradient import UniqueRows
from memjax.ops.rows import carrier_of, get_rows, set_rows, value_dtype
from memjax.ops.sinkhorn import row_sizes
from memjax.ops.split import Split
from memjax.optim.repartition import Repartition, repartition_rows
from memjax.optim.row_write import WriteState


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
        held: what a dense step that is done elsewhere needs; None: it is done here.
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
    held: "Held | None" = None


class Held(NamedTuple):
    """The rows of a step that was left to be done densely, over all rows.

    Attributes:
        due: bool scalar, the step is still to be done.
        ids_U: int32, the rows that were read; R in unused entries.
        before_UW, after_UW: as in `Entered`.
    """

    due: jax.Array
    ids_U: jax.Array
    before_UW: jax.Array
    after_UW: jax.Array


class Entered(NamedTuple):
    """The rows of a step after they entered the buffer.

    In the buffer stands before_UW, the look-ahead of the row divided by beta**2, which
    is what the momentum of the other rows is to their look-ahead.

    Attributes:
        rows: the gradient.
        slot_U: buffer slot of each row that was read; A where it has none.
        before_UW: float32, what stands in the buffer for the row.
        after_UW: float32, momentum of the row after this step.
        overflow: bool scalar, the buffer is full on some device.
    """

    rows: UniqueRows
    slot_U: jax.Array
    before_UW: jax.Array
    after_UW: jax.Array
    overflow: jax.Array


def init_active(
    table_RW: jax.Array, capacity: int, momentum_dtype: Any, writes: WriteState
) -> SinkhornRowsState:
    """The state before the first step, with a buffer of `capacity` rows here."""
    n_rows, width = table_RW.shape
    n_slots = min(capacity, n_rows)
    size = min(_cached_rows(width), n_slots)
    n_slots = -(-n_slots // size) * size
    return SinkhornRowsState(
        step=jnp.zeros((), jnp.int32),
        momentum_RW=jnp.zeros((n_rows, width), carrier_of(momentum_dtype)),
        place_R=jnp.full(n_rows, -1, jnp.int32),
        ids_A=jnp.full(n_slots, n_rows, jnp.int32),
        active_AW=jnp.zeros((n_slots, width), jnp.float32),
        free_A=all_free(n_slots),
        counts_3=jnp.array([n_slots, 0, 0], jnp.int32),
        outside_2=jnp.zeros(2, jnp.float32),
        dense_steps=jnp.zeros((), jnp.int32),
        overflow_steps=jnp.zeros((), jnp.int32),
        writes=writes,
    )


def all_free(n_slots: int) -> jax.Array:
    """Every slot; low slots are taken first, from the end."""
    return jnp.arange(n_slots - 1, -1, -1, dtype=jnp.int32)


def decay(beta: float, age: jax.Array) -> jax.Array:
    """beta to the power of a number of steps, float32."""
    return jnp.float32(beta) ** age.astype(jnp.float32)


def enter(
    state: SinkhornRowsState, rows: UniqueRows, *, beta: float, norm: str, split: Split
) -> tuple[SinkhornRowsState, Entered]:
    """Put the rows of a step into the buffer and decay what is outside.

    Rows that find no place have slot A; the step must then be a dense one.
    """
    n_rows, n_slots = len(state.place_R), len(state.ids_A)
    real_U = rows.ids_U < n_rows
    place_U = get_rows(state.place_R, rows.ids_U)
    enters_U = real_U & (place_U < 0)
    rank_U = lax.associative_scan(jnp.add, enters_U.astype(jnp.int32)) - 1
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
    stored_UW = stored_UW.astype(jnp.float32) * decay(beta, age_U)[:, None]
    held_UW = get_rows(state.active_AW, slot_U)
    past_UW = jnp.where(enters_U[:, None], stored_UW, held_UW)
    grad_UW = rows.sums_UW.astype(jnp.float32)
    after_UW = beta * past_UW + (1 - beta) * grad_UW
    before_UW = past_UW + ((1 - beta**2) / beta**2) * grad_UW

    left = row_sizes(stored_UW, norm=norm, split=split)
    left_U = jnp.where(enters_U, left.norm_R * left.peak_R, 0)
    total, bound = state.outside_2
    total = jnp.maximum(total - jnp.sum(left_U), 0)
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
        outside_2=beta * jnp.stack([total, bound]),
    )
    return state, Entered(rows, slot_U, before_UW, after_UW, overflow)


def leave(
    state: SinkhornRowsState, norm_A: jax.Array, light_A: jax.Array, *, beta: float
) -> SinkhornRowsState:
    """Light rows leave the buffer with the momentum they have after this step.

    Args:
        state: the state after `enter`.
        norm_A: norm of the look-ahead of each slot.
        light_A: bool, slots that become free; none of them was read in this step.
        beta: decay of the momentum.
    """
    n_rows, n_slots = len(state.place_R), len(state.ids_A)
    light_A = light_A & (state.ids_A < n_rows)
    n_free, n_used, n_active = state.counts_3
    # XLA on a CPU makes a quadratic window of a long cumsum; this is the same sum.
    rank_A = lax.associative_scan(jnp.add, light_A.astype(jnp.int32)) - 1
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
        momentum_RW = set_rows(momentum_RW, ids_B, beta * rows_BW)
        return momentum_RW, set_rows(place_R, ids_B, -2 - state.step)

    momentum_RW, place_R = lax.fori_loop(
        0, (n_leaves + size - 1) // size, write, (state.momentum_RW, state.place_R)
    )
    norm_A = jnp.where(light_A, norm_A / beta, 0)
    total, bound = state.outside_2
    return state._replace(
        momentum_RW=momentum_RW,
        place_R=place_R,
        ids_A=jnp.where(light_A, n_rows, state.ids_A),
        free_A=free_A,
        counts_3=jnp.stack([n_free + n_leaves, n_used, n_active - n_leaves]),
        outside_2=jnp.stack(
            [total + jnp.sum(norm_A), jnp.maximum(bound, jnp.max(norm_A))]
        ),
    )


def repartition_active(
    state: SinkhornRowsState, change: Repartition
) -> SinkhornRowsState:
    """The state for other parts of the table, on the host.

    The buffer holds numbers of rows within a part, so it is emptied: its rows take
    their momentum (rounded to its dtype) along as rows outside, and the bound of what
    is outside becomes infinite. The next step is therefore a dense one, which fills the
    buffer anew and counts in "dense_steps". Where the rows are in as many parts as
    before and the buffer is of the same size, the state stays as it is.
    """
    old, new = change.old.row_parts, change.new.row_parts
    if change.same_rows and np.shape(state.ids_A) == change.shapes.ids_A.shape:
        return jax.tree.map(np.asarray, state)
    momentum_RW, place_R = np.array(state.momentum_RW), np.array(state.place_R)
    n_local = len(place_R) // old
    ids_A = np.asarray(state.ids_A).reshape(old, -1)
    held_A = ids_A < n_local
    rows_A = (ids_A + n_local * np.arange(old)[:, None])[held_A]
    values_RW = momentum_RW.view(value_dtype(momentum_RW))
    values_RW[rows_A] = np.asarray(state.active_AW)[held_A.reshape(-1)]
    place_R[rows_A] = -1 - np.asarray(state.step)

    n_slots = len(change.shapes.ids_A) // new
    n_local = len(change.shapes.place_R) // new
    kept = state._replace(
        momentum_RW=momentum_RW,
        place_R=place_R,
        ids_A=None,
        active_AW=None,
        free_A=None,
        counts_3=None,
        outside_2=None,
    )
    kept = repartition_rows(kept, change)
    return kept._replace(
        ids_A=np.full(new * n_slots, n_local, np.int32),
        active_AW=np.zeros(change.shapes.active_AW.shape, np.float32),
        free_A=np.tile(np.arange(n_slots - 1, -1, -1, dtype=np.int32), new),
        counts_3=np.tile(np.array([n_slots, 0, 0], np.int32), new),
        outside_2=np.tile(np.array([0, np.inf], np.float32), new),
    )


def block_rows(width: int) -> int:
    """Slots of the buffer that one pass works on at a time.

    On a CPU a block stays in the second-level cache; accelerators take the whole
    buffer, of which then all slots are read.
    """
    return _cached_rows(width) if jax.default_backend() == "cpu" else 2**30


def _cached_rows(width: int) -> int:
    """Slots whose rows stay in a CPU's cache. Buffers are a whole number of these on
    every backend, so that a checkpoint goes on on another one."""
    return max(1, 65536 // width)
