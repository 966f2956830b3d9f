"""The printed form of a sweep: the whole grid, then the best setting of each arm.

What: `table_text(rows, ...)` for people, `table_data(rows)` for programs.
Why: a reader sees n, mean, deviation and the paired difference, and every cell tried.
When not: the numbers themselves; `report.summary` computes them.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from memjax.report.summary import Row
from memjax.report.text_table import text_table


def table_text(
    rows: Sequence[Row],
    *,
    metric: str,
    select: Sequence[str] = (),
    markdown: bool = False,
) -> str:
    """Every setting, and below it one row per arm when `select` axes were searched.

    Differences are row minus baseline, over the seeds both have, with the half width
    of their 95 % t interval. `n` is finished of planned when some are missing.
    """
    if not select:
        return _one_table(rows, metric, markdown)
    title = f"best {', '.join(select)} of each arm, chosen on valid"
    heading = "### " if markdown else ""
    chosen = [row for row in rows if row.is_selected]
    parts = [
        f"{heading}all settings",
        "",
        _one_table(rows, metric, markdown),
        "",
        f"{heading}{title}",
        "",
        _one_table(chosen, metric, markdown),
        *edge_notes(rows, select),
    ]
    return "\n".join(parts)


def _one_table(rows: Sequence[Row], metric: str, markdown: bool) -> str:
    axes = list(rows[0].labels) if rows else []
    header = [*(axis.removeprefix("model.") for axis in axes), "n"]
    header += [metric, "std", "difference", "95 %"]
    return text_table(
        header,
        [[*(row.labels[axis] for axis in axes), *_figures(row)] for row in rows],
        markdown=markdown,
    )


def _figures(row: Row) -> list[str]:
    n = len(row.by_seed)
    count = str(n) if n == row.n_planned else f"{n}/{row.n_planned}"
    difference = "" if row.difference is None else f"{row.difference:+.4f}"
    return [
        count,
        "" if row.mean is None else f"{row.mean:.4f}",
        "" if row.std is None else f"{row.std:.4f}",
        "baseline" if row.is_baseline else difference,
        "" if row.interval is None else f"+-{row.interval:.4f}",
    ]


def edge_notes(rows: Sequence[Row], select: Sequence[str]) -> list[str]:
    """A line for each chosen value at the end of a numeric grid of its arm."""
    notes = []
    for row in rows:
        if not row.is_selected:
            continue
        for axis in select:
            grid = {
                other.labels[axis]
                for other in rows
                if all(
                    other.labels[name] == label
                    for name, label in row.labels.items()
                    if name not in select
                )
            }
            try:
                ordered = sorted(grid, key=float)
            except ValueError:
                continue
            if len(ordered) > 1 and row.labels[axis] in (ordered[0], ordered[-1]):
                arm = ", ".join(
                    f"{name}={label}"
                    for name, label in row.labels.items()
                    if name not in select
                )
                where = f"{arm}: " if arm else ""
                notes.append(
                    f"note: {where}the best {axis} = {row.labels[axis]} is at the end "
                    "of its grid"
                )
    return notes


def table_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain data for JSON; each has its values by seed."""
    return [asdict(row) | {"n": len(row.by_seed)} for row in rows]
