"""The step of `sinkhorn_rows` over all rows of a table that is not on the device.

What: `streamed_step`, `dense_step` for arrays in host memory, block by block.
Why: it is right whatever the rows outside the buffer hold; the table need not fit.
When not: tables on the device; `sinkhorn_dense_step` does those inside the step.
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from memjax.ops.sinkhorn import row_sizes
from memjax.ops.sinkhorn_streamed import balance_streamed
from memjax.ops.split import WHOLE
from memjax.optim.active_rows import SinkhornRowsState, all_free, decay
from memjax.optim.row_write import RowWriter, WriteState
from memjax.optim.sinkhorn_settings import SinkhornSettings


class Streamed(NamedTuple):
    """What a streamed step leaves behind.

    Attributes:
        state: the state on the device, as numpy, for the rows in `row_S`.
        table_SW: their values.
        row_S: int32, the row of each slot, R where it is free: the active rows.
        square: sum of the squares of the update.
    """

    state: SinkhornRowsState
    table_SW: np.ndarray
    row_S: np.ndarray
    square: float


def streamed_step(
    settings: SinkhornSettings,
    slack: float,
    state: SinkhornRowsState,
    row_S: np.ndarray,
    table_RW: np.ndarray,
    momentum_RW: np.ndarray,
    place_R: np.ndarray,
    parts: Iterable[slice],
) -> Streamed:
    """Do the step that `sinkhorn_rows(held_reads=...)` held back.

    Args:
        settings, slack: of the optimizer.
        state: after the step that asked (`held.due`), as numpy; S rows.
        row_S: row of each slot.
        table_RW, momentum_RW, place_R: of all R rows, with the rows of the slots as the
            state has them; changed in place. momentum_RW is float32.
        parts: blocks of rows, one after the other, all of them.

    The result is that of `dense_step` up to rounding.

    Cost: one write and (n_iterations + 7) / 2 reads of the momentum, a read and a write
        of the table and of place_R; a few vectors of R entries in host memory.
    """
    beta, norm, held = settings.beta, settings.norm, state.held
    assert held is not None
    n_rows, n_slots, width = len(place_R), len(state.ids_A), table_RW.shape[1]
    parts, step = list(parts), int(state.step) - 1

    def rows_of(slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        used = np.flatnonzero(slots < len(row_S))
        return used, row_S[slots[used]]

    used_A, active = rows_of(np.asarray(state.ids_A))
    used_U, read = rows_of(np.asarray(held.ids_U))
    momentum_RW[active] = np.asarray(state.active_AW)[used_A]
    momentum_RW[read] = np.asarray(held.before_UW)[used_U]
    place_R[active] = place_R[read] = -1 - step
    for part in parts:
        age_B = step + 2 + place_R[part]
        momentum_RW[part] = _decayed(momentum_RW[part], age_B, beta)

    mean = 0.0

    def keep(norm_R: np.ndarray) -> np.ndarray:
        nonlocal mean
        mean = beta * float(np.sum(norm_R, dtype=np.float64)) / n_rows
        return beta * norm_R > settings.tau * mean

    rows_R, columns_W, norm_R = balance_streamed(
        lambda part: momentum_RW[part],
        parts,
        keep=keep,
        n_iterations=settings.n_iterations,
        eps=settings.eps / beta,
        norm=norm,
    )
    rows_R = rows_R * np.float32(settings.rate(jnp.int32(step), width, WHOLE))
    writes = WriteState(jnp.asarray(state.writes.step), None, None)
    square = 0.0
    for part in parts:
        table_RW[part], added = _moved(
            settings.writer,
            table_RW[part],
            writes,
            momentum_RW[part],
            rows_R[part],
            columns_W,
        )
        square += float(added)

    after_UW = np.asarray(held.after_UW)[used_U]
    momentum_RW[read] = after_UW
    sizes = row_sizes(jnp.asarray(after_UW), norm=norm)
    in_play_R = beta * norm_R > slack * settings.tau * mean
    in_play_R[read] = True
    active = np.flatnonzero(in_play_R)[:n_slots]
    norm_R[read] = np.asarray(sizes.norm_R * sizes.peak_R)
    norm_R[active] = 0
    for part in parts:
        place_R[part] = -2 - step
    n_active = len(active)
    place_R[active] = np.arange(n_active, dtype=np.int32)

    new_S = np.full(len(row_S), n_rows, np.int32)
    new_S[:n_active] = active
    place_S = np.full(len(row_S), -2 - step, np.int32)
    place_S[:n_active] = np.arange(n_active)
    ids_A = np.full(n_slots, len(row_S), np.int32)
    ids_A[:n_active] = np.arange(n_active)
    counts = np.array([n_slots - n_active, n_active, n_active], np.int32)
    outside = np.array([np.sum(norm_R, dtype=np.float64), np.max(norm_R)], np.float32)
    state = state._replace(
        momentum_RW=_first(momentum_RW[active], len(row_S)),
        place_R=place_S,
        ids_A=ids_A,
        active_AW=_first(momentum_RW[active], n_slots),
        free_A=np.asarray(all_free(n_slots)),
        counts_3=counts,
        outside_2=outside,
        held=held._replace(due=np.zeros((), bool)),
    )
    return Streamed(state, _first(table_RW[active], len(row_S)), new_S, square)


def _first(rows: np.ndarray, n: int) -> np.ndarray:
    """Rows followed by zeros, n in all."""
    padded = np.zeros((n, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded


@partial(jax.jit, static_argnums=2)
def _decayed(momentum_BW: jax.Array, age_B: jax.Array, beta: float) -> jax.Array:
    return momentum_BW * decay(beta, age_B)[:, None]


@partial(jax.jit, static_argnums=0)
def _moved(
    writer: RowWriter,
    table_BW: jax.Array,
    writes: WriteState,
    ahead_BW: jax.Array,
    rows_B: jax.Array,
    columns_W: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    delta_BW = ahead_BW * rows_B[:, None] * columns_W
    table_BW, _ = writer.add_all(table_BW, writes, delta_BW)
    return table_BW, jnp.sum(delta_BW * delta_BW)
