"""Time spent training, and the speed it gives.

What: `Clock` counts settled steps and tokens over time that was not paused.
Why: evaluation, saving, compiling and everything before a restart are not throughput.
When not: wall-clock stamps of records.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Active time of a run and its recent speed.

    Args:
        train_s: active seconds of earlier starts of the same run.
        window: steps that the recent speed looks back on.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        train_s: float = 0.0,
        *,
        window: int = 20,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.train_s = train_s
        self._now = now
        self._mark: float | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=window)

    def step_done(self, n_tokens: float) -> None:
        """Count a step; the first of a process only starts the clock (it compiled)."""
        now = self._now()
        if self._mark is not None:
            self.train_s += now - self._mark
            self._recent.append((n_tokens, now - self._mark))
        self._mark = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside the block does not count."""
        start = self._now()
        try:
            yield
        finally:
            if self._mark is not None:
                self._mark += self._now() - start

    @property
    def step_s(self) -> float | None:
        """Seconds a step, recently; None before two steps are done."""
        total = sum(seconds for _, seconds in self._recent)
        return total / len(self._recent) if total > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second, recently; None before two steps are done."""
        total = sum(seconds for _, seconds in self._recent)
        return sum(n for n, _ in self._recent) / total if total > 0 else None
