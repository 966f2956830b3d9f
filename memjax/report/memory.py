"""What a run's memories do, as tables.

What: `memory_text(measured)` from the plain data of `memjax.run.measure_memory`.
Why: usage, trust and collisions are read side by side, in a terminal or a README.
When not: numbers for a program; the command writes them as JSON on request.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from memjax.report.text_table import text_table

_USAGE = (
    ("used_pct", "used %"),
    ("kl_w", "KL w"),
    ("kl_u", "KL u"),
    ("gini_w", "gini w"),
    ("gini_u", "gini u"),
    *((f"top{n}_{kind}", f"top{n} {kind}") for kind in "wu" for n in (50, 90, 99)),
    ("coverage", "coverage"),
    ("collision_ratio", "collisions"),
)
_LOSSES = (
    ("n_tokens", "tokens"),
    ("share", "share"),
    ("nats", "nats with"),
    ("nats_without", "nats without"),
    ("gain", "gain"),
)
_COLLISIONS = (
    ("order", "order"),
    ("head", "head"),
    ("n_rows", "rows"),
    ("distinct_ngrams", "n-grams"),
    ("distinct_rows", "rows read"),
    ("shared_frac", "n-grams sharing"),
    ("expected_shared_frac", "by chance"),
    ("shared_tokens_frac", "tokens affected"),
)


def memory_text(measured: Mapping[str, Any], *, markdown: bool = False) -> str:
    """All tables of `memjax eval RUN --memory`, each under a line that says what it is.

    Args:
        measured: see `memjax.evaluate.memory_measures.measure`.
        markdown: Markdown tables instead of aligned text.
    """

    def section(title: str, header: Sequence[str], rows: Sequence[Any]) -> str:
        cells = [[_cell(value) for value in row] for row in rows]
        return f"{title}\n\n{text_table(header, cells, markdown=markdown)}"

    def losses(title: str, first: str, buckets: Sequence[Mapping[str, Any]]) -> str:
        header = (first, *(name for _, name in _LOSSES))
        keys = ("bucket", *(key for key, _ in _LOSSES))
        return section(title, header, [[b.get(key) for key in keys] for b in buckets])

    total = {"bucket": "all tokens", **measured["loss"]}
    found = [
        losses("loss in nats per token, with the memories and without", "", [total])
    ]
    gates = {
        name: memory["gate"]
        for name, memory in measured["memories"].items()
        if "gate" in memory
    }
    if gates:
        names = list(next(iter(gates.values()))["quantiles"])
        rows = [
            [at, *(gate["quantiles"][q] for q in names)] for at, gate in gates.items()
        ]
        found.append(section("gate quantiles", ("memory", *names), rows))
    for at, gate in gates.items():
        title = f"loss by gate of {at} (an open gate should mean a gain)"
        found.append(losses(title, "gate", gate["buckets"]))
    usage = [
        [at, heads, *(figures.get(key) for key, _ in _USAGE)]
        for at, memory in measured["memories"].items()
        for heads, figures in memory.get("usage", {}).items()
    ]
    if usage:
        header = ("memory", "heads", *(name for _, name in _USAGE))
        title = "usage of slots (w by weight, u by reads; KL in nats)"
        found.append(section(title, header, usage))
        spoilt = sum(
            memory.get("non_finite_scores", 0)
            for memory in measured["memories"].values()
        )
        found.append(f"scores that were not finite: {spoilt}")
    frequency = measured["frequency"]
    exact = "" if frequency["exact"] else ", told apart by a 64-bit mix"
    ngram = f"{frequency['order']}-gram"
    title = f"loss by how often the token's {ngram} stands in train{exact}"
    found.append(losses(title, "count", frequency["buckets"]))
    for at, memory in measured["memories"].items():
        if "collisions" in memory:
            header = [name for _, name in _COLLISIONS]
            rows = [
                [column[key] for key, _ in _COLLISIONS]
                for column in memory["collisions"]
            ]
            title = f"n-grams of train that share a row of {at}"
            found.append(section(title, header, rows))
    parts = measured["gradient_share"]
    header = ("backbone", "memory", "tables", "norm")
    title = "parts of the squared gradient norm, one training batch"
    found.append(section(title, header, [[parts[name] for name in header]]))
    return "\n\n".join(found)


def _cell(value: Any) -> str:
    """Four decimals, more for what they would hide; nothing for what is undefined."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    if math.isnan(value):
        return ""
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
