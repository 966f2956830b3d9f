"""Numbers of a run, on disk.

What: one JSON line a record in metrics.jsonl, and the same in event files.
Why: the JSON lines are the truth; after a restart they are cut back to the restored
    step and the event files are written anew, so a reader sees every step once.
When not: anything larger than scalars.

A line has "kind" ("train", "eval", "health" or "final"), "step", "time" (Unix seconds)
and the values. Training lines also have "loss_hex", the loss as a hexadecimal float.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from memjax.train.hooks.base import Hook, StepInfo
from memjax.train.hooks.event_file import EventFile

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"
_BEFORE_SAVE = ("train", "eval")


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; lines that a kill spoilt are left out."""
    records = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and _is_record(record):
            records.append(record)
    return records


def _is_record(record: dict[str, Any]) -> bool:
    kinds = {"kind": str, "step": int, "time": int | float}
    return all(isinstance(record.get(name), kind) for name, kind in kinds.items())


class Recorder(Hook):
    """Writes metrics.jsonl and event files into a run folder.

    Args:
        run_dir: the run folder.
        restored_step: the step the run goes on from, 0 for a new one. Records of later
            steps are dropped; so are those of this step that the run makes again
            (everything measured after the save: health and final records).
        now: wall clock in Unix seconds.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        restored_step: int = 0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._now = now
        self._path = Path(run_dir) / METRICS_FILE
        kept = _cut_back(self._path, restored_step)
        self._events = EventFile(Path(run_dir) / EVENTS_FOLDER, now=now)
        for record in kept:
            self._events.write(record["step"], record["time"], _scalars(record))
        self._file: TextIO = self._path.open("a", encoding="utf-8", buffering=1)

    def on_step(self, info: StepInfo) -> None:
        rates = {
            "learning_rate" if not name else f"learning_rate/{name}": rate
            for name, rate in info.rates().items()
        }
        loss_hex = float(info.values["loss"]).hex()
        self._write("train", info.step, {**info.values, **rates}, loss_hex=loss_hex)

    def on_event(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self._write(kind, step, values)

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def _write(
        self, kind: str, step: int, values: Mapping[str, float], **extra: str
    ) -> None:
        now = self._now()
        record = {"kind": kind, "step": step, "time": now, **values, **extra}
        self._file.write(json.dumps(record) + "\n")
        self._events.write(step, now, _scalars(record))


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Tag -> value for an event: the kind in front of the name."""
    skipped = ("kind", "step", "time", "loss_hex")
    return {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if name not in skipped
    }


def _cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the records that a run restored at `step` makes again; returns the rest."""
    if not path.exists():
        return []
    kept = [
        record
        for record in read_records(path)
        if record["step"] < step
        or (record["step"] == step and record["kind"] in _BEFORE_SAVE)
    ]
    temporary = path.with_suffix(".tmp")
    lines = "".join(json.dumps(record) + "\n" for record in kept)
    temporary.write_text(lines, encoding="utf-8")
    os.replace(temporary, path)
    return kept
