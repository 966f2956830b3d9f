"""A training step on chips that are not here: bytes, operations, the least it takes.

What: `plan`, from an experiment, a chip and a number of chips; plain data.
Why: whether it fits, what bounds it and which field to change show before a pod is
    rented; nothing of the model is allocated.
When not: what a step will take. A floor is what published rates allow, and no more.
"""

from dataclasses import replace
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from memjax.build.activations import activation_bytes
from memjax.build.planned_state import planned_state
from memjax.build.planned_traffic import exchanges, memory_traffic, row_gradient_bytes
from memjax.errors import ConfigError
from memjax.experiment import Experiment
from memjax.models.parameters import cost
from memjax.parallel.mesh import batch_shards
from memjax.report.chips import USABLE_FLOPS, Chip, chip_named
from memjax.report.table_forms import (
    Table,
    form_costs,
    rows_entering,
    rows_read,
    update_s,
)

DENSE_SHARE = 0.5
"""Share of a table's rows from which on a step over all of them is the cheaper one."""


def plan(experiment: Experiment, chip_name: str, n_chips: int) -> dict[str, Any]:
    """What a step of an experiment costs each of n_chips chips.

    Returns:
        Plain data: bytes and operations of one chip, times in seconds.
        `docs/planner.md` says what each entry is and how it is computed.

    Raises:
        ConfigError: an unknown chip, or a mesh, batch or table that does not divide
            over so many chips.
    """
    chip = chip_named(chip_name)
    experiment.validate(n_chips)
    sizes = experiment.mesh.sizes(n_chips)
    axis_types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types)
    state = planned_state(experiment, mesh)
    tables = state.of_tables
    n_tokens = experiment.data.batch_size * experiment.data.context
    n_micro = experiment.train.accumulate_steps
    pieces = batch_shards(sizes) * n_micro
    if experiment.data.batch_size % pieces:
        raise ConfigError(
            "data.batch_size",
            experiment.data.batch_size,
            "a multiple of mesh.data * mesh.fsdp * mesh.table * "
            f"train.accumulate_steps = {pieces}",
        )
    n_rows = experiment.data.batch_size // pieces
    kept = activation_bytes(experiment, n_rows)
    memory = {name: getattr(state, name) for name in state._fields[:-2]}
    memory["row_gradients"] = row_gradient_bytes(experiment, tables, sizes)
    memory["activations"] = kept.kept + kept.block
    total = sum(memory.values())
    flops = _flops(experiment, sizes)
    sent = exchanges(experiment, chip, state, sizes)
    moved = memory_traffic(experiment, state, kept, sizes)
    return {
        "chip": chip_name,
        "chips": n_chips,
        "mesh": sizes | {"table_by": experiment.mesh.table_by},
        "tokens_per_step": n_tokens,
        "tokens": n_tokens // batch_shards(sizes),
        "micro_batches": n_micro,
        "rows_per_micro_batch": n_rows,
        "memory": memory | {"total": total, "available": int(chip.memory)},
        "activations": kept._asdict(),
        "flops": flops,
        "memory_traffic": moved,
        "exchanges": sent,
        "floor": _floor(experiment, chip, flops, moved, sent, tables, sizes),
        "tables": [_table_plan(table, n_tokens) for table in tables],
        "forms": form_costs(tables, chip, n_chips, n_tokens) if tables else [],
        "update_s": dict(update_s(tables, chip, n_chips, n_tokens)),
        "fits": total <= chip.memory,
        "advice": _advice(experiment, memory, total, chip),
    }


def _flops(experiment: Experiment, sizes: dict[str, int]) -> dict[str, int]:
    """Operations of a step on one chip; those that memories add, apart."""
    model, context = experiment.model, experiment.data.context
    per_token = cost(model, context).flops_per_token
    without = replace(model, memories=(), arrangement="residual")
    added = per_token - cost(without, context).flops_per_token
    again = per_token - 2 * model.vocab_size * model.d_model if model.remat else 0
    n_tokens = experiment.data.batch_size * context
    chips = batch_shards(sizes) * sizes["tensor"]
    return {
        "forward_per_token": per_token,
        "of_memories_per_token": added,
        "step": (3 * per_token + again) * n_tokens // chips,
        "of_memories": 3 * added * n_tokens // chips,
        "computed_again": again * n_tokens // chips,
    }


def _floor(
    experiment: Experiment,
    chip: Chip,
    flops: dict[str, int],
    moved: dict[str, int],
    sent: list[dict[str, Any]],
    tables: tuple[Table, ...],
    sizes: dict[str, int],
) -> dict[str, Any]:
    """Seconds of each bound, and the largest: all else could hide behind it."""
    rate = chip.matmul_rate(experiment.model.precision.compute)
    n_tokens = experiment.data.batch_size * experiment.data.context
    reads = sum(table.reads for table in tables) * n_tokens // batch_shards(sizes)
    fetched = sum(
        rows_entering(table, n_tokens * table.reads)
        * (table.row_bytes + table.row_state_bytes)
        for table in tables
    )
    bounds = {
        "compute": flops["step"] / rate,
        "memory": sum(moved.values()) / chip.memory_rate,
        "links": sum(item["s"] for item in sent),
        "rows": reads * chip.row_s,
        "host": fetched / chip.host_rate,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    return {
        **{f"{name}_s": seconds for name, seconds in bounds.items()},
        "usable_compute_s": bounds["compute"] / USABLE_FLOPS,
        "usable_memories_s": flops["of_memories"] / rate / USABLE_FLOPS,
        "bound": bound,
        "step_s": bounds[bound],
        "tokens_per_s": n_tokens / bounds[bound],
    }


def _table_plan(table: Table, n_tokens: int) -> dict[str, Any]:
    read = rows_read(table.rows, n_tokens * table.reads)
    share = read / table.rows
    return {
        "path": table.path,
        "rows": table.rows,
        "width": table.width,
        "mode": table.mode,
        "reads_per_token": table.reads,
        "row_bytes": table.row_bytes,
        "bytes_per_token": table.reads * table.row_bytes,
        "reads": n_tokens * table.reads,
        "rows_read": int(read),
        "share_read": share,
        "cheaper_mode": "rows" if share < DENSE_SHARE else "dense",
    }


_PARTS = {
    "dense parameters": ("dense", "dense_optimizer", "average", "gradients"),
    "tables": ("tables", "table_optimizer"),
    "gradients of table reads": ("row_gradients",),
    "activations": ("activations",),
}


def _advice(
    experiment: Experiment, memory: dict[str, int], total: int, chip: Chip
) -> list[dict[str, Any]]:
    """What to change when it does not fit, the largest part first."""
    if total <= chip.memory:
        return []
    held = {part: sum(memory[name] for name in names) for part, names in _PARTS.items()}
    return [
        {"part": part, "bytes": held[part], "change": _changes(experiment, part)}
        for part in sorted(held, key=lambda part: -held[part])
        if held[part] > 0.1 * total
    ]


def _changes(experiment: Experiment, part: str) -> dict[str, str]:
    """{field: how to change it}."""
    model, optim = experiment.model, experiment.optim
    if part == "dense parameters":
        return {"mesh.fsdp": "larger", "mesh.tensor": "larger"}
    if part == "activations":
        changes = {"train.accumulate_steps": "larger"}
        return changes if model.remat else changes | {"model.remat": "True"}
    if part == "gradients of table reads":
        changes = {"data.batch_size": "smaller"}
        if experiment.mesh.table == 1:
            return changes
        if experiment.mesh.table_by == "rows":
            return changes | {"mesh.table_by": "'hash_columns'"}
        return changes | {"mesh.table": "larger"}
    if all(memory.table_mode == "dense" for memory in model.memories):
        return {"model.memories.0.table_mode": "'rows'", "mesh.table": "larger"}
    on_host = any(memory.table_mode == "host" for memory in model.memories)
    changes = {"data.batch_size": "smaller"} if on_host else {"mesh.table": "larger"}
    if model.precision.tables != "bfloat16":
        changes["model.precision.tables"] = "'bfloat16'"
    if optim.table_optimizer == "sinkhorn_momentum":
        changes["optim.table_capacity"] = "smaller"
    return changes
