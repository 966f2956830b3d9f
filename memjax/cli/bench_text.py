"""What `memjax bench` prints: tables of figures, notes and targets.

What: `figures_text` for entries with a peer and a floor, `table_rows_text` for the
    curve over numbers of rows, `list_text` for the names.
Why: the same figures are written as JSON; here they are for reading and pasting.
When not: measuring.
"""

from collections.abc import Mapping
from typing import Any

from memjax.benchmarks.catalog import Benchmark
from memjax.report.plan import bytes_text
from memjax.report.text_table import text_table


def list_text(benchmarks: Mapping[str, Benchmark]) -> str:
    """Names, what each measures, and what it costs."""
    rows = [[name, b.what, b.cost] for name, b in benchmarks.items()]
    return "\n".join(
        [
            text_table(["name", "measures", "cost on 2 cores"], rows),
            "",
            "memjax bench NAME ...      some of them",
            "memjax bench all           all of them, one after the other",
            "memjax bench NAME/PREFIX   the entries of one whose name begins so",
            "memjax bench NAME --short  small sizes, for a look: no figures to quote",
        ]
    )


def figures_text(figures: Mapping[str, Any]) -> str:
    """The machine, a row for each entry, then what a reader must know of them."""
    machine = figures["machine"]
    entries = {name: x for name, x in figures.items() if name != "machine"}
    lines = _machine_lines(machine, entries)
    timed = {n: f for n, f in entries.items() if f["ours_ms"] is not None}
    if timed:
        lines += ["", _table([_row(name, figure) for name, figure in timed.items()])]
    said: dict[str, list[str]] = {}
    for name, figure in entries.items():
        skipped = figure["skipped"]
        for note in [*([f"skipped: {skipped}"] if skipped else []), *figure["notes"]]:
            said.setdefault(note, []).append(name)
    variants = [line for n, f in timed.items() for line in _variants(n, f)]
    if variants:
        lines += ["", "Other ways to write PyTorch's side, fastest of the warm-up, ms:"]
        lines += variants
    if said:
        lines.append("")
    for note, names in said.items():
        lines.append(f"{_shared(names, len(entries))}{note}")
    return "\n".join(lines)


_HEADER = [
    "entry",
    "ours ms",
    "least",
    "form",
    "theirs ms",
    "least",
    "form",
    "ratio",
    "floor ms",
    "of floor",
    "target",
    "met",
]


def _table(rows: list[list[str]]) -> str:
    """The columns in which something stands."""
    columns = [i for i in range(len(_HEADER)) if any(row[i] for row in rows)]
    header = [_HEADER[i] for i in columns]
    return text_table(header, [[row[i] for i in columns] for row in rows])


def _row(name: str, figure: Mapping[str, Any]) -> list[str]:
    met = figure["target_met"]
    return [
        name,
        optional(figure["ours_ms"], ".4g"),
        optional(figure["ours_min_ms"], ".4g"),
        _form(figure, "ours"),
        optional(figure["theirs_ms"], ".4g"),
        optional(figure["theirs_min_ms"], ".4g"),
        _form(figure, "theirs"),
        optional(figure["ratio"], ".2f"),
        optional(figure["floor_ms"], ".4g"),
        optional(figure["of_floor"], ".0%"),
        figure["target"] or "",
        "" if met is None else "yes" if met else "no",
    ]


def _variants(name: str, figure: Mapping[str, Any]) -> list[str]:
    """A line for each form of which PyTorch's side was written in several ways."""
    lines = []
    for form, pair in figure["forms"].items():
        taken = {} if pair["theirs"] is None else pair["theirs"]["variants_warm_up_ms"]
        if len(taken) > 1:
            words = ", ".join(f"{variant} {ms:.4g}" for variant, ms in taken.items())
            of_form = f", {form}" if len(figure["forms"]) > 1 else ""
            lines.append(f"{name}{of_form}: {words}")
    return lines


def _form(figure: Mapping[str, Any], side: str) -> str:
    """The form that counts, with the variant that was fastest where there are some."""
    form = figure[f"{side}_form"]
    if form is None:
        return ""
    told = figure["forms"][form][side]
    words = [form] if len(figure["forms"]) > 1 else []
    words += [told["variant"]] if len(told["variants_warm_up_ms"]) > 1 else []
    return " ".join(words)


def _shared(names: list[str], n_entries: int) -> str:
    return "" if len(names) == n_entries > 1 else f"{', '.join(names)}: "


def _machine_lines(machine: Mapping[str, Any], entries: Mapping[str, Any]) -> list[str]:
    rates = machine["rates"]
    lines = [
        machine_text(machine),
        f"Copies {rates['copy_gb_s']:.1f} GB/s (read and written), multiplies float32 "
        f"matrices at {rates['matmul_gflops']:.0f} GFLOP/s, measured in this run.",
    ]
    sides = [
        told
        for figure in entries.values()
        for pair in figure["forms"].values()
        for told in (pair["ours"], pair["theirs"])
        if told is not None
    ]
    threads = {
        f"{told['framework']} {told['version']} on {told['device']} with "
        f"{told['threads']} threads"
        for told in sides
    }
    if threads:
        lines.append("; ".join(sorted(threads)) + ".")
    if machine["short"]:
        lines.append(SHORT)
    return lines


SHORT = "Short form: small sizes and few steps; not the published figures."


def machine_text(facts: Mapping[str, Any]) -> str:
    """One line about the machine and its state."""
    memory = facts["memory_bytes"]
    return (
        f"{facts['processor']} ({facts['device']}), {facts['cores']} cores, "
        + ("" if memory is None else f"{bytes_text(memory)}, ")
        + f"jax {facts['jax']}; load before: {optional(facts['load'], '.2f')}; "
        f"huge pages {'asked for' if facts['huge_pages'] else 'not asked for'}."
    )


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


def table_rows_text(figures: dict[str, Any]) -> str:
    """The figures of `table_rows` as tables, with the targets beside the ratios."""
    facts = figures["machine"]
    lines = [
        "Lookup, row gradient and update of one table of width "
        f"{figures['width']}, {figures['dtype']}: {figures['tokens_per_step']} tokens, "
        f"{figures['ids_per_step']} rows read a step; medians of {figures['steps']} "
        f"steps after {figures['warm_steps']}.",
        machine_text(facts | {"huge_pages": figures["huge_pages"]}),
    ]
    if figures["short"]:
        lines.append(SHORT)
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
    cells = [optional(figure.get(name), form) for name, form in _COLUMNS.values()]
    share = figure["huge_page_frac"]
    return [*cells, bytes_text(figure["temp_bytes"]), optional(share, ".0%")]


def optional(value: Any, form: str) -> str:
    """A number in a form; nothing for None."""
    return "" if value is None else format(value, form)
