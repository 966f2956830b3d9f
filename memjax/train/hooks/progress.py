"""The line a person watches.

What: step, per cent, loss in bits per byte, tokens a second, time left, learning rate.
Why: on a terminal one line that rewrites itself; elsewhere plain lines, for logs.
When not: numbers for later; those are in metrics.jsonl.
"""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from memjax.train.hooks.base import Hook, StepInfo

_REDRAW_S = 0.2
_ERASE_TO_END = "\x1b[K"


def duration(seconds: float) -> str:
    """Seconds as `45s`, `3m20s` or `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress(Hook):
    """Prints progress to a stream.

    Args:
        every: steps between two lines when the stream is not a terminal; on a terminal
            the one line is redrawn at most five times a second.
        stream: standard output by default.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        every: int,
        *,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty()
        self._now = now
        self._drawn_at = float("-inf")
        self._line_open = False

    def on_step(self, info: StepInfo) -> None:
        last = info.step == info.n_steps
        if self._live:
            if not last and self._now() - self._drawn_at < _REDRAW_S:
                return
            self._drawn_at = self._now()
        elif not last and info.step % self._every and info.step != 1:
            return
        self._draw(_line(info))

    def on_event(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if kind in ("eval", "final") and "bpb" in values:
            name = "valid" if kind == "eval" else "final valid"
            self.on_message(f"step {step}  {name} {values['bpb']:.4f} BPB")

    def on_message(self, text: str) -> None:
        self._end_line()
        self._write(text + "\n")

    def close(self) -> None:
        self._end_line()

    def _draw(self, text: str) -> None:
        if self._live:
            # A line that wraps could not be rewritten.
            width = shutil.get_terminal_size().columns
            self._write("\r" + text[: width - 1] + _ERASE_TO_END)
            self._line_open = True
        else:
            self._write(text + "\n")

    def _end_line(self) -> None:
        if self._line_open:
            self._write("\n")
            self._line_open = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _line(info: StepInfo) -> str:
    values = info.values
    parts = [
        f"step {info.step}/{info.n_steps}",
        f"{100 * info.step / info.n_steps:3.0f}%",
        f"loss {values['bpb']:.4f} BPB",
    ]
    if "tokens_per_s" in values:
        parts.append(f"{values['tokens_per_s']:,.0f} tokens/s")
    if info.eta_s is not None:
        parts.append(f"ETA {duration(info.eta_s)}")
    rates = info.rates()
    if len(rates) == 1:
        parts.append(f"lr {next(iter(rates.values())):.3g}")
    else:
        parts.extend(f"lr {name} {rate:.3g}" for name, rate in rates.items())
    return "  ".join(parts)
