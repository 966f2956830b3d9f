"""A run's state on paper: bytes on each device of a mesh, by kind.

What: `planned_state`, from the abstract state that training itself is built on.
Why: the shapes, dtypes and shardings are the real ones, so the bytes are exact.
When not: what a step needs besides its state; `planner` adds it up.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memjax.build.host_plan import OPTIMIZERS
from memjax.build.parts import Parts
from memjax.experiment import Experiment
from memjax.layers.table import CODES, SCALES
from memjax.models.layouts import table_reads
from memjax.ops.rows import value_dtype
from memjax.optim.active_rows import SinkhornRowsState
from memjax.optim.build import build_optimizer
from memjax.optim.labels import path_name
from memjax.report.table_forms import Table
from memjax.train.state import TrainState, abstract_state


class PlannedState(NamedTuple):
    """Bytes on each device, by kind, and what they are of.

    Attributes:
        dense: parameters that are no value tables; tables: value tables.
        dense_optimizer: state of the optax transform, that of dense tables with it;
            table_optimizer: of the tables by rows.
        average: of the weights; model_state: running statistics, carried weights, step
            and key.
        gradients: of dense parameters and dense tables, in float32 where micro-batches
            are summed.
        gathered: dense parameters, as they are when the parts of fsdp are joined.
        of_tables: the tables, whole.
    """

    dense: int
    tables: int
    dense_optimizer: int
    table_optimizer: int
    average: int
    model_state: int
    gradients: int
    gathered: int
    of_tables: tuple[Table, ...]


def abstract_train_state(experiment: Experiment, mesh: Any) -> TrainState:
    """Shapes, dtypes and shardings of a run's state; `mesh` may be an AbstractMesh."""
    parts = Parts(experiment, mesh)
    transform = build_optimizer(
        experiment.optim, parts.dense_labels, experiment.train.n_steps
    )
    return abstract_state(
        parts.init_params,
        transform,
        mesh,
        ema=parts.ema,
        tables=parts.tables,
        model_state=parts.model_state,
        placement=parts.placement,
    )


def planned_state(experiment: Experiment, mesh: Any) -> PlannedState:
    """What a run of an experiment holds on each device of a mesh. Allocates nothing."""
    state = abstract_train_state(experiment, mesh)
    parts = Parts(experiment, mesh)
    dense, by_rows = parts.split(state.params)
    held: Any = None
    if parts.model_state is not None:
        dense, held = parts.model_state.split(dense)
    wide = experiment.train.accumulate_steps > 1
    reads = table_reads(experiment.model)
    dense_tables = [leaf for path, leaf in _named(dense) if _table(path) in reads]
    return PlannedState(
        dense=device_bytes(dense) - device_bytes(dense_tables),
        tables=device_bytes(by_rows) + device_bytes(dense_tables),
        dense_optimizer=device_bytes(state.opt_state),
        table_optimizer=device_bytes(state.table_state),
        average=device_bytes(state.ema),
        model_state=device_bytes((held, state.step, state.key)),
        gradients=sum(
            _entries(leaf) * (4 if wide else leaf.dtype.itemsize)
            for leaf in jax.tree.leaves(dense)
            if jnp.issubdtype(leaf.dtype, jnp.inexact)
        ),
        gathered=sum(
            device_bytes(leaf) * _parts_over(leaf, "fsdp")
            for path, leaf in _named(dense)
            if _table(path) not in reads
        ),
        of_tables=tuple(_tables(experiment, parts, state)),
    )


def device_bytes(tree: Any) -> int:
    """Bytes on each device of a tree of shapes with shardings."""
    return sum(_entries(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _entries(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _parts_over(leaf: Any, axis: str) -> int:
    """Into how many parts an axis of the mesh divides an array."""
    for entry in leaf.sharding.spec:
        if axis == entry or (isinstance(entry, tuple) and axis in entry):
            return leaf.sharding.mesh.shape[axis]
    return 1


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _table(path: str) -> str:
    """The path of the table that a leaf belongs to, if it is of a table."""
    return path.removesuffix(CODES).removesuffix(SCALES)


def _tables(experiment: Experiment, parts: Parts, state: TrainState) -> list[Table]:
    stored = {
        _table(path): leaf
        for path, leaf in _named(parts.abstract)
        if not path.endswith(SCALES)
    }
    states = state.table_state or {}
    states = states[OPTIMIZERS] if parts.host_plans else states
    found = []
    for path, read in table_reads(experiment.model).items():
        rows = stored[path].shape[0]
        slots = parts.host_plans[path].n_slots if read.mode == "host" else 0
        moving, row_bytes = _row_state(states.get(path), slots or rows, read.width)
        found.append(
            Table(
                path=path,
                rows=rows,
                width=read.width,
                reads=read.rows,
                mode=read.mode,
                itemsize=value_dtype(stored[path]).itemsize,
                row_state_bytes=row_bytes,
                weighed=read.weighed,
                moving=moving,
                slots=slots,
            )
        )
    return found


def _row_state(state: Any, held: int, width: int) -> tuple[int, float]:
    """Rows that an optimizer moves in every step, and bytes of the state of a row.

    Sinkhorn momentum moves those in its buffer, and has float32 for each of them.
    """
    if isinstance(state, SinkhornRowsState):
        return min(held, state.active_AW.shape[0]), 4.0 * width
    leaves = jax.tree.leaves(state)
    n_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return 0, n_bytes / held
