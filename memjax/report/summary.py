"""Finished runs -> one row per setting: mean, spread, paired difference.

What: `summarise(runs, ...)` groups runs over seeds and compares arms with a baseline.
Why: a difference is believed when it holds seed by seed, with its interval.
When not: single runs; a row of one seed has no spread and no interval.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memjax.report.student_t import t_quantile

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Run:
    """One cell of a sweep: its labels by axis, and its metrics (None: not finished)."""

    labels: Mapping[str, str]
    metrics: Mapping[str, Any] | None


@dataclass(frozen=True)
class Row:
    """One setting of all axes but the seed.

    Attributes:
      labels: axis -> label, without the seed.
      by_seed: seed label -> metric of the finished runs.
      n_planned: runs that the sweep asks for.
      mean, std: over seeds; std has n - 1 in the denominator. None without runs, and
        std None for one run.
      difference: mean over common seeds of this row minus the baseline row; None
        without a baseline or common seed.
      interval: half width of the 95 % t interval of the difference; None below two
        common seeds.
      is_baseline: the row others are compared with.
      is_selected: the best of its arm by the validation metric.
    """

    labels: Mapping[str, str]
    by_seed: Mapping[str, float]
    n_planned: int
    mean: float | None = None
    std: float | None = None
    difference: float | None = None
    interval: float | None = None
    is_baseline: bool = False
    is_selected: bool = False


def paired_difference(
    ours: Mapping[str, float], theirs: Mapping[str, float]
) -> tuple[float | None, float | None]:
    """Mean of ours - theirs over common seeds, and its 95 % half width.

    The interval is t(0.975, n - 1) * s / sqrt(n) of the n differences (Student's
    paired t). (None, None) without a common seed, (mean, None) with one.
    """
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    n = len(differences)
    if n == 0:
        return None, None
    mean = statistics.fmean(differences)
    if n == 1:
        return mean, None
    spread = (
        statistics.stdev(differences)
        if all(map(math.isfinite, differences))
        else math.nan
    )
    return mean, t_quantile(0.5 + CONFIDENCE / 2, n - 1) * spread / math.sqrt(n)


def summarise(
    runs: Sequence[Run],
    *,
    metric: str = "valid_bpb",
    select_metric: str = "valid_bpb",
    baseline: Mapping[str, str] | None = None,
    select: Sequence[str] = (),
    seed_axis: str = "seed",
) -> list[Row]:
    """One row per setting, in the order of the runs.

    Args:
      runs: every cell, finished or not, all with the same axes.
      metric: what the rows show; runs without it count as not finished.
      select_metric: what chooses among the values of `select` axes; lower is better.
        It stays a validation metric when `metric` is a test metric.
      baseline: axis -> label. A row's baseline has these labels and otherwise the
        row's own; on `select` axes it is the best of its arm.
      select: axes whose best value is chosen per arm. Empty: each row is its own arm.

    A not-a-number metric (a diverged run) makes its row's mean not-a-number and is
    never selected. Equal means: the earlier row.
    """
    settings: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        key = tuple((a, label) for a, label in run.labels.items() if a != seed_axis)
        settings.setdefault(key, []).append(run)
    rows, scores = [], []
    for key, members in settings.items():
        values = _by_seed(members, metric, seed_axis)
        chosen_by = list(_by_seed(members, select_metric, seed_axis).values())
        score = statistics.fmean(chosen_by) if chosen_by else math.inf
        scores.append(score if math.isfinite(score) else math.inf)
        rows.append(_row(dict(key), values, len(members)))
    best = _best_of_arms(rows, scores, select)
    finished = []
    for index, row in enumerate(rows):
        selected = index in best.values()
        mark: dict[str, Any] = {"is_selected": selected}
        if baseline is not None:
            labels = {**row.labels, **baseline}
            reference = best.get(_arm(labels, select))
            if reference is not None:
                if reference == index:
                    mark["is_baseline"] = True
                else:
                    mark["difference"], mark["interval"] = paired_difference(
                        row.by_seed, rows[reference].by_seed
                    )
        finished.append(Row(**{**vars(row), **mark}))
    return finished


def _by_seed(runs: Sequence[Run], metric: str, seed_axis: str) -> dict[str, float]:
    return {
        run.labels.get(seed_axis, ""): float(run.metrics[metric])
        for run in runs
        if run.metrics is not None and metric in run.metrics
    }


def _row(labels: dict[str, str], by_seed: dict[str, float], n_planned: int) -> Row:
    values = list(by_seed.values())
    finite = all(map(math.isfinite, values))
    std = None
    if len(values) > 1:
        std = statistics.stdev(values) if finite else math.nan
    return Row(
        labels=labels,
        by_seed=by_seed,
        n_planned=n_planned,
        mean=statistics.fmean(values) if values else None,
        std=std,
    )


def _arm(labels: Mapping[str, str], select: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        f"{axis}={label}" for axis, label in labels.items() if axis not in select
    )


def _best_of_arms(
    rows: Sequence[Row], scores: Sequence[float], select: Sequence[str]
) -> dict[tuple[str, ...], int]:
    """Arm -> index of its best row; arms without a finite score are left out."""
    best: dict[tuple[str, ...], int] = {}
    for index, (row, score) in enumerate(zip(rows, scores, strict=True)):
        arm = _arm(row.labels, select)
        if math.isfinite(score) and (arm not in best or score < scores[best[arm]]):
            best[arm] = index
    return best
