"""`memjax bench`: timings of parts of memjax on this machine.

What: `table_rows`, the time of a table's step at growing numbers of rows.
Why: the figures of the documentation come from a command that anybody can run.
When not: the speed of a training run; its own log has that.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from memjax.cli.arguments import Flag, OptionalDir, parse
from memjax.errors import ConfigError
from memjax.report.plan import bytes_text
from memjax.report.text_table import text_table

_What = Annotated[
    Literal["table_rows"], tyro.conf.Positional, tyro.conf.arg(metavar="{table_rows}")
]
_File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
_Rows = Annotated[str | None, tyro.conf.arg(metavar="N,N,...")]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time lookup, row gradient and update of one table, without a model, at growing
    numbers of rows, for Adam and Sinkhorn; and sparse against dense Sinkhorn.

    Nothing else should run meanwhile. docs/benchmarks.md says what is measured.
    """

    what: _What
    """The benchmark."""
    json: _File = None
    """Also write the figures to this file."""
    short: Flag = False
    """Small sizes and few steps, within a minute."""
    rows: _Rows = None
    """Numbers of rows, such as 1e6,4e6; default 1e6,4e6,16e6,64e6."""
    huge_pages: bool = True
    """Ask glibc for huge pages (Linux): fewer misses of the address cache."""
    cache_dir: OptionalDir = None
    """Where the corpus lies; default $MEMJAX_CACHE or ~/.cache/memjax."""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    command = parse(Bench, argv, "bench")
    if command.json is not None and not Path(command.json).absolute().parent.is_dir():
        raise ConfigError("json", command.json, "a file in a folder that exists")
    from memjax.benchmarks.table_rows import measure, plan

    figures = measure(
        plan(
            rows=None if command.rows is None else _numbers(command.rows),
            short=command.short,
            huge_pages=command.huge_pages,
            cache_dir=command.cache_dir,
        ),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(text(figures))
    if command.json is not None:
        words = json.dumps({command.what: figures}, indent=2)
        Path(command.json).write_text(words + "\n", encoding="utf-8")
    return 0


def _numbers(words: str) -> list[int]:
    """`1e6,4e6` as integers."""
    try:
        return [int(float(word)) for word in words.split(",")]
    except (ValueError, OverflowError):
        raise ConfigError("rows", words, "numbers such as 1e6,4e6") from None


# Column -> the figure and its form.
_COLUMNS = {
    "ms a step": ("ms", ".2f"),
    "least": ("ms_min", ".2f"),
    "active rows": ("active_rows", ",d"),
    "ns a row": ("ns_per_active_row", ".1f"),
    "lookup": ("lookup_ms", ".2f"),
    "gradient": ("gradient_ms", ".2f"),
    "update": ("update_ms", ".2f"),
}


def text(figures: dict[str, Any]) -> str:
    """The figures of `table_rows` as tables, with the targets beside the ratios."""
    facts = figures["machine"]
    memory = facts["memory_bytes"]
    lines = [
        "Lookup, row gradient and update of one table of width "
        f"{figures['width']}, {figures['dtype']}: {figures['tokens_per_step']} tokens, "
        f"{figures['ids_per_step']} rows read a step; medians of {figures['steps']} "
        f"steps after {figures['warm_steps']}.",
        f"{facts['processor']} ({facts['device']}), {facts['cores']} cores, "
        + ("" if memory is None else f"{bytes_text(memory)}, ")
        + f"jax {facts['jax']}; load before: {_optional(facts['load'], '.2f')}; "
        f"huge pages {'asked for' if figures['huge_pages'] else 'not asked for'}.",
    ]
    if figures["short"]:
        lines.append(
            "Short form: small sizes and few steps; not the published figures."
        )
    rows = [
        [name, f"{int(n_rows):,}", *_cells(figure)]
        for name, by_rows in figures["rows"].items()
        for n_rows, figure in by_rows.items()
    ]
    header = ["optimizer", "rows", *_COLUMNS, "temp", "huge pages"]
    lines += ["", text_table(header, rows), ""]
    targets = figures["targets"]
    for name in figures["rows"]:
        ratio = figures[f"ratio_{name}"]
        if ratio is not None:
            target = targets[f"ratio_{name}"]
            lines.append(
                f"{name}: most rows over least rows {ratio:.2f} (target: <= {target})"
            )
    ((n_rows, sparse),) = figures["dense"]["sinkhorn"].items()
    ((_, dense),) = figures["dense"]["sinkhorn_dense"].items()
    lines.append(
        f"sinkhorn at {int(n_rows):,} rows, float32: dense {dense['ms']:.1f} ms, "
        f"by rows {sparse['ms']:.2f} ms, "
        f"{figures['dense_over_sparse']:.0f} times faster "
        f"(target at 16,000,000: >= {targets['dense_over_sparse']:.0f})"
    )
    late = [
        f"{figure[kind]} {kind} with {int(n_rows):,} rows"
        for n_rows, figure in figures["rows"]["sinkhorn"].items()
        for kind in ("dense_steps", "overflow_steps")
        if figure[kind]
    ]
    if late:
        lines.append(f"sinkhorn was slowed down by {', '.join(late)}")
    return "\n".join(lines)


def _cells(figure: dict[str, Any]) -> list[str]:
    cells = [_optional(figure.get(name), form) for name, form in _COLUMNS.values()]
    share = figure["huge_page_frac"]
    return [*cells, bytes_text(figure["temp_bytes"]), _optional(share, ".0%")]


def _optional(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
