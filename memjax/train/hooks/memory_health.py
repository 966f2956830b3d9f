"""How the memory is doing, beside the loss.

What: `MemoryHealth` calls a handed function on the live state and batch, now and then.
Why: a collapsing memory shows in rows touched, gates and norms before the loss.
When not: what health means is decided by whoever hands the function.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from memjax.train.hooks.base import Hook

HealthFn = Callable[[Any, Any], Mapping[str, Any]]
Emit = Callable[[str, int, Mapping[str, float]], None]


class MemoryHealth(Hook):
    """Every `every` steps, before the step: health_fn(state, batch) -> scalars.

    Args:
        health_fn: returns scalars by name; the state must not be donated by it.
        every: steps between two calls, the first one before step 0.
        emit: where the values go: emit("health", step, values).
    """

    def __init__(self, health_fn: HealthFn, every: int, emit: Emit) -> None:
        self._health_fn = health_fn
        self._every = every
        self._emit = emit

    def before_step(self, step: int, state: Any, batch: Any) -> None:
        if step % self._every == 0:
            values = jax.device_get(dict(self._health_fn(state, batch)))
            floats = {name: float(np.asarray(value)) for name, value in values.items()}
            self._emit("health", step, floats)
