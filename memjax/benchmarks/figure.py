"""What one timing gives, and what it is held against.

What: `Figure`, plain numbers of an entry; `Work`, what it must do at least; `Target`.
Why: every entry of `memjax bench` has the same form, for the table and for programs.
When not: `table_rows`, whose figures are those of a curve.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a computation cannot do without, whoever writes it.

    Attributes:
        words: what is counted.
        flops: floating-point operations of its matrix products.
        copied: bytes read and as many written elsewhere, at the rate of a copy.
        moved: bytes read or written, each counted once, at the bandwidth of a copy
            (twice its bytes over its time).
        ms: time that is known otherwise.
    """

    words: str
    flops: float = 0.0
    copied: float = 0.0
    moved: float = 0.0
    ms: float = 0.0

    def floor_ms(self, rates: Mapping[str, float]) -> float:
        """The time on a machine of these `rates`, one part after the other."""
        seconds = self.flops / (1e9 * rates["matmul_gflops"])
        seconds += (2 * self.copied + self.moved) / (1e9 * rates["copy_gb_s"])
        return self.ms + 1e3 * seconds


@dataclass(frozen=True, kw_only=True)
class Target:
    """A bound on a number of a figure.

    Attributes:
        of: the field of the `Figure`, or a name among its `more`.
        sign: ">=" or "<=".
        value: the bound.
    """

    value: float
    of: str = "ratio"
    sign: Literal[">=", "<="] = ">="

    def __str__(self) -> str:
        return f"{self.of} {self.sign} {self.value:g}"

    def met(self, figures: Mapping[str, Any]) -> bool | None:
        """Whether it is met; None without the number."""
        got = figures.get(self.of)
        if got is None:
            return None
        return got >= self.value if self.sign == ">=" else got <= self.value


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The figures of one entry; None is what was not measured.

    Attributes:
        ours_ms, theirs_ms: medians over all timed calls, of the faster form each.
        ours_min_ms, theirs_min_ms: the fastest call of that form.
        ours_spread, theirs_spread: the middle half of the calls, as a part of the
            median.
        ours_form, theirs_form: which form it was.
        forms: form -> the same numbers of every form that was timed.
        difference: largest relative difference between what both computed, as norms.
        calls: timed calls of a side and form.
        floor_ms: the time its `Work` takes at the rates of this machine.
        floor: what the floor counts.
        target: what was aimed at.
        skipped: why there are no figures.
        notes: what a reader must know, such as a peer that is missing.
        more: numbers of this entry alone; they stand beside the others in `json`.
    """

    ours_ms: float | None = None
    theirs_ms: float | None = None
    ours_min_ms: float | None = None
    theirs_min_ms: float | None = None
    ours_spread: float | None = None
    theirs_spread: float | None = None
    ours_form: str | None = None
    theirs_form: str | None = None
    forms: Mapping[str, Any] = field(default_factory=dict)
    difference: float | None = None
    calls: int | None = None
    floor_ms: float | None = None
    floor: str | None = None
    target: Target | None = None
    skipped: str | None = None
    notes: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Their time over ours: above 1, we are faster."""
        return quotient(self.theirs_ms, self.ours_ms)

    @property
    def of_floor(self) -> float | None:
        """The floor over our time: 1 would be as fast as the machine allows."""
        return quotient(self.floor_ms, self.ours_ms)

    def json(self) -> dict[str, Any]:
        """Plain JSON: the fields, `ratio`, `of_floor`, `more` and `target_met`."""
        of = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        more = of.pop("more")
        target = of.pop("target")
        said = {"ratio": self.ratio, "of_floor": self.of_floor, **of, **more}
        said["target"] = None if target is None else str(target)
        said["target_met"] = None if target is None else target.met(said)
        return said


def quotient(over: float | None, under: float | None) -> float | None:
    """over / under; None where one is missing or the second is 0."""
    return None if over is None or not under else over / under
