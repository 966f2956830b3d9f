"""How long a run trains and what it does on the way.

What: `TrainConfig`, plain numbers, and which of its fields a resumed run may change.
Why: everything periodic (evaluate, save, log, health, profile) is set in one place.
When not: the optimizer, the data and the model have configs of their own.
"""

import dataclasses

from memjax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length and periods of a run, counted in optimizer steps.

    Attributes:
        n_steps: optimizer steps in all; a rerun with more steps goes on.
        accumulate_steps: micro-batches a step; the batch is cut, not multiplied.
        eval_every: steps between evaluations; None evaluates at the end only.
        max_eval_batches: batches of the evaluations on the way; None takes all. The
            evaluation after the last step always takes all.
        save_every: steps between checkpoints; None saves at the end only.
        keep_last: how many of the newest checkpoints are kept.
        keep_best: save when an evaluation is the best so far, and keep that one too.
        log_every: steps between records in metrics.jsonl and the event files.
        health_every: steps between memory-health records; None records none.
        compilation_cache: where compiled programs are kept for the next start: "auto",
            the folder `compiled` beside the prepared corpora, but on a CPU nowhere;
            "off"; or a folder. See `memjax.train.kept_programs`.
        profile_steps: (first, end) of a profiler window, end excluded; None for none.
        host_tables: where tables in mode "host" are while a run trains: "memory", "run"
            (files in the run folder, mapped into memory), or a folder for these files.
            They are made anew at every start.
        host_slots: rows of such a table that the device holds; None takes what the
            optimizer needs, and eight times the rows that a step reads.
    """

    n_steps: int = 1000
    accumulate_steps: int = 1
    eval_every: int | None = 200
    max_eval_batches: int | None = None
    save_every: int | None = 200
    keep_last: int = 2
    keep_best: bool = True
    log_every: int = 10
    health_every: int | None = None
    compilation_cache: str = "auto"
    profile_steps: tuple[int, int] | None = None
    host_tables: str = "memory"
    host_slots: int | None = None

    def __post_init__(self) -> None:
        for name in ("n_steps", "accumulate_steps", "keep_last", "log_every"):
            self._at_least_one(name, getattr(self, name))
        for name in ("eval_every", "max_eval_batches", "save_every", "health_every"):
            if getattr(self, name) is not None:
                self._at_least_one(name, getattr(self, name))
        if not isinstance(self.compilation_cache, str) or not self.compilation_cache:
            want = "'auto', 'off' or a folder"
            raise ConfigError("train.compilation_cache", self.compilation_cache, want)
        if self.profile_steps is not None:
            window = tuple(self.profile_steps)
            if len(window) != 2 or not 0 <= window[0] < window[1]:
                raise ConfigError(
                    "train.profile_steps",
                    self.profile_steps,
                    "(first, end), first < end",
                )

        if not isinstance(self.host_tables, str) or not self.host_tables:
            want = "'memory', 'run' or a folder"
            raise ConfigError("train.host_tables", self.host_tables, want)
        if self.host_slots is not None:
            self._at_least_one("host_slots", self.host_slots)

    @staticmethod
    def _at_least_one(name: str, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"train.{name}", value, "an integer of at least 1")


RESUMABLE_FIELDS = tuple(
    f"train.{field.name}"
    for field in dataclasses.fields(TrainConfig)
    if field.name not in ("accumulate_steps", "host_slots")
)
"""Fields a rerun in the same folder may change: the state keeps its meaning."""
