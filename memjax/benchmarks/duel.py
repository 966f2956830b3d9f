"""Two sides that do the same, timed in turns.

What: `Duel`, an entry whose forms are pairs of programs, ours and PyTorch's.
Why: a ratio between runs of different minutes measures the minutes.
When not: something with one side and no clock, such as memory; write an `Entry`.
"""

import statistics
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memjax.benchmarks.entry import Entry, Session, ask, open_program
from memjax.benchmarks.figure import Figure, Target, Work, quotient
from memjax.benchmarks.machine import free_bytes
from memjax.benchmarks.process import BenchmarkError, Program, Worker

MAX_DIFFERENCE = 1e-3
NO_PEER = "torch is not installed: pip install 'memjax[bench]' brings it"


@dataclass(frozen=True, kw_only=True)
class Duel:
    """A computation in one form or several, each done by both sides.

    The faster form of each side counts: forms may differ in their results (lazy and
    dense optimizers), the two sides of a form may not.

    Attributes:
        name: of the entry.
        forms: form -> (our program, theirs or None); the targets are functions that
            make a `contender.Contender`.
        work: what must be done at least; None: no floor.
        target: what is aimed at.
        max_difference: of what both sides computed, norm over norm.
        notes: of the figure, whatever comes out.
    """

    name: str
    forms: Mapping[str, tuple[Program, Program | None]]
    work: Work | None = None
    target: Target | None = None
    max_difference: float = MAX_DIFFERENCE
    notes: tuple[str, ...] = ()

    def entry(self) -> Entry:
        """The duel as an entry."""
        return Entry(name=self.name, measure=self.measure)

    def measure(self, session: Session) -> Figure:
        """Take the times of all forms; see `Figure`.

        Where memory does not hold both sides of a form they run one after the other,
        which a note says; where it does not hold one of them, the form is left out.

        Raises:
            BenchmarkError: a worker failed, or the sides computed different things.
        """
        measured: dict[str, _Pair] = {}
        skipped, notes = [], list(self.notes)
        for form, programs in self.forms.items():
            session.say(self.name if len(self.forms) == 1 else f"{self.name}, {form}")
            ours, theirs = programs
            if theirs is not None and not session.with_peer:
                theirs = None
                notes += [NO_PEER] * (NO_PEER not in notes)
            reason = _too_large([p for p in (ours, theirs) if p is not None])
            if reason is not None:
                skipped.append(reason)
                continue
            measured[form] = self._measure_form(session, form, ours, theirs, notes)
        if not measured:
            return Figure(skipped="; ".join(skipped), notes=tuple(notes))
        return self._figure(session, measured, (*notes, *skipped))

    def _measure_form(
        self,
        session: Session,
        form: str,
        ours: Program,
        theirs: Program | None,
        notes: list[str],
    ) -> "_Pair":
        if theirs is None:
            ((side,), _) = _race(session, [ours])
            return _Pair(side, None, None)
        free = free_bytes()
        if free is None or ours.need_bytes + theirs.need_bytes <= free:
            (our_side, their_side), difference = _race(session, [ours, theirs])
        else:
            notes.append(f"{form}: one side after the other, for lack of memory")
            ((our_side,), difference) = _race(session, [ours])
            ((their_side,), _) = _race(session, [theirs])
        if difference is not None and not difference <= self.max_difference:
            raise BenchmarkError(
                f"{self.name}, {form}: ours and PyTorch's results differ by "
                f"{difference:.1e} of their norm, allowed: {self.max_difference:g}"
            )
        if our_side.device != their_side.device:
            notes.append(
                f"not compared: ours on {our_side.device}, theirs on "
                f"{their_side.device}"
            )
            their_side = None
        return _Pair(our_side, their_side, difference)

    def _figure(
        self, session: Session, measured: "dict[str, _Pair]", notes: Iterable[str]
    ) -> Figure:
        ours = {form: pair.ours for form, pair in measured.items()}
        theirs = {f: p.theirs for f, p in measured.items() if p.theirs is not None}
        best = min(ours, key=lambda form: ours[form].ms)
        peer = min(theirs, key=lambda form: theirs[form].ms) if theirs else None
        their_side = None if peer is None else theirs[peer]
        differences = [
            p.difference for p in measured.values() if p.difference is not None
        ]
        return Figure(
            ours_ms=ours[best].ms,
            ours_min_ms=ours[best].min_ms,
            ours_spread=ours[best].spread,
            ours_form=best,
            theirs_ms=None if their_side is None else their_side.ms,
            theirs_min_ms=None if their_side is None else their_side.min_ms,
            theirs_spread=None if their_side is None else their_side.spread,
            theirs_form=peer,
            forms={form: pair.json() for form, pair in measured.items()},
            difference=max(differences, default=None),
            calls=len(ours[best].times),
            floor_ms=None if self.work is None else self.work.floor_ms(session.rates),
            floor=None if self.work is None else self.work.words,
            target=self.target,
            notes=tuple(notes),
        )


@dataclass(frozen=True)
class _Side:
    """What one worker told."""

    device: str
    described: Mapping[str, Any]
    variants: Mapping[str, float]  # fastest first
    times: list[float]  # milliseconds
    finished: Mapping[str, Any]

    @property
    def ms(self) -> float:
        return statistics.median(self.times)

    @property
    def min_ms(self) -> float:
        return min(self.times)

    @property
    def spread(self) -> float:
        low, _, high = statistics.quantiles(self.times, n=4)
        return (high - low) / self.ms

    def json(self) -> dict[str, Any]:
        numbers = {"ms": self.ms, "min_ms": self.min_ms, "spread": self.spread}
        warm_up = {name: 1e3 * seconds for name, seconds in self.variants.items()}
        numbers |= {"variant": next(iter(warm_up)), "variants_warm_up_ms": warm_up}
        return numbers | dict(self.described) | dict(self.finished)


@dataclass(frozen=True)
class _Pair:
    """Both sides of a form."""

    ours: _Side
    theirs: _Side | None
    difference: float | None

    def json(self) -> dict[str, Any]:
        theirs = self.theirs
        return {
            "ours": self.ours.json(),
            "theirs": None if theirs is None else theirs.json(),
            "ratio": quotient(None if theirs is None else theirs.ms, self.ours.ms),
            "difference": self.difference,
        }


def _race(
    session: Session, programs: list[Program]
) -> tuple[list[_Side], float | None]:
    """The sides after their turns, and the difference between their outputs."""
    with ExitStack() as stack:
        workers = [stack.enter_context(open_program(session, p)) for p in programs]
        described = [worker.answer() for worker in workers]
        for worker in workers:
            ask(worker, "start")
        difference = _difference(workers)
        variants = [ask(worker, "choose") for worker in workers]
        n_calls = [session.calls(next(iter(taken.values()))) for taken in variants]
        times: list[list[float]] = [[] for _ in workers]
        for _ in range(session.n_turns):
            for worker, n, taken in zip(workers, n_calls, times, strict=True):
                taken += [1e3 * seconds for seconds in ask(worker, "seconds", n)]
        finished = [ask(worker, "finish") for worker in workers]
    sides = [
        _Side(facts["device"], facts, variant, taken, last)
        for facts, variant, taken, last in zip(
            described, variants, times, finished, strict=True
        )
    ]
    return sides, difference


def _difference(workers: list[Worker]) -> float | None:
    """The largest of |a - b| / |b| over the outputs; None with one side."""
    if len(workers) < 2:
        return None
    with tempfile.TemporaryDirectory(prefix="memjax-bench-") as folder:
        files = [Path(folder) / f"{i}.npz" for i in range(2)]
        wrote = [
            ask(worker, "outputs", str(file))
            for worker, file in zip(workers, files, strict=True)
        ]
        if not all(wrote):
            return None
        with np.load(files[0]) as ours, np.load(files[1]) as theirs:
            if set(ours) != set(theirs):
                raise BenchmarkError(f"outputs {sorted(ours)} and {sorted(theirs)}")
            return max(_distance(ours[name], theirs[name]) for name in ours)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        raise BenchmarkError(f"outputs of shapes {a.shape} and {b.shape}")
    a, b = a.astype(np.float64), b.astype(np.float64)
    norm = np.linalg.norm(b)
    distance = np.linalg.norm(a - b)
    return float(distance if norm == 0 else distance / norm)


def _too_large(programs: list[Program]) -> str | None:
    """Why none of these can run here, one after the other."""
    free = free_bytes()
    for program in programs:
        if free is not None and program.need_bytes > free:
            return (
                f"{program.name} needs {program.need_bytes / 1e9:.1f} GB, and "
                f"{free / 1e9:.1f} GB of memory are free"
            )
    return None
