"""What a step moves: over the links between chips, and through a chip's memory.

What: `exchanges`, `memory_traffic` and `row_gradient_bytes`, per chip and step.
Why: links and memory bound a step as often as arithmetic does.
When not: what a compiler adds; these are the transfers that the layout makes necessary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from memjax.build.activations import Activations
from memjax.build.planned_state import PlannedState
from memjax.experiment import Experiment
from memjax.parallel.mesh import AXES, batch_shards
from memjax.report.chips import Chip, all_reduce_s, exchange_s, scatter_s
from memjax.report.table_forms import Table, rows_read

_ID_BYTES, _WIDE = 4, 4


def exchanges(
    experiment: Experiment, chip: Chip, state: PlannedState, sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The collectives of a step: what, how, over which axes, bytes of a chip, seconds.

    "bytes" is what a chip ends with (of a sum, what it starts with), from all
    micro-batches together.
    """
    return [
        item
        for item in (
            *_of_dense(experiment, chip, state, sizes),
            *_of_tables(experiment, chip, state.of_tables, sizes),
        )
        if item["s"] > 0
    ]


def _item(
    what: str,
    how: str,
    axes: Sequence[str],
    n_bytes: float,
    chip: Chip,
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """One collective; its group are the chips along `axes`, neighbours a stride apart.

    The mesh counts its last axis fastest.
    """
    n, stride = 1, 1
    for axis in axes:
        n *= sizes[axis]
    used = [axis for axis in axes if sizes[axis] > 1]
    if used:
        for axis in AXES[AXES.index(used[-1]) + 1 :]:
            stride *= sizes[axis]
    seconds = {
        "all-to-all": exchange_s,
        "all-gather": scatter_s,
        "reduce-scatter": scatter_s,
        "all-reduce": all_reduce_s,
    }[how](chip, n_bytes, n, stride)
    return {
        "what": what,
        "how": how,
        "over": "x".join(used),
        "bytes": int(n_bytes),
        "s": seconds,
    }


def _of_dense(
    experiment: Experiment, chip: Chip, state: PlannedState, sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Of dense parameters, their gradients, and activations between tensor parts."""
    n_micro = experiment.train.accumulate_steps
    model = experiment.model
    whole = state.gathered * n_micro
    wide = _WIDE if n_micro > 1 else jnp.dtype(model.precision.params).itemsize
    gradients = whole * wide // jnp.dtype(model.precision.params).itemsize
    copies = [axis for axis in ("data", "table") if sizes[axis] > 1]
    n_tokens = _tokens(experiment, sizes)
    stream = n_tokens * model.d_model * jnp.dtype(model.precision.compute).itemsize
    passes = 6 if model.remat else 4  # two sums a block and pass
    return [
        _item(
            "dense weights, forward and backward",
            "all-gather",
            ("fsdp",),
            2 * whole,
            chip,
            sizes,
        ),
        _item("dense gradients", "reduce-scatter", ("fsdp",), gradients, chip, sizes),
        _item(
            "dense gradients of copies",
            "all-reduce",
            copies,
            state.gradients * n_micro,
            chip,
            sizes,
        ),
        _item(
            "sums of attention and feed-forward",
            "all-reduce",
            ("tensor",),
            passes * model.n_layers * stream,
            chip,
            sizes,
        ),
    ]


def _of_tables(
    experiment: Experiment,
    chip: Chip,
    tables: Sequence[Table],
    sizes: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Of tables in mode "rows": ids and rows there, gradients back, copies joined.

    As `parallel.row_sharding` does it: by hash columns and by columns, a chip is sent
    what it needs and no more; by rows, ids and gradients go to all parts, and each part
    adds its share of what was read.
    """
    n_tokens, parts = _tokens(experiment, sizes), sizes["table"]
    found = []
    for by in ("rows", "columns", "hash_columns"):
        here = [t for t in tables if t.mode == "rows" and _by(t, experiment) == by]
        # Weights travel with the ids of weighted sums.
        ids = sum(t.reads * (2 if t.weighed else 1) for t in here) * _ID_BYTES
        vectors = sum(_vector_bytes(t) for t in here)
        weights = sum(t.reads * _WIDE for t in here if t.weighed)
        to_all, apart = ("all-gather", parts), ("all-to-all", 1)
        added = ("reduce-scatter", parts)
        for what, n_bytes, (how, factor) in (
            ("row ids", ids, apart if by == "hash_columns" else to_all),
            ("rows read", vectors, added if by == "rows" else apart),
            ("gradients of weights", weights, added),
            ("row gradients", vectors, to_all if by == "rows" else apart),
        ):
            size = n_bytes * factor * n_tokens
            found.append(_item(what, how, ("table",), size, chip, sizes))
    copies = [axis for axis in ("data", "fsdp") if sizes[axis] > 1]
    size = row_gradient_bytes(experiment, tables, sizes)
    found.append(
        _item("row gradients of copies", "all-gather", copies, size, chip, sizes)
    )
    return found


def _by(table: Table, experiment: Experiment) -> str:
    """How a table is divided; weighted sums have no hash columns."""
    by = experiment.mesh.table_by
    return "rows" if by == "hash_columns" and table.weighed else by


def row_gradient_bytes(
    experiment: Experiment, tables: Sequence[Table], sizes: Mapping[str, int]
) -> int:
    """Gradients of reads that a device holds when it updates its part of the tables.

    Every copy of a part is updated from the reads of the whole batch. Divided by rows,
    a part gets the gradient of every read; by columns, its share of each.
    """
    n_tokens = experiment.data.batch_size * experiment.data.context
    return sum(
        _vector_bytes(table)
        * n_tokens
        // (1 if _by(table, experiment) == "rows" else sizes["table"])
        for table in tables
        if table.by_rows
    )


def _vector_bytes(table: Table) -> int:
    """What a token gets of a table: rows in its dtype, or float32 sums."""
    return table.vectors * table.width * (_WIDE if table.weighed else table.itemsize)


def _tokens(experiment: Experiment, sizes: Mapping[str, int]) -> int:
    """Tokens of a device in a step."""
    data = experiment.data
    return data.batch_size * data.context // batch_shards(sizes)


def memory_traffic(
    experiment: Experiment,
    state: PlannedState,
    kept: Activations,
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Bytes that a step reads and writes in a chip's own memory, by what they are.

    Weights are read once a pass (forward, backward for inputs and for weights, and once
    more with `model.remat`); gradients, parameters and their optimizer's state are read
    and written once; activations are written and read once; a row is read, and written
    as a vector. A table by rows is updated in the rows that were read, or that its
    optimizer moves in every step, and a dense one in all; gradients of reads are
    written and read once.
    """
    data, n_micro = experiment.data, experiment.train.accumulate_steps
    n_tokens = _tokens(experiment, sizes)
    tables = state.of_tables
    all_tokens = data.batch_size * data.context
    passes = 4 if experiment.model.remat else 3
    updated = 0.0
    for table in tables:
        if table.by_rows:
            read = rows_read(table.rows, all_tokens * table.reads)
            row = table.row_bytes + table.row_state_bytes
            updated += 2 * row * max(read, table.moving) / sizes["table"]
    dense_tables = state.tables if any(t.mode == "dense" for t in tables) else 0
    return {
        "weights": passes * n_micro * state.gathered,
        "dense_update": 2
        * (state.dense + state.dense_optimizer + state.gradients + dense_tables),
        "activations": 2 * kept.kept * n_micro,
        "rows_read": n_tokens
        * sum(t.reads * t.row_bytes + _vector_bytes(t) for t in tables),
        "row_gradients": 2 * row_gradient_bytes(experiment, tables, sizes),
        "table_update": int(updated),
    }
