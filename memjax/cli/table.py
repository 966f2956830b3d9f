"""`memjax table`: what a sweep found.

What: n, mean, deviation and the seed-paired difference to the baseline, per setting.
Why: the figures of a README come from files on disk, by one command.
When not: running anything; this reads result files and touches no device.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from memjax.cli.arguments import File, Flag, OptionalDir, Scale, parse_with_overrides
from memjax.cli.target import SweepTarget, resolve_sweep
from memjax.errors import ConfigError
from memjax.experiment.sweep import labels_of
from memjax.report.summary import Row, Run, summarise
from memjax.report.table import table_data, table_text


@dataclass(frozen=True, kw_only=True)
class Table:
    """Print the table of a sweep from its finished runs.

    One row per setting of all axes but the seed: n, mean, standard deviation, mean
    difference to the baseline over common seeds with its 95 % t interval. Axes that
    were searched (learning rates) are chosen per arm by the mean on valid.
    """

    file: File
    """Sweep file."""
    run_dir: OptionalDir = None
    """Folder of the sweep's runs; default runs/NAME."""
    metric: str = "valid_bpb"
    """Entry of result.json to show: valid_bpb, test_bpb, valid.kjv, seconds, ..."""
    markdown: Flag = False
    """Markdown instead of aligned text."""
    json: Flag = False
    """The rows as JSON, with the value of every seed."""
    debug: Flag = False
    """The sweep was run with --debug."""
    scale: Scale = "laptop"
    """Size the sweep was run at."""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    command, overrides = parse_with_overrides(Table, argv, "table")
    target = resolve_sweep(
        command.file,
        run_dir=command.run_dir,
        scale=command.scale,
        debug=command.debug,
        overrides=overrides,
    )
    if not any(cell.result() for cell in target.cells):
        raise ConfigError(
            "run-dir", str(target.root), "a folder with finished runs of this sweep"
        )
    rows = rows_of(target, command.metric)
    if not any(row.by_seed for row in rows):
        known = sorted(
            {name for cell in target.cells for name in _numbers(cell.result())}
        )
        raise ConfigError("metric", command.metric, f"one of {', '.join(known)}")
    if command.json:
        print(json.dumps(table_data(rows), indent=2))
        return 0
    sweep = target.loaded.sweep
    assert sweep is not None
    print(
        table_text(
            rows,
            metric=command.metric,
            select=sweep.select,
            markdown=command.markdown,
        )
    )
    for name, figure in target.loaded.published.items():
        print(f"published: {name} = {figure}")
    return 0


def rows_of(target: SweepTarget, metric: str = "valid_bpb") -> list[Row]:
    """The rows of a sweep's table from the result files that are there."""
    sweep = target.loaded.sweep
    assert sweep is not None
    runs = []
    for cell in target.cells:
        result = cell.result()
        metrics = None if result is None else _numbers(result)
        runs.append(Run(labels=labels_of(cell.cell), metrics=metrics))
    return summarise(runs, metric=metric, baseline=sweep.baseline, select=sweep.select)


def _numbers(result: dict[str, object] | None) -> dict[str, float]:
    """The numbers of a result by name; those one level down as `valid.kjv`."""
    numbers: dict[str, float] = {}
    for name, value in (result or {}).items():
        if isinstance(value, dict):
            numbers |= {f"{name}.{inner}": x for inner, x in _numbers(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers
