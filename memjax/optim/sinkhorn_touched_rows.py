"""Sinkhorn momentum that only looks at the rows of the step.

What: `sinkhorn_touched_rows`, the naive sparse form, for ablations.
Why: it is what one writes first, and it is another optimizer than the published one.
When not: training; `sinkhorn_rows` is the published optimizer at a sparse cost.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from memjax.ops.row_gradient import UniqueRows
from memjax.ops.rows import carrier_of, check_table, get_rows, set_rows
from memjax.ops.sinkhorn import balance_kept, row_sizes
from memjax.ops.split import WHOLE, Split
from memjax.optim.active_rows import block_rows
from memjax.optim.row_write import RowWriter, WriteState
from memjax.optim.sinkhorn_settings import SinkhornSettings
from memjax.optim.table_optimizer import Metrics, TableOptimizer


class SinkhornTouchedRowsState(NamedTuple):
    """State of `sinkhorn_touched_rows`.

    Attributes:
        step: int32 scalar, steps done.
        momentum_RW: momentum of every row, as of the last step that read the row.
        writes: state of the writer.
    """

    step: jax.Array
    momentum_RW: jax.Array
    writes: WriteState


def sinkhorn_touched_rows(
    learning_rate: optax.ScalarOrSchedule,
    *,
    gamma: float = 0.18,
    beta: float = 0.95,
    n_iterations: int = 11,
    tau: float = 1e-3,
    eps: float = 1e-20,
    norm: str = "l2",
    momentum_dtype: Any = "float32",
    writer: RowWriter | None = None,
) -> TableOptimizer:
    """Not the published optimizer: momentum, mask and balance over the rows read now.

    A row that is not read stands still: its momentum neither decays nor moves it,
    whereas `sinkhorn_momentum` and `sinkhorn_rows` go on moving it for about 150 steps.
    The mean row norm of the mask is over the rows read in the step, and so are the
    norms of the columns, so the update of a row depends on which rows it was read with.
    It learns worse than the exact form and is here to show by how much. The two agree
    where every row is read in every step, and where beta is 0 up to the mask.

    Args:
        learning_rate: a number, or a schedule from step to number.
        gamma, beta, n_iterations, tau, eps, norm: as in `sinkhorn_momentum`.
        momentum_dtype: dtype (name) of the momentum.
        writer: how rows are written; plain by default.

    Returns:
        A TableOptimizer with the metrics "update_norm" and "active_rows", which are the
        rows read. No rows: nothing changes but the count of steps.

    Raises:
        ConfigError: an argument is out of range.

    Cost: memory, one momentum like the table. Time, (n_iterations + 5) / 2 reads of the
        gradient by rows, and reads and writes of those rows.
    """
    settings = SinkhornSettings(
        owner="sinkhorn_touched_rows",
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
    form = _SinkhornTouchedRows(settings)
    return TableOptimizer(form.init, form.apply, form.mean)


@dataclass(frozen=True)
class _SinkhornTouchedRows:
    settings: SinkhornSettings

    def init(
        self, table_RW: jax.Array, split: Split = WHOLE
    ) -> SinkhornTouchedRowsState:
        del split
        check_table(table_RW)
        return SinkhornTouchedRowsState(
            jnp.zeros((), jnp.int32),
            jnp.zeros(table_RW.shape, carrier_of(self.settings.momentum_dtype)),
            self.settings.writer.init(table_RW),
        )

    def mean(self, table_RW: jax.Array, state: SinkhornTouchedRowsState) -> jax.Array:
        return self.settings.writer.mean(table_RW, state.writes)

    def apply(
        self,
        rows: UniqueRows,
        state: SinkhornTouchedRowsState,
        table_RW: jax.Array,
        split: Split = WHOLE,
    ) -> tuple[jax.Array, SinkhornTouchedRowsState, Metrics]:
        settings, beta = self.settings, self.settings.beta
        n_rows, width = table_RW.shape
        rate = settings.rate(state.step, width, split)
        writes = settings.writer.begin(state.writes)

        size = max(1, min(block_rows(width), len(rows.ids_U)))
        # Without any read there is one block, of no rows.
        padding = max(-len(rows.ids_U) % size, size - len(rows.ids_U))
        ids_U = jnp.pad(rows.ids_U, (0, padding), constant_values=n_rows)
        grad_UW = jnp.pad(rows.sums_UW.astype(jnp.float32), ((0, padding), (0, 0)))
        past_UW = get_rows(state.momentum_RW, ids_U).astype(jnp.float32)
        after_UW = beta * past_UW + (1 - beta) * grad_UW
        ahead_UW = beta * after_UW + (1 - beta) * grad_UW

        n_blocks = (rows.count + size - 1) // size
        sizes = row_sizes(
            ahead_UW,
            norm=settings.norm,
            block_rows=size,
            n_blocks=n_blocks,
            split=split,
        )
        norm_U = sizes.norm_R * sizes.peak_R
        count = split.sum_over_rows(rows.count)
        mean = split.sum_over_rows(jnp.sum(norm_U)) / jnp.maximum(count, 1)
        kept_U = norm_U > settings.tau * mean
        rows_U, columns_W = balance_kept(
            ahead_UW,
            sizes,
            kept_U,
            n_iterations=settings.n_iterations,
            eps=settings.eps,
            norm=settings.norm,
            block_rows=size,
            n_blocks=n_blocks,
            split=split,
        )

        table_RW, writes, square = settings.writer.add_blocks(
            table_RW,
            writes,
            jnp.where(kept_U, ids_U, n_rows),
            ahead_UW,
            rate * rows_U,
            columns_W,
            size=size,
            n_blocks=n_blocks,
            split=split,
        )
        state = SinkhornTouchedRowsState(
            state.step + 1, set_rows(state.momentum_RW, ids_U, after_UW), writes
        )
        square = split.sum_over_columns(split.sum_over_rows(square))
        metrics = {"update_norm": jnp.sqrt(square), "active_rows": count}
        return table_RW, state, metrics
