"""Which rows of a table on the host have a slot on the device.

What: `SlotCache`, a map between rows and slots, and `Exchange`, what one step changes.
Why: rows that are read again, or still in motion, stay; the others make room.
When not: moving the rows; see `host_tables`. Pure numpy, no device.
"""

from typing import NamedTuple

import numpy as np

from memjax.errors import TrainingError


class Exchange(NamedTuple):
    """Rows that enter and leave before a step; all int32.

    Attributes:
        slots_U: the slot of each row that the step reads.
        in_rows, in_slots: rows that enter, and where.
        out_rows, out_slots: rows that leave, and from where. They are taken out before
            the others enter.
    """

    slots_U: np.ndarray
    in_rows: np.ndarray
    in_slots: np.ndarray
    out_rows: np.ndarray
    out_slots: np.ndarray


class SlotCache:
    """Rows and slots as they will be after the exchanges planned so far.

    Args:
        n_rows: rows R of the table.
        n_slots: S, at most R.
        lag: steps between a report of idle slots and the step that is planned with it;
            rows read meanwhile may be in motion and stay.
    """

    def __init__(self, n_rows: int, n_slots: int, lag: int = 0) -> None:
        self.n_rows, self.n_slots, self.lag = n_rows, n_slots, lag
        self.slot_R = np.full(n_rows, -1, np.int32)
        self.reset(np.full(n_slots, n_rows, np.int32))

    def reset(self, row_S: np.ndarray) -> None:
        """Begin anew with the row of each slot; R where a slot is free."""
        self.slot_R[:] = -1
        self.row_S = np.array(row_S, np.int32)
        self._last_S = np.full(self.n_slots, -(2**31), np.int64)
        used = np.flatnonzero(self.row_S < self.n_rows)
        self.slot_R[self.row_S[used]] = used
        free = np.flatnonzero(self.row_S == self.n_rows)
        self._free_S = free[::-1].astype(np.int32).copy()
        self._n_free = len(free)

    def plan(
        self,
        step: int,
        rows_U: np.ndarray,
        next_rows: np.ndarray,
        idle_S: np.ndarray | None = None,
    ) -> Exchange:
        """Give every row of a step a slot; plan steps in their order.

        Args:
            step: its number.
            rows_U: distinct rows that it reads, ascending.
            next_rows: rows of the step after it, which do not leave now.
            idle_S: whether a slot's row was at rest `lag` steps ago; None: all were.

        Returns:
            The exchange before the step. Those that were not needed for longest leave.

        Raises:
            TrainingError: too many rows are in motion or needed.
        """
        slots_U = self.slot_R[rows_U]
        enters_U = slots_U < 0
        coming = self.slot_R[next_rows]
        self._last_S[coming[coming >= 0]] = step + 1
        known_U = slots_U[~enters_U]
        self._last_S[known_U] = np.maximum(self._last_S[known_U], step)
        in_rows = rows_U[enters_U].astype(np.int32)
        out_slots = self._leaving(step, len(in_rows) - self._n_free, idle_S)
        out_rows = self.row_S[out_slots]
        self.slot_R[out_rows] = -1
        n_popped = len(in_rows) - len(out_slots)
        popped = self._free_S[self._n_free - n_popped : self._n_free][::-1]
        self._n_free -= n_popped
        in_slots = np.concatenate([out_slots, popped]).astype(np.int32)
        self.slot_R[in_rows], self.row_S[in_slots] = in_slots, in_rows
        self._last_S[in_slots] = step
        at = np.searchsorted(next_rows, in_rows)
        at[at == len(next_rows)] = 0
        again = next_rows[at] == in_rows if len(next_rows) else np.zeros(len(at), bool)
        self._last_S[in_slots[again]] = step + 1
        slots_U[enters_U] = in_slots
        return Exchange(slots_U, in_rows, in_slots, out_rows, out_slots)

    def _leaving(self, step: int, n: int, idle_S: np.ndarray | None) -> np.ndarray:
        """Slots of n rows that may leave, ascending by row; none for n <= 0."""
        if n <= 0:
            return np.zeros(0, np.int32)
        may_S = (self.row_S < self.n_rows) & (self._last_S < step - self.lag)
        if idle_S is not None:
            may_S &= idle_S
        found = np.flatnonzero(may_S)
        if len(found) < n:
            raise TrainingError(
                f"{n} rows must leave the {self.n_slots} slots of a table on the host "
                f"at step {step} and only {len(found)} can; allowed: more slots "
                "(train.host_slots)"
            )
        if len(found) > n:
            found = found[np.argpartition(self._last_S[found], n - 1)[:n]]
        return found[np.argsort(self.row_S[found])].astype(np.int32)
