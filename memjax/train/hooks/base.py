"""What a hook is told, and when.

What: `StepInfo`, the `Hook` base class with its five moments, and `Every`.
Why: progress, records, profiles and health stand beside the loop, not in it.
When not: anything that changes the state; hooks only look.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """A finished step.

    Attributes:
        step: its number, from 1.
        n_steps: steps of the run.
        values: metrics as floats, with "loss" (nats a token), "bpb", "tokens_seen",
            "tokens_per_s" and "train_s".
        eta_s: seconds left at the recent speed, None when that is unknown.
        rates: learning rate, or one a group, by name; computed when asked.
    """

    step: int
    n_steps: int
    values: Mapping[str, float]
    eta_s: float | None
    rates: Callable[[], Mapping[str, float]]


class Hook:
    """Base class: a hook overrides the moments it cares for."""

    def before_step(self, step: int, state: Any, batch: Any) -> None:
        """`step` steps are done; the state and the batch of the next one, on device."""

    def on_step(self, info: StepInfo) -> None:
        """A step was finished and its metrics were read."""

    def on_event(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Something measured between steps: kind "eval", "final" or "health"."""

    def on_message(self, text: str) -> None:
        """A line for a person."""

    def close(self) -> None:
        """The loop ends, also by an error."""


class Every(Hook):
    """Passes `on_step` on for every n-th step and the last; other moments always."""

    def __init__(self, n: int, hook: Hook) -> None:
        self._n = n
        self._hook = hook

    def before_step(self, step: int, state: Any, batch: Any) -> None:
        self._hook.before_step(step, state, batch)

    def on_step(self, info: StepInfo) -> None:
        if info.step % self._n == 0 or info.step == info.n_steps:
            self._hook.on_step(info)

    def on_event(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self._hook.on_event(kind, step, values)

    def on_message(self, text: str) -> None:
        self._hook.on_message(text)

    def close(self) -> None:
        self._hook.close()
