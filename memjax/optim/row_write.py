"""Writing new values into rows of a table: rounding, and the lazy running mean.

What: `RowWriter`, the one way in which every table optimizer changes rows.
Why: a bfloat16 table under round-to-nearest stops moving when updates are small, and a
    running mean of a table must not cost a pass over it.
When not: dense weights; optax and `optim.ema` do those.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax.errors import ConfigError
from memjax.ops.rounding import stochastic_round
from memjax.ops.rows import check_table, get_rows, load, set_rows, store, value_dtype
from memjax.ops.split import WHOLE, Split


class WriteState(NamedTuple):
    """What a `RowWriter` keeps beside a table.

    Attributes:
        step: int32 scalar, steps begun.
        gap_RW: table less its running mean, as of the last write; None without a mean.
        written_R: int32, step of the row's last write; None without a mean.
    """

    step: jax.Array
    gap_RW: jax.Array | None
    written_R: jax.Array | None


@dataclass(frozen=True)
class RowWriter:
    """How rows are written.

    The running mean e of a row w obeys e <- w + d * (e - w) at every step. Its gap
    w - e only shrinks by d while w stands still, so it is brought up to date when the
    row is written or the mean is read. This equals the dense mean up to rounding.

    Attributes:
        stochastic_rounding: round a table narrower than float32 up or down at random,
            right on average, instead of to nearest. The random bits depend on seed,
            step, row and column, not on devices or on the other rows.
        seed: of the rounding.
        ema_decay: d of the running mean, 0 <= d < 1; at most (1 + t) / (10 + t) at
            step t, so that the initial rows fade early. None keeps no mean.
    """

    stochastic_rounding: bool = False
    seed: int = 0
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ConfigError("ema_decay", self.ema_decay, "None or 0 <= decay < 1")

    def init(self, table_RW: jax.Array) -> WriteState:
        """The state before the first step.

        Raises as `check_table`, and ConfigError when stochastic rounding is asked for
        and the table has nothing to round to.
        """
        check_table(table_RW)
        if self.stochastic_rounding and value_dtype(table_RW) == jnp.float32:
            raise ConfigError(
                "stochastic_rounding", True, "False for a table of float32"
            )
        step = jnp.zeros((), jnp.int32)
        if self.ema_decay is None:
            return WriteState(step, None, None)
        return WriteState(
            step,
            jnp.zeros(table_RW.shape, _wide(table_RW)),
            jnp.zeros(table_RW.shape[0], jnp.int32),
        )

    def begin(self, state: WriteState) -> WriteState:
        """Called once in every step, before its writes."""
        return state._replace(step=state.step + 1)

    def add(
        self,
        table_RW: jax.Array,
        state: WriteState,
        ids_B: jax.Array,
        delta_BW: jax.Array,
        *,
        split: Split = WHOLE,
    ) -> tuple[jax.Array, WriteState]:
        """Add `delta_BW` (float32) to distinct rows; ids outside are left out."""
        if table_RW.dtype == delta_BW.dtype and self.ema_decay is None:
            return table_RW.at[ids_B].add(delta_BW, mode="drop"), state
        old_BW = get_rows(table_RW, ids_B)
        new_BW = self._rounded(old_BW, delta_BW, state, ids_B, table_RW, split)
        table_RW = set_rows(table_RW, ids_B, new_BW)
        if state.gap_RW is None or state.written_R is None:
            return table_RW, state
        written_B = get_rows(state.written_R, ids_B)
        gap_BW = get_rows(state.gap_RW, ids_B)
        gap_BW = self._gap(gap_BW, written_B, old_BW, new_BW, state)
        return table_RW, state._replace(
            gap_RW=set_rows(state.gap_RW, ids_B, gap_BW),
            # The maximum is the step; as it needs what was read, nothing is copied.
            written_R=set_rows(
                state.written_R, ids_B, jnp.maximum(written_B, state.step)
            ),
        )

    def add_blocks(
        self,
        table_RW: jax.Array,
        state: WriteState,
        ids_A: jax.Array,
        update_AW: jax.Array,
        rows_A: jax.Array,
        columns_W: jax.Array,
        *,
        size: int,
        n_blocks: jax.Array,
        split: Split = WHOLE,
    ) -> tuple[jax.Array, WriteState, jax.Array]:
        """Add `update * rows * columns` to distinct rows, some at a time.

        Args:
            table_RW, state: written.
            ids_A: rows of the table; ids outside are left out.
            update_AW, rows_A, columns_W: float32, the update and its factors.
            size: rows at a time; A is a multiple of it.
            n_blocks: leading blocks to add, a traced number.
            split: the part of the table at hand.

        Returns:
            (table, state, sum of the squares of what was added, here).
        """

        def add_block(i: jax.Array, carry: Any) -> Any:
            table_RW, state, square = carry

            def take(array: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(array, i * size, size)

            delta_BW = take(update_AW) * take(rows_A)[:, None]
            # Formed once, for the table and for the sum.
            delta_BW = lax.optimization_barrier(delta_BW * columns_W)
            table_RW, state = self.add(
                table_RW, state, take(ids_A), delta_BW, split=split
            )
            return table_RW, state, square + jnp.sum(delta_BW * delta_BW)

        start = (table_RW, state, jnp.zeros((), jnp.float32))
        return lax.fori_loop(0, n_blocks, add_block, start)

    def add_all(
        self,
        table_RW: jax.Array,
        state: WriteState,
        delta_RW: jax.Array,
        *,
        split: Split = WHOLE,
    ) -> tuple[jax.Array, WriteState]:
        """Add `delta_RW` (float32) to the whole table; zeros change nothing."""
        if table_RW.dtype == delta_RW.dtype and self.ema_decay is None:
            return table_RW + delta_RW, state
        ids_R = jnp.arange(table_RW.shape[0], dtype=jnp.int32)
        old_RW = load(table_RW)
        new_RW = self._rounded(old_RW, delta_RW, state, ids_R, table_RW, split)
        if state.gap_RW is None or state.written_R is None:
            return store(new_RW), state
        gap_RW = self._gap(state.gap_RW, state.written_R, old_RW, new_RW, state)
        return store(new_RW), state._replace(
            gap_RW=gap_RW,
            written_R=jnp.full_like(state.written_R, state.step),
        )

    def mean(self, table_RW: jax.Array, state: WriteState) -> jax.Array:
        """The running mean of the table, in its dtype; the table itself without one."""
        if state.gap_RW is None or state.written_R is None:
            return table_RW
        share_R = self._share(state.written_R, state.step)
        values_RW = load(table_RW)
        wide_RW = values_RW.astype(state.gap_RW.dtype)
        mean_RW = wide_RW - share_R[:, None] * state.gap_RW
        return store(mean_RW.astype(values_RW.dtype))

    def _rounded(
        self,
        old_BW: jax.Array,
        delta_BW: jax.Array,
        state: WriteState,
        ids_B: jax.Array,
        table_RW: jax.Array,
        split: Split,
    ) -> jax.Array:
        wide_BW = old_BW.astype(delta_BW.dtype) + delta_BW
        if not self.stochastic_rounding or old_BW.dtype == delta_BW.dtype:
            return wide_BW.astype(old_BW.dtype)
        n_rows, width = table_RW.shape
        rows_B = ids_B + split.first_row(n_rows)
        columns_W = split.first_column(width) + jnp.arange(width, dtype=jnp.int32)
        return stochastic_round(
            wide_BW, old_BW.dtype, self.seed, state.step, rows_B, columns_W
        )

    def _gap(
        self,
        gap_BW: jax.Array,
        written_B: jax.Array,
        old_BW: jax.Array,
        new_BW: jax.Array,
        state: WriteState,
    ) -> jax.Array:
        """gap <- d * (gap + what the row moved), after the decays it missed."""
        missed_B = self._share(written_B, state.step - 1)
        moved_BW = new_BW.astype(gap_BW.dtype) - old_BW.astype(gap_BW.dtype)
        decay = self._share(state.step - 1, state.step)
        return decay * (missed_B[:, None] * gap_BW + moved_BW)

    def _share(self, first: jax.Array, last: jax.Array) -> jax.Array:
        """What is left of a gap after the decays of steps first to last - 1.

        A product in closed form: a sum of logarithms over a long run loses the small
        decays in float32. The early decays (1 + t) / (10 + t) telescope, and from step
        `late` on all are equal.
        """
        decay = float(np.float32(self.ema_decay or 0.0))
        late = max(0, math.ceil((10 * decay - 1) / (1 - decay)))
        early_first = jnp.minimum(first, late).astype(jnp.float32)
        early_last = jnp.minimum(last, late).astype(jnp.float32)
        share = jnp.ones((), jnp.float32)
        for i in range(1, 10):
            share = share * ((early_first + i) / (early_last + i))
        n_late = jnp.maximum(last, late) - jnp.maximum(first, late)
        if decay == 0:
            return jnp.where(n_late > 0, 0.0, share)
        return share * jnp.exp(math.log(decay) * n_late.astype(jnp.float32))


def _wide(table_RW: jax.Array) -> jnp.dtype:
    return jnp.promote_types(value_dtype(table_RW), jnp.float32)
