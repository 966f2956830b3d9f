"""Stopping on request.

What: `StopSignal` turns SIGTERM and the first Ctrl-C into a question the loop asks.
Why: the step in flight finishes and is saved; rerunning the command goes on from there.
When not: SIGKILL cannot be caught; the newest checkpoint is what is left then.
"""

import signal
import threading
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils


class StopSignal:
    """Context manager that catches SIGTERM and SIGINT while it is open.

    A second Ctrl-C raises KeyboardInterrupt at once. Outside the main thread no signal
    can be caught; then only `request` stops the loop.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._old: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)  # type: ignore[arg-type]
        self._old.clear()

    def _caught(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self._name is not None:
            raise KeyboardInterrupt
        self._name = signal.Signals(number).name

    def request(self, name: str) -> None:
        """Ask for a stop from inside the program."""
        self._name = name

    def requested(self) -> str | None:
        """Why to stop now, or None; the same answer in all processes.

        With several processes this is a collective call: all of them ask at every step.
        """
        if jax.process_count() == 1:
            return self._name
        names = (None, "SIGTERM", "SIGINT")
        mine = names.index(self._name) if self._name in names else 1
        with jax.transfer_guard("allow"):
            asked = int(np.max(multihost_utils.process_allgather(np.int32(mine))))
        return names[asked]
