"""Checkpoints: the whole state, the data position and what they belong to.

What: `Checkpoints` saves in the background, keeps the newest and the best, restores.
Why: a checkpoint of another configuration is refused in words, never cut or cast, and a
    torn one is set aside, so that rerunning the same command always goes on.
When not: exporting weights to other formats.

One step directory holds the items `params` (a plain tree), `rest` (step, key, states of
the optimizers, by path), `ema` (by path, where there is one), `host` (tables on the
host, where there are any, see `host_item`), `data` and `meta` (both JSON).
"""

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from memjax.errors import CheckpointError, MemjaxError
from memjax.train import table_layout
from memjax.train.checkpoint_meta import check_meta, make_meta, plain, read_meta
from memjax.train.checkpoint_room import lacks_room
from memjax.train.host_item import HOST_ITEM, HostSave, host_folder
from memjax.train.state import TrainState, state_leaves
from memjax.train.tables import TableTraining

_COMMITTED = "commit_success.txt"
_ITEMS = ("params", "rest", "data", "meta")


class UnwrittenError(CheckpointError):
    """A checkpoint cannot be written, on a full disk for example."""


class Restored(NamedTuple):
    """A restored checkpoint.

    Attributes:
        state: the state, with the shardings that were asked for.
        data: position in the data, as the iterator's `state()` gave it.
        progress: what the loop noted beside it (tokens seen, last evaluation).
    """

    state: TrainState
    data: Any
    progress: dict[str, Any]


class _Keep:
    """Retention: the newest `n` and the best, by step number."""

    def __init__(self, owner: "Checkpoints", n: int) -> None:
        self._owner = owner
        self._n = n

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> list[bool]:
        del context
        newest = sorted(info.step for info in checkpoints)[-self._n :]
        best = self._owner.best_step
        return [info.step in newest or info.step == best for info in checkpoints]


def whole_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Steps in `directory` whose save was finished, ascending; [] without a folder."""
    root = Path(directory)
    if not root.is_dir():
        return []
    steps = [int(path.name) for path in root.iterdir() if path.name.isdecimal()]
    return sorted(step for step in steps if _is_whole(root / str(step)))


def _is_whole(path: Path) -> bool:
    committed = all((path / item / _COMMITTED).exists() for item in _ITEMS)
    return committed and (path / _COMMITTED).exists()


class Checkpoints:
    """The checkpoints of one run; use it as a context manager, so that it is closed.

    Args:
        directory: where the step directories are; made when missing, used absolutely.
        keep_last: how many of the newest are kept.
        keep_best: whether the one with the lowest `bpb` is kept as well.
        tables: how tables are trained by rows, if any are.

    Torn steps (a save that was not finished, files that cannot be read) are warned
    about and passed over. They are renamed to `STEP.torn` when the next save needs the
    place, not before. Left-over temporary directories do not block anything.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        keep_best: bool = True,
        tables: TableTraining | None = None,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.best_step: int | None = None
        self.best_bpb: float | None = None
        self._keep_best = keep_best
        self._tables = tables
        self._torn: dict[int, str] = {}
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_Keep(self, keep_last)
            ),
        )
        for step in self.steps():
            path = self.directory / str(step)
            if not _is_whole(path) or read_meta(path) is None:
                self._pass_over(step, "its save was not finished")
        self._find_best()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            self.close()
        except UnwrittenError as unwritten:
            if error is None:
                raise
            if not isinstance(error, UnwrittenError):
                error.add_note(str(unwritten))

    def steps(self) -> list[int]:
        """Steps on disk or on their way to it, ascending, without torn ones."""
        return sorted(set(self._manager.all_steps()) - set(self._torn))

    def newest(self) -> int | None:
        """The newest step, None when there is none."""
        return max(self.steps(), default=None)

    def describe_newest(self) -> str:
        """For messages: where the newest whole checkpoint is."""
        try:
            self.wait()
        except UnwrittenError as error:
            return str(error)
        step = self.newest()
        if step is None:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is step {step}, {self.directory / str(step)}"

    def save(
        self,
        state: TrainState,
        *,
        data: Any,
        fingerprint: Mapping[str, Any],
        progress: Mapping[str, Any] | None = None,
        bpb: float | None = None,
        host: Callable[[Path], None] | None = None,
    ) -> None:
        """Start writing the state; returns when the arrays are copied.

        Waits for the save before it.

        Args:
            state: the state; its own step names the directory.
            data: JSON value, the position of the data iterator before the next batch.
            fingerprint: JSON mapping of everything that gives the parameters their
                meaning without showing in their shapes (hash seed, primes, token map).
            progress: JSON mapping of the loop's own counts.
            bpb: bits per byte of exactly this state, if it was evaluated.
            host: writes the tables on the host into a folder; done when this returns.

        Raises:
            CheckpointError: this or a newer step exists; nothing is written.
            UnwrittenError: this one or the one before cannot be written.
        """
        step = int(jax.device_get(state.step))
        newest = self.newest()
        if newest is not None and newest >= step:
            raise CheckpointError(
                f"cannot save step {step}: {self.directory / str(newest)} exists; "
                f"allowed: steps above {newest}, or move that directory away first"
            )
        self.wait()
        last = max(self._whole(), default=None)
        if reason := lacks_room(self.directory, last, state.params):
            raise self._unwritten(reason)
        self._make_room()
        items: dict[str, Any] = {
            "params": ocp.args.StandardSave(state.params),
            "rest": ocp.args.StandardSave(_rest(state)),
            "data": ocp.args.JsonSave({"data": plain(data)}),
            "meta": ocp.args.JsonSave(
                make_meta(
                    state,
                    fingerprint,
                    dict(progress or {}),
                    bpb,
                    None if self._tables is None else self._tables.layout,
                )
            ),
        }
        ema = state_leaves(state.ema, "ema/")
        if ema:
            items["ema"] = ocp.args.StandardSave(ema)
        if host is not None:
            items[HOST_ITEM] = HostSave(host)
        self._note_best(step, bpb)  # before: retention runs inside the save
        with self._writing():
            written = self._manager.save(
                step, args=ocp.args.Composite(**items), force=True
            )
        if not written:
            raise CheckpointError(f"step {step} was not written to {self.directory}")

    def restore_newest(
        self,
        abstract: TrainState,
        fingerprint: Mapping[str, Any],
        host: Callable[[Path], None] | None = None,
    ) -> Restored | None:
        """The newest whole checkpoint; None when the folder holds no step at all.

        Args:
            abstract: shapes, dtypes and shardings wanted; another device count than at
                the save is fine, also for tables that are divided: they are then read
                whole on every device, and divided anew.
            fingerprint: as in `save`.
            host: reads the tables on the host from the folder of `save`.

        Raises:
            CheckpointError: it belongs to another configuration (names every path or
                field), or no step is whole (names the steps and the way out).
        """
        self.wait()
        while (step := self.newest()) is not None:
            path = self.directory / str(step)
            meta = read_meta(path)
            if meta is None:
                self._pass_over(step, "its meta file is unreadable")
                continue
            moves = table_layout.differs(meta, self._tables)
            saved = abstract
            if moves and self._tables is not None:
                whole = abstract.step.sharding
                saved = table_layout.as_saved(abstract, meta, self._tables, whole)
            check_meta(path, meta, state_leaves(saved), fingerprint)
            try:
                found = self._read(step, saved, meta)
                if host is not None:
                    host(host_folder(path))
                if moves and self._tables is not None:
                    state = table_layout.moved(found.state, meta, self._tables)
                    return found._replace(state=state)
                return found
            except Exception as error:
                self._pass_over(step, f"reading it failed ({first_line(error)})")
        if self._torn:
            names = ", ".join(map(str, sorted(self._torn)))
            raise CheckpointError(
                f"{self.directory} holds no whole checkpoint; torn: {names}. "
                "Move these directories away to start anew, or use another run folder"
            )
        return None

    def _read(
        self, step: int, abstract: TrainState, meta: Mapping[str, Any]
    ) -> Restored:
        items: dict[str, Any] = {
            "params": ocp.args.StandardRestore(abstract.params),
            "rest": ocp.args.StandardRestore(_rest(abstract)),
            "data": ocp.args.JsonRestore(),
        }
        ema = state_leaves(abstract.ema, "ema/")
        if ema:
            items["ema"] = ocp.args.StandardRestore(ema)
        got = self._manager.restore(step, args=ocp.args.Composite(**items))
        rest = got["rest"]
        state = TrainState(
            step=rest["step"],
            params=got["params"],
            opt_state=refill(abstract.opt_state, "opt_state/", rest),
            ema=refill(abstract.ema, "ema/", got["ema"] if ema else {}),
            key=rest["key"],
            table_state=refill(abstract.table_state, "table_state/", rest),
        )
        return Restored(state, got["data"]["data"], dict(meta["progress"]))

    def wait(self) -> None:
        """Block until everything is on disk.

        Raises:
            UnwrittenError: it cannot be written.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the writer and release it; raises as `wait`."""
        with self._writing():
            self._manager.close()

    def is_best(self, bpb: float | None) -> bool:
        """Whether a state with this score would be kept as the best one."""
        if not self._keep_best or bpb is None or not math.isfinite(bpb):
            return False
        return self.best_bpb is None or bpb < self.best_bpb

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """What the library's writer raises, in words; the best is then another."""
        try:
            yield
        except BaseException as error:
            self._find_best()
            if isinstance(error, MemjaxError) or not isinstance(
                error, (OSError, ValueError)
            ):
                raise
            raise self._unwritten(first_line(error)) from error

    def _unwritten(self, reason: str) -> UnwrittenError:
        steps = self._whole()
        last = f"step {steps[-1]}" if steps else "there is none: it starts anew"
        return UnwrittenError(
            f"a checkpoint cannot be written to {self.directory}: {reason}. Once it "
            "can, rerun the same command: it goes on from the last whole checkpoint "
            f"({last})"
        )

    def _whole(self) -> list[int]:
        steps = whole_steps(self.directory)
        return [step for step in steps if step not in self._torn]

    def _find_best(self) -> None:
        self.best_step = self.best_bpb = None
        for step in self._whole():
            meta = read_meta(self.directory / str(step))
            if meta is not None:
                self._note_best(step, meta["bpb"])

    def _note_best(self, step: int, bpb: float | None) -> None:
        if self.is_best(bpb):
            self.best_step, self.best_bpb = step, bpb

    def _pass_over(self, step: int, reason: str) -> None:
        self._torn[step] = reason
        path = self.directory / str(step)
        warnings.warn(
            f"checkpoint {path} is torn and passed over: {reason}", stacklevel=3
        )

    def _make_room(self) -> None:
        """Rename torn steps, so that their numbers are free again."""
        if not self._torn:
            return
        self.wait()
        if jax.process_index() == 0:
            for step in self._torn:
                path = self.directory / str(step)
                target = path.with_name(f"{step}.torn")
                while target.exists():
                    target = target.with_name(f"{target.name}.torn")
                path.rename(target)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("memjax torn checkpoints")
        self._torn.clear()
        self._manager.reload()


def _rest(state: TrainState) -> dict[str, Any]:
    """Step, key and the states of both optimizers as one flat dict by path."""
    leaves = state_leaves(state.opt_state, "opt_state/")
    leaves |= state_leaves(state.table_state, "table_state/")
    return {"step": state.step, "key": state.key, **leaves}


def refill(tree: Any, prefix: str, leaves: Mapping[str, Any]) -> Any:
    """`tree` with its leaves taken by path."""
    paths = state_leaves(tree, prefix)
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[p] for p in paths])


def first_line(error: Exception) -> str:
    """The kind and the first line of an error; of a long one, both ends."""
    line, name = str(error).strip().partition("\n")[0], type(error).__name__
    if len(line) > 240:
        line = f"{line[:100]} ... {line[-140:]}"
    return f"{name}: {line}" if line else name
