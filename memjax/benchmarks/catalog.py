"""The benchmarks of `memjax bench` by name.

What: `BENCHMARKS`, what each measures and costs; `chosen`, the entries behind names;
    `measure_entries`, their figures.
Why: the command lists them, and imports only those that are asked for.
When not: `table_rows`, which has a plan of its own; the command calls it directly.
"""

import dataclasses
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memjax.benchmarks.entry import Entry, OpenWorker, Session, ask, open_program
from memjax.benchmarks.machine import machine_facts
from memjax.benchmarks.process import Process
from memjax.benchmarks.rates import rates_program
from memjax.errors import ConfigError

TABLE_ROWS = "table_rows"
ALL = "all"
CACHE_VARIABLE = "MEMJAX_CACHE"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark in the list.

    Attributes:
        what: is measured.
        cost: time and memory of the full form, on two cores.
        reads_corpus: whether it needs kjv, from the extra `data`.
    """

    what: str
    cost: str
    reads_corpus: bool = False


# Each is a module of this folder with a function `entries(short) -> list[Entry]`.
BENCHMARKS = {
    TABLE_ROWS: Benchmark(
        what="a table's step at 1 to 64 million rows",
        cost="5 min, 18 GB",
        reads_corpus=True,
    ),
    "product_keys": Benchmark(
        what="a product-key memory: read, read and backward, whole step with Adam",
        cost="10 min, 20 GB",
    ),
    "memory_plus": Benchmark(
        what="Memory+: read, read and backward",
        cost="2 min, 5 GB",
    ),
    "devices": Benchmark(
        what="memory of a training step on each of 1, 2, 4 and 8 devices",
        cost="2 min, 2 GB",
    ),
    "engram": Benchmark(
        what="an Engram layer: forward, forward and backward, whole step with Adam",
        cost="8 min, 12 GB",
    ),
    "sinkhorn": Benchmark(
        what="a step of the table optimizer, dense and by active rows",
        cost="4 min, 20 GB",
    ),
    "train_step": Benchmark(
        what="the quickstart's step with and without memory; compiling deep models",
        cost="2 min, 4 GB",
    ),
    "bag": Benchmark(
        what="weighted row sums and their gradients",
        cost="2 min, 4 GB",
    ),
    "host_table": Benchmark(
        what="the quickstart's step, its table on the device, the host, in a file",
        cost="4 min, 8 GB",
        reads_corpus=True,
    ),
}


def has_peer() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def names_of(words: Sequence[str]) -> list[str]:
    """The benchmarks and entries that are asked for: names, `all`, or NAME/PREFIX.

    Raises:
        ConfigError: no benchmark has that name.
    """
    names: list[str] = []
    for word in words:
        benchmark = word.partition("/")[0]
        if word != ALL and benchmark not in BENCHMARKS:
            known = [*BENCHMARKS, ALL]
            close = difflib.get_close_matches(benchmark, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError("name", word, f"one of {', '.join(known)}{hint}")
        names += list(BENCHMARKS) if word == ALL else [word]
    return list(dict.fromkeys(names))


def chosen(names: Sequence[str], *, short: bool) -> list[Entry]:
    """The entries of benchmarks, or of NAME/PREFIX those whose name begins so.

    Args:
        names: from `names_of`; table_rows has no entries.
        short: small sizes.

    Raises:
        ConfigError: no entry begins with a name.
    """
    entries: dict[str, Entry] = {}
    for name in names:
        benchmark = name.partition("/")[0]
        if name == TABLE_ROWS:
            continue
        if benchmark == TABLE_ROWS:
            raise ConfigError("name", name, "table_rows, which has no parts")
        module = importlib.import_module(f"memjax.benchmarks.{benchmark}")
        made = {entry.name: entry for entry in module.entries(short)}
        found = made
        if name != benchmark:
            found = {key: made[key] for key in made if key.startswith(name)}
        if not found:
            raise ConfigError("name", name, f"the beginning of one of {list(made)}")
        entries |= found
    return list(entries.values())


def measure_entries(
    entries: Sequence[Entry],
    *,
    short: bool,
    huge_pages: bool,
    cache_dir: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    open_worker: OpenWorker = Process,
) -> dict[str, Any]:
    """The figures of entries.

    Args:
        entries: what to measure.
        short: few and short turns.
        huge_pages: whether glibc is asked for huge pages, on both sides.
        cache_dir: where the corpus lies, as in `DataConfig`.
        say: told what is being done.
        open_worker: makes a worker of (program, huge pages).

    Returns:
        Plain JSON: "machine", its facts and rates; then entry -> `Figure.json`.
    """
    machine = machine_facts() | {"huge_pages": huge_pages, "short": short}
    session = Session(
        rates={},
        huge_pages=huge_pages,
        variables={} if cache_dir is None else {CACHE_VARIABLE: cache_dir},
        with_peer=has_peer(),
        say=say,
        open_worker=open_worker,
        **({"n_turns": 3, "turn_seconds": 0.1} if short else {}),
    )
    say("how fast this machine copies and multiplies")
    with open_program(session, rates_program(short)) as worker:
        machine |= worker.answer()
        rates = ask(worker, "measure")
    machine["rates"] = rates
    session = dataclasses.replace(session, rates=rates)
    figures = {entry.name: entry.measure(session) for entry in entries}
    if short:  # targets are for the full sizes
        figures = {n: dataclasses.replace(f, target=None) for n, f in figures.items()}
    return {"machine": machine, **{n: f.json() for n, f in figures.items()}}
