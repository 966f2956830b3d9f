"""Tables on the host while a run trains: rows on their way to the device and back.

What: `HostTable`, what the trainer is handed for one table; `HostTables`, which hands
    out batches with their rows in place and brings changed rows home.
Why: the device holds the rows in play, and rows of the next two steps are fetched while
    a step runs, so a table larger than its memory costs hardly any time.
When not: tables that fit; see `train.tables` alone.

The order, for step t: rows leave their slots and others enter (`Exchange`), then the
step runs. A worker prepares the exchange of step t + 2 as soon as step t was started:
it writes the rows that left before step t to the host, and then fetches. Rows that left
before step t + 1 cannot be among those it fetches, since an exchange spares the rows of
the step after it. What a step changed is still in its slot when the next step reads it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from memjax.parallel.mesh import global_batch, replicated
from memjax.train.host_store import HostStore, open_saved
from memjax.train.slot_cache import Exchange, SlotCache
from memjax.train.state import TrainState, state_leaves

AHEAD = 2
ROWS_AT_A_TIME = 2048


class DenseStep(Protocol):
    """Does a step over all rows that a table's optimizer asked for.

    Called with the store, which holds every row as of before that step; the leaves of
    the state, by path; and the row of each slot (R where free). Changes the store, and
    returns (leaves that change, the rows of the slots from now on, the square of the
    update's norm).
    """

    def __call__(
        self, store: HostStore, leaves: Mapping[str, Any], row_S: np.ndarray
    ) -> tuple[dict[str, Any], np.ndarray, float]: ...


class HostTable(NamedTuple):
    """One table on the host.

    Attributes:
        path: of the table, such as "block_1/memory/table".
        fields: of a batch, which hold rows of this table; they are replaced by places
            among the rows of the batch.
        store: its arrays, named as the leaves of the state that hold their slots.
        n_slots: S, rows on the device.
        n_reads: U, most distinct rows of a batch.
        slots: leaf of the state, int32 [U]: the slot of each row of the batch.
        place: leaf of the state, int32 [S], below 0 where a row is at rest; None: all
            rows are, between two steps.
        due: leaf of the state, bool: the step over all rows is to be done.
        dense_step: does it.
        fill: sets the store to the state before the first step.
    """

    path: str
    fields: tuple[str, ...]
    store: HostStore
    n_slots: int
    n_reads: int
    slots: str
    fill: Callable[[], None]
    place: str | None = None
    due: str | None = None
    dense_step: DenseStep | None = None


class Found(NamedTuple):
    """A batch whose rows of tables are known.

    Attributes:
        batch: with places among the rows in the tables' fields.
        rows: the distinct rows of each table, ascending.
        after: position of the data after this batch.
    """

    batch: dict[str, Any]
    rows: tuple[np.ndarray, ...]
    after: Any


def table_folder(folder: Path, path: str) -> Path:
    """Where a checkpoint keeps the table of a path."""
    return folder / path.replace("/", ".")


class _Part(NamedTuple):
    """Some rows of an exchange, with their values on the device."""

    in_slots: jax.Array
    out_slots: jax.Array
    values: list[jax.Array]


class _Moved(NamedTuple):
    """An exchange, and what it needs on the device."""

    exchange: Exchange
    slots_U: jax.Array
    parts: list[_Part]


class _Ready(NamedTuple):
    """A batch on the devices, the position after it, the exchange of each table."""

    batch: Any
    after: Any
    moved: list[_Moved]


def find_rows(
    batch: Mapping[str, Any], fields: Sequence[tuple[str, ...]]
) -> tuple[dict[str, Any], tuple[np.ndarray, ...]]:
    """A batch with places in the fields of each table, and its distinct rows."""
    batch, rows = dict(batch), []
    for names in fields:
        reads = [np.asarray(batch[name]) for name in names]
        flat = np.concatenate([read.ravel() for read in reads])
        distinct, at = np.unique(flat, return_inverse=True)
        at = at.astype(np.int32)
        for name, read in zip(names, reads, strict=True):
            batch[name], at = at[: read.size].reshape(read.shape), at[read.size :]
        rows.append(distinct)
    return batch, tuple(rows)


class HostTables:
    """The tables on the host of one run; close it at the end.

    Args:
        tables: what is trained.
        mesh: slots are replicated over it.
        batches: the data; positioned before `start`.

    Use: `fill` or `restore`, `start`, then for every step `settle`, `next` and
    `started`; `refresh` and `save` in between. All but the preparing happens in the
    thread that calls.
    """

    def __init__(self, tables: Sequence[HostTable], mesh: Mesh, batches: Any) -> None:
        self.tables = tuple(tables)
        self._mesh, self._batches = mesh, batches
        self._put = replicated(mesh)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="memjax-host-tables")
        self._caches = [
            SlotCache(t.store.n_rows, t.n_slots, 0 if t.place is None else AHEAD)
            for t in self.tables
        ]
        self.row_S = [np.full(t.n_slots, t.store.n_rows, np.int32) for t in self.tables]
        self._idle: dict[int, list[Any]] = {}
        self._found: dict[int, Found] = {}
        self._ready: deque[Future[_Ready]] = deque()
        self._leaving: deque[tuple[int, int, np.ndarray, list[jax.Array]]] = deque()
        self._step = 0
        self._after: Any = None
        # In one program the slots would be copied, to be read before they are written.
        self._take_out = jax.jit(_taken, out_shardings=self._put)
        self._put_in = jax.jit(_with_rows, donate_argnums=0, out_shardings=self._put)
        self._at_rest = jax.jit(lambda place_S: place_S < 0)

    def fill(self) -> None:
        """The tables before the first step."""
        for table in self.tables:
            table.fill()

    def start(self, state: TrainState) -> None:
        """Begin with a state and the rows of its slots, `row_S`."""
        self._after = self._batches.state()
        self._plan_anew(state)

    def state(self) -> Any:
        """Position of the data before the next batch."""
        return self._after

    def settle(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """Do the dense steps that the last step asked for.

        Waits for the last step where an optimizer may ask.

        Returns:
            (state, {path of a table: square of the norm of its update}).
        """
        squares = {}
        asked = [table for table in self.tables if table.due is not None]
        if not asked:
            return state, squares
        leaves = state_leaves(state)
        due = jax.device_get([leaves[str(table.due)] for table in asked])
        if not any(due):
            return state, squares
        self.refresh(state)
        with jax.transfer_guard("allow"):
            for i, table in enumerate(self.tables):
                if table.dense_step is None or not bool(leaves[str(table.due)]):
                    continue
                new, self.row_S[i], square = table.dense_step(
                    table.store, leaves, self.row_S[i]
                )
                state = self._replaced(state, new)
                squares[table.path] = square
        self._ready.clear()
        self._plan_anew(state)
        return state, squares

    def next(self, state: TrainState) -> tuple[Any, TrainState]:
        """(the next batch on the devices, the state with its rows in their slots)."""
        ready = self._ready.popleft().result()
        self._idle[self._step] = self._resting(state)
        leaves, new = state_leaves(state), {}
        for i, (table, moved) in enumerate(zip(self.tables, ready.moved, strict=True)):
            held = [leaves[name] for name in table.store.leaves]
            for k, part in enumerate(moved.parts):
                size = len(part.out_slots)
                rows = moved.exchange.out_rows[k * size : (k + 1) * size]
                if len(rows):
                    left = self._take_out(held, part.out_slots)
                    self._leaving.append((self._step, i, rows, left))
                held = self._put_in(held, part.in_slots, part.values)
            self.row_S[i][moved.exchange.in_slots] = moved.exchange.in_rows
            new |= dict(zip(table.store.leaves, held, strict=True))
            new[table.slots] = moved.slots_U
        self._after = ready.after
        return ready.batch, self._replaced(state, new)

    def started(self) -> None:
        """Called once the step of the last batch was started."""
        self._step += 1
        self._ready.append(self._worker.submit(self._prepare, self._step + AHEAD - 1))

    def save(self, folder: Path) -> None:
        """Write every table, with the rows of the slots beside it; `refresh` first."""
        for table, row_S in zip(self.tables, self.row_S, strict=True):
            place = table_folder(folder, table.path)
            table.store.save(place)
            np.save(place / "row_S.npy", row_S)

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote, before `start`."""
        for i, table in enumerate(self.tables):
            place = table_folder(folder, table.path)
            table.store.restore(place)
            self.row_S[i] = np.array(open_saved(place, "row_S"))

    def close(self) -> None:
        """Wait for the worker."""
        self._worker.shutdown(cancel_futures=True)

    def _resting(self, state: TrainState) -> list[Any]:
        """Which slots are at rest, for each table; arrays, not waited for."""
        leaves = state_leaves(state)
        return [
            None
            if table.place is None or table.n_slots == table.store.n_rows
            else self._at_rest(leaves[table.place])
            for table in self.tables
        ]

    def _replaced(self, state: TrainState, new: Mapping[str, Any]) -> TrainState:
        leaves = state_leaves(state) | {
            name: leaf
            if isinstance(leaf, jax.Array)
            else jax.device_put(np.asarray(leaf), self._put)
            for name, leaf in new.items()
        }
        return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))

    def refresh(self, state: TrainState) -> None:
        """Bring the stores up to date: all rows on the device, or on their way."""
        for future in self._ready:
            future.exception()
        self._write_left(self._step)
        leaves = state_leaves(state)
        for table, row_S in zip(self.tables, self.row_S, strict=True):
            used = np.flatnonzero(row_S < table.store.n_rows)
            names = list(table.store.leaves)
            held = jax.device_get([leaves[name] for name in names])
            values = [np.asarray(array)[used] for array in held]
            table.store.write(row_S[used], values)

    def _plan_anew(self, state: TrainState) -> None:
        """Plan the next exchanges for the slots as they are; the worker is idle."""
        for cache, row_S in zip(self._caches, self.row_S, strict=True):
            cache.reset(row_S)
        resting = self._resting(state)
        for ahead in range(AHEAD):
            self._idle[self._step + ahead - AHEAD] = resting
        for ahead in range(AHEAD):
            step = self._step + ahead
            self._ready.append(self._worker.submit(self._prepare, step))

    def _prepare(self, step: int) -> _Ready:
        """Runs in the worker, one after the other."""
        self._write_left(step - AHEAD)
        now = self._drawn(step)
        try:
            rows_after = self._drawn(step + 1).rows
        except StopIteration:
            rows_after = tuple(rows[:0] for rows in now.rows)
        resting = self._idle.pop(step - AHEAD)
        self._found.pop(step - AHEAD - 1, None)
        moved = [
            self._fetched(table, cache, step, rows, after, resting[i])
            for i, (table, cache, rows, after) in enumerate(
                zip(self.tables, self._caches, now.rows, rows_after, strict=True)
            )
        ]
        return _Ready(global_batch(self._mesh, now.batch), now.after, moved)

    def _drawn(self, step: int) -> Found:
        if step not in self._found:
            fields = [table.fields for table in self.tables]
            batch, rows = find_rows(next(self._batches), fields)
            self._found[step] = Found(batch, rows, self._batches.state())
        return self._found[step]

    def _fetched(
        self,
        table: HostTable,
        cache: SlotCache,
        step: int,
        rows_U: np.ndarray,
        rows_after: np.ndarray,
        resting_S: Any,
    ) -> _Moved:
        idle_S = None if resting_S is None else np.asarray(resting_S)
        exchange = cache.plan(step, rows_U, rows_after, idle_S)
        size, n_in = min(table.n_reads, ROWS_AT_A_TIME), len(exchange.in_rows)
        parts = []
        for first in range(0, n_in, size):
            part = slice(first, first + size)
            slots = (exchange.in_slots[part], exchange.out_slots[part])
            slots = [_padded(ids, size, table.n_slots) for ids in slots]
            values = table.store.gather(exchange.in_rows[part], size)
            parts.append(_Part(*jax.device_put((*slots, values), self._put)))
        slots_U = _padded(exchange.slots_U, table.n_reads, table.n_slots)
        return _Moved(exchange, jax.device_put(slots_U, self._put), parts)

    def _write_left(self, step: int) -> None:
        """Write rows that left before `step` or earlier steps."""
        while self._leaving and self._leaving[0][0] <= step:
            _, i, rows, left = self._leaving.popleft()
            self.tables[i].store.write(rows, [np.asarray(values) for values in left])


def _taken(held: list[jax.Array], slots: jax.Array) -> list[jax.Array]:
    """Rows of slots; those of slot S are of no use."""
    return [array.at[slots].get(mode="clip") for array in held]


def _with_rows(
    held: list[jax.Array], slots: jax.Array, values: list[jax.Array]
) -> list[jax.Array]:
    """Rows put into slots; those for slot S are left out."""
    return [
        array.at[slots].set(new, mode="drop")
        for array, new in zip(held, values, strict=True)
    ]


def _padded(ids: np.ndarray, size: int, value: int) -> np.ndarray:
    padded = np.full(size, value, np.int32)
    padded[: len(ids)] = ids
    return padded
