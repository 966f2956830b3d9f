"""Stopping on request.

What: `StopSignal` turns SIGTERM and the first Ctrl-C into a question the loop asks.
Why: the step in flight finishes and is saved; rerunning the command goes on from there.
When not: SIGKILL cannot be caught; the newest checkpoint is what is left then.
"""

import functools
import signal
import threading
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_NAMES = (None, "SIGTERM", "SIGINT")


class StopSignal:
    """Context manager that catches SIGTERM and SIGINT while it is open.

    A second Ctrl-C raises KeyboardInterrupt at once. Outside the main thread no signal
    can be caught; then only `request` stops the loop.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._old: dict[int, object] = {}
        self._asked: jax.Array | None = None

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
        The answer is that to the question put one step before, which stood in the
        devices' queue in front of a step that is done: nobody waits for it.
        """
        if jax.process_count() == 1:
            return self._name
        mine = _NAMES.index(self._name) if self._name in _NAMES else 1
        with jax.transfer_guard("allow"):
            before, self._asked = self._asked, self._largest(mine)
            return None if before is None else _NAMES[int(before)]

    def _largest(self, mine: int) -> jax.Array:
        """The largest of the processes' numbers, on its way."""
        sharding, largest = self._reduction
        return largest(
            jax.make_array_from_callback(
                (sharding.mesh.size,), sharding, lambda _: np.full(1, mine, np.int32)
            )
        )

    @functools.cached_property
    def _reduction(self) -> tuple[NamedSharding, Any]:
        """How the numbers lie, one a device, and the compiled maximum of them."""
        devices = np.array(jax.devices())
        mesh = Mesh(devices, ("devices",), axis_types=(AxisType.Auto,))
        divided = NamedSharding(mesh, PartitionSpec("devices"))
        whole = NamedSharding(mesh, PartitionSpec())
        return divided, jax.jit(jnp.max, out_shardings=whole)
