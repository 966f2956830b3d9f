"""`memjax bench`: timings of parts of memjax on this machine, against PyTorch's.

What: benchmarks by name, a table and JSON; without a name, the list of them.
Why: the figures of the documentation come from a command that anybody can run.
When not: the speed of a training run; its own log has that.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from memjax.cli.arguments import Flag, OptionalDir, parse
from memjax.errors import ConfigError

_Names = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")
]
_File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
_Rows = Annotated[str | None, tyro.conf.arg(metavar="N,N,...")]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time parts of memjax, and the same in PyTorch where there is a peer (extra
    `bench`): both with all cores, in turns, each figure beside its floor.

    Nothing else should run meanwhile. docs/benchmarks.md says what is measured.
    """

    names: _Names = ()
    """Benchmarks, or `all`; NAME/PREFIX takes some entries of one. None: the list."""
    json: _File = None
    """Also write the figures to this file."""
    short: Flag = False
    """Small sizes and few calls, within a minute each."""
    rows: _Rows = None
    """table_rows: numbers of rows, such as 1e6,4e6; default 1e6,4e6,16e6,64e6."""
    huge_pages: bool = True
    """Ask glibc for huge pages (Linux), on both sides: fewer misses of the address
    cache, fewer page faults."""
    cache_dir: OptionalDir = None
    """Where the corpus lies; default $MEMJAX_CACHE or ~/.cache/memjax."""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    command = parse(Bench, argv, "bench")
    if command.json is not None and not Path(command.json).absolute().parent.is_dir():
        raise ConfigError("json", command.json, "a file in a folder that exists")
    from memjax.benchmarks import catalog
    from memjax.cli import bench_text

    if not command.names:
        print(bench_text.list_text(catalog.BENCHMARKS))
        return 0
    names = catalog.names_of(command.names)
    _check_options(command, names, catalog)
    entries = catalog.chosen(names, short=command.short)
    figures: dict[str, Any] = {}
    texts = []
    if catalog.TABLE_ROWS in names:
        from memjax.benchmarks.table_rows import measure, plan

        curve = measure(
            plan(
                rows=None if command.rows is None else _numbers(command.rows),
                short=command.short,
                huge_pages=command.huge_pages,
                cache_dir=command.cache_dir,
            ),
            say=_say,
        )
        figures[catalog.TABLE_ROWS] = curve
        texts.append(bench_text.table_rows_text(curve))
    if entries:
        taken = catalog.measure_entries(
            entries,
            short=command.short,
            huge_pages=command.huge_pages,
            cache_dir=command.cache_dir,
            say=_say,
        )
        figures |= taken
        texts.append(bench_text.figures_text(taken))
    print("\n\n".join(texts))
    if command.json is not None:
        words = json.dumps(figures, indent=2)
        Path(command.json).write_text(words + "\n", encoding="utf-8")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_options(command: Bench, names: Sequence[str], catalog: Any) -> None:
    """ConfigError for an option that none of the benchmarks has."""
    if command.rows is not None and catalog.TABLE_ROWS not in names:
        raise ConfigError("rows", command.rows, "an option of table_rows alone")
    corpus = [n for n, b in catalog.BENCHMARKS.items() if b.reads_corpus]
    if command.cache_dir is not None and not any(
        name.partition("/")[0] in corpus for name in names
    ):
        allowed = f"an option of those that read a corpus: {', '.join(corpus)}"
        raise ConfigError("cache_dir", command.cache_dir, allowed)


def _numbers(words: str) -> list[int]:
    """`1e6,4e6` as integers."""
    try:
        return [int(float(word)) for word in words.split(",")]
    except (ValueError, OverflowError):
        raise ConfigError("rows", words, "numbers such as 1e6,4e6") from None
