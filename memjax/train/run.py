"""What the loop remembers between two steps.

What: `Run`: what is due, the metrics in flight, counts, the clock, the hooks.
Why: `fit` stays an order of events that reads from top to bottom.
When not: arrays of the model; those are in the state.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from memjax.errors import TrainingError
from memjax.train.checkpoint import Checkpoints
from memjax.train.clock import Clock
from memjax.train.config import TrainConfig
from memjax.train.hooks.base import Hook, StepInfo
from memjax.train.state import TrainState

Rate = Callable[[int], Any]


class Run:
    """Host-side memory of one `fit`.

    Args:
        config: length and periods.
        step: updates done when the run starts or goes on.
        progress: what `progress()` gave when the checkpoint was saved.
        learning_rate: step (from 0) -> rate, or {group: rate}.
        bytes_per_token: turns bits a token into bits a byte.
    """

    def __init__(
        self,
        config: TrainConfig,
        step: int,
        progress: Mapping[str, Any],
        learning_rate: Rate,
        bytes_per_token: float,
    ) -> None:
        self.config = config
        self.pending: tuple[int, Mapping[str, Any]] | None = None
        self.saved_step = step
        self.tokens_seen = int(progress.get("tokens_seen", 0))
        self.clock = Clock(progress.get("train_s", 0.0))
        self.eval_step: int | None = progress.get("eval_step")
        self.last_eval: dict[str, float] | None = progress.get("eval")
        if progress.get("max_eval_batches") != config.max_eval_batches:
            self.last_eval = None  # another part of the data was scored
        self._rate = learning_rate
        self._bytes_per_token = bytes_per_token
        self._hooks: list[Hook] = []

    def add(self, stack: contextlib.ExitStack, hook: Hook) -> None:
        stack.callback(hook.close)
        self._hooks.append(hook)

    def eval_due(self, step: int, done: bool) -> bool:
        every = self.config.eval_every
        due = done or (every is not None and step > 0 and step % every == 0)
        return due and step != self.eval_step

    def save_due(self, step: int, leaving: bool) -> bool:
        every = self.config.save_every
        due = leaving or (every is not None and step % every == 0)
        return due and step > self.saved_step

    def bpb_at(self, step: int) -> float | None:
        """Bits per byte of the state at `step`, None when it was not evaluated."""
        return (
            self.last_eval["bpb"] if self.last_eval and self.eval_step == step else None
        )

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        self.eval_step, self.last_eval = step, values
        self.emit("eval", step, values)

    def progress(self) -> dict[str, Any]:
        return {
            "tokens_seen": self.tokens_seen,
            "train_s": self.clock.train_s,
            "eval_step": self.eval_step,
            "eval": self.last_eval,
            "max_eval_batches": self.config.max_eval_batches,
        }

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Not training: the clock stands still, transfers are allowed."""
        with self.clock.paused(), jax.transfer_guard("allow"):
            yield

    def before_step(self, step: int, state: TrainState, batch: Any) -> None:
        with self.aside():
            for hook in self._hooks:
                hook.before_step(step, state, batch)

    def emit(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for hook in self._hooks:
            hook.on_event(kind, step, values)

    def message(self, text: str) -> None:
        for hook in self._hooks:
            hook.on_message(text)

    def streamed(self, squares: Mapping[str, float]) -> None:
        """Add squares of updates that came after the step to its metrics."""
        if not squares or self.pending is None:
            return
        step, metrics = self.pending
        found = {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}
        for name in ("update_norm", "update_norm/table"):
            if name in found:
                found[name] = math.hypot(found[name], sum(squares.values()) ** 0.5)
        self.pending = (step, found)

    def settle(self, checkpoints: Checkpoints) -> None:
        """Read the metrics of the step in flight, stop on bad ones, tell the hooks."""
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        values = {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}
        if not values.pop("finite"):
            names = ("loss", "grad_norm", "update_norm")
            bad = next(name for name in names if not math.isfinite(values[name]))
            raise TrainingError(
                f"{bad} = {values[bad]} at step {step}, training stopped; "
                + checkpoints.describe_newest()
            )
        self.tokens_seen += round(values["weight"])
        self.clock.step_done(values["weight"])
        values["bpb"] = values["bits_per_token"] / self._bytes_per_token
        values["tokens_seen"] = self.tokens_seen
        values["train_s"] = self.clock.train_s
        eta_s = None
        if self.clock.step_s is not None and self.clock.tokens_per_s is not None:
            values["tokens_per_s"] = self.clock.tokens_per_s
            eta_s = self.clock.step_s * (self.config.n_steps - step)
        info = StepInfo(
            step,
            self.config.n_steps,
            values,
            eta_s,
            lambda: _rates(self._rate, step - 1),
        )
        with jax.transfer_guard("allow"):
            for hook in self._hooks:
                hook.on_step(info)


def _rates(learning_rate: Rate, step: int) -> dict[str, float]:
    """The rate used by the update number `step`, by group; "" when there is one."""
    rate = learning_rate(step)
    if not isinstance(rate, Mapping):
        rate = {"": rate}
    return {name: float(value) for name, value in rate.items()}
