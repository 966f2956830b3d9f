"""A profiler window.

What: `Profiler` traces a range of steps with jax.profiler into the run folder.
Why: a window of a few steps in the middle of a run shows where the time goes.
When not: long windows; a trace grows with every operation.
"""

import os
from pathlib import Path
from typing import Any

import jax

from memjax.train.hooks.base import Hook

PROFILE_FOLDER = "profile"


class Profiler(Hook):
    """Traces the steps first, ..., end - 1 (counted from 0) into RUN/profile.

    A run that resumes inside the window traces what is left of it.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], first_step: int, end_step: int
    ) -> None:
        self._folder = Path(run_dir) / PROFILE_FOLDER
        self._first, self._end = first_step, end_step
        self._tracing = False

    def before_step(self, step: int, state: Any, batch: Any) -> None:
        del batch
        if self._tracing and step >= self._end:
            jax.block_until_ready(state)
            self._stop()
        elif not self._tracing and self._first <= step < self._end:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def close(self) -> None:
        if self._tracing:
            self._stop()

    def _stop(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()
