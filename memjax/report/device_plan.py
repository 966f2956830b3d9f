"""A plan as people read it.

What: `device_plan_text`, from the plain data of `build.planner.plan`.
Why: one screen that says whether it fits, what bounds it and what to change.
When not: programs; they take the same data as JSON.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from memjax.report.chips import USABLE_FLOPS, chip_named
from memjax.report.plan import count_text
from memjax.report.text_table import text_table

_MEMORY = {
    "dense": "dense parameters",
    "tables": "tables",
    "dense_optimizer": "optimizer of dense parameters",
    "table_optimizer": "optimizer of tables",
    "average": "running average",
    "model_state": "other state",
    "gradients": "gradients",
    "row_gradients": "gradients of table reads",
    "activations": "activations (estimate)",
}
_BOUNDS = {
    "compute": "arithmetic",
    "memory": "memory of the chip",
    "links": "links",
    "rows": "gathers, by row",
    "host": "rows from the host",
}


def device_plan_text(plan: Mapping[str, Any]) -> str:
    """The plan in a few tables; GB are 1e9 bytes, MB 1e6, of one chip."""
    return "\n\n".join(
        text
        for text in (
            _head(plan),
            _memory(plan),
            _tables(plan["tables"]),
            _exchanges(plan["exchanges"]),
            _floor(plan),
            _forms(plan),
        )
        if text
    )


def _head(plan: Mapping[str, Any]) -> str:
    mesh = dict(plan["mesh"])
    by = mesh.pop("table_by")
    axes = ", ".join(f"{name} = {size}" for name, size in mesh.items())
    title = chip_named(plan["chip"]).title
    divided = f" (tables by {by})" if mesh["table"] > 1 else ""
    return (
        f"{plan['chips']} x {title}: {axes}{divided}\n"
        f"{plan['tokens_per_step']} tokens a step; a chip has {plan['tokens']}, in "
        f"{plan['micro_batches']} x {plan['rows_per_micro_batch']} rows"
    )


def _memory(plan: Mapping[str, Any]) -> str:
    memory = plan["memory"]
    unit, size = _unit(memory["total"])
    rows = [
        [label, _number(memory[name] / size)]
        for name, label in _MEMORY.items()
        if memory[name] > 1e-4 * size
    ]
    rows.append(["together", _number(memory["total"] / size)])
    verdict = "fits" if plan["fits"] else "DOES NOT FIT"
    lines = [
        text_table(["memory of a chip", unit], rows),
        f"{verdict}: the chip has {_number(memory['available'] / 1e9)} GB",
    ]
    for item in plan["advice"]:
        changes = [f"{field} {change}" for field, change in item["change"].items()]
        lines.append(
            f"  {item['part']} ({_number(item['bytes'] / size)} {unit}): "
            + " or ".join(changes)
        )
    return "\n".join(lines)


def _tables(tables: Sequence[Mapping[str, Any]]) -> str:
    if not tables:
        return ""
    header = [
        "table",
        "rows",
        "width",
        "reads",
        "bytes",
        "rows a step",
        "share",
        "mode",
    ]
    rows = [
        [
            table["path"],
            str(table["rows"]),
            str(table["width"]),
            str(table["reads_per_token"]),
            str(table["bytes_per_token"]),
            count_text(table["rows_read"]),
            f"{100 * table['share_read']:.1f} %",
            _mode(table),
        ]
        for table in tables
    ]
    n_bytes = sum(table["bytes_per_token"] for table in tables)
    reads = sum(table["reads"] for table in tables)
    return (
        f"{text_table(header, rows)}\n"
        f"a token reads {n_bytes} bytes of tables, a step {count_text(reads)} rows"
    )


def _mode(table: Mapping[str, Any]) -> str:
    if table["mode"] in ("fp8", "host", table["cheaper_mode"]):
        return table["mode"]
    return f"{table['mode']}; {table['cheaper_mode']} is cheaper"


def _exchanges(items: Sequence[Mapping[str, Any]]) -> str:
    if not items:
        return "nothing is exchanged between chips"
    unit, size = _unit(max(item["bytes"] for item in items))
    rows = [
        [
            item["what"],
            item["how"],
            item["over"],
            _number(item["bytes"] / size),
            _ms(item["s"]),
        ]
        for item in items
    ]
    return text_table(["exchanged in a step", "how", "over", unit, "ms"], rows)


def _floor(plan: Mapping[str, Any]) -> str:
    floor, flops = plan["floor"], plan["flops"]
    rows = [
        [label, _ms(floor[f"{name}_s"])]
        for name, label in _BOUNDS.items()
        if floor[f"{name}_s"]
    ]
    table = text_table(["the least a step can take", "ms"], rows)
    usable = f"{100 * USABLE_FLOPS:.0f} %"
    return (
        f"{table}\n"
        f"bound by {_BOUNDS[floor['bound']]}: {_ms(floor['step_s'])} ms, "
        f"{count_text(floor['tokens_per_s'])} tokens/s\n"
        f"{count_text(flops['step'])} FLOPs a chip; at {usable} of the peak "
        f"{_ms(floor['usable_compute_s'])} ms, of which memories add "
        f"{_ms(floor['usable_memories_s'])}"
    )


def _forms(plan: Mapping[str, Any]) -> str:
    if not plan["forms"]:
        return ""
    times = ("forward_s", "back_s", "copies_s", "host_s")
    unit, size = _unit(max(form["state_bytes"] for form in plan["forms"]))
    rows = [
        [
            form["form"],
            str(form["row_bytes"]),
            _number(form["state_bytes"] / size) + ("" if form["fits"] else " NO"),
            *(_ms(form[name]) for name in times),
        ]
        for form in plan["forms"]
    ]
    header = ["tables over all chips", "row", unit, "there", "back", "copies", "host"]
    update = plan["update_s"]
    return (
        f"{text_table(header, rows)}\n"
        f"row: bytes; {unit}: tables and momentum of a chip; there, back: ms of an "
        "all-to-all of rows,\nof their gradients; copies: ms in the chip's memory; "
        "host: ms from the host's memory instead\n"
        f"update in float32: {_ms(update['read'])} ms for the rows read, "
        f"{_ms(update['all'])} for all rows"
    )


def _unit(n_bytes: float) -> tuple[str, float]:
    """A unit that the largest of some sizes is a handy number of."""
    return ("GB", 1e9) if n_bytes >= 1e9 else ("MB", 1e6)


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 0.1 else f"{ms:.2g}"
