"""Event files that TensorBoard reads.

What: `EventFile`, one record a step, written in order by the calling thread.
Why: tensorboardX's own writer hands events to a thread, whose queue dies with the
    process; here what was written is written.
When not: images, text and histograms.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import RecordWriter

_FLUSH_S = 5.0


class EventFile:
    """The one event file of a folder; older event files in it are removed.

    Args:
        folder: made when missing.
        now: wall clock in Unix seconds.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, now: Callable[[], float] = time.time
    ) -> None:
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        for old in root.glob("events.out.tfevents.*"):
            old.unlink()
        self._now = now
        self._writer = RecordWriter(
            str(root / f"events.out.tfevents.{int(now())}.memjax.{os.getpid()}")
        )
        start = Event(wall_time=now(), file_version="brain.Event:2")
        self._writer.write(start.SerializeToString())
        self.flush()

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        """Append one record; on disk within seconds."""
        values = [Summary.Value(tag=k, simple_value=v) for k, v in scalars.items()]
        event = Event(wall_time=wall_time, step=step, summary=Summary(value=values))
        self._writer.write(event.SerializeToString())
        if self._now() - self._flushed_at > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Put everything on disk now."""
        self._writer.flush()
        self._flushed_at = self._now()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.flush()
        self._writer.close()
