"""Where the arrays of an experiment lie on a mesh.

What: shardings of parameters and states, constraints on activations, divided tables.
Why: the experiment's mesh settings meet the model's parameters in one place.
When not: how one array is divided; see `parallel.logical_axes` and `row_sharding`.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memjax.experiment import Experiment
from memjax.models.hash_columns import hash_columns
from memjax.models.parameter_axes import parameter_axes
from memjax.optim.labels import path_name
from memjax.optim.tables import TablesOptimizer
from memjax.parallel.logical_axes import (
    ActivationSharding,
    LogicalRules,
    shardings_like,
)
from memjax.parallel.mesh import replicated
from memjax.parallel.row_sharding import RowSharding
from memjax.train.state import Placement


def activation_sharding(
    experiment: Experiment, mesh: Mesh | None
) -> ActivationSharding | None:
    """How activations are divided; None where only the batch is, over "data"."""
    if mesh is None or mesh.size == mesh.shape["data"]:
        return None
    return ActivationSharding(mesh, _rules(experiment, mesh))


def placement(
    experiment: Experiment, mesh: Mesh | None, dense: Any
) -> Placement | None:
    """State -> shardings, for parameters of these shapes; None: all are replicated."""
    if mesh is None or mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return None
    rules, known = _rules(experiment, mesh), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(dense):
        name = path_name(path)
        spec = rules.spec(name, parameter_axes(name, leaf.shape), leaf.shape)
        known[name] = (leaf.shape, spec)
    return lambda tree: shardings_like(tree, mesh, known)


def table_sharding(experiment: Experiment, mesh: Mesh | None) -> RowSharding | None:
    """How tables in mode "rows" lie on several devices, divided or in copies; None on
    one device."""
    if mesh is None or mesh.size == 1:
        return None
    modes = {memory.table_mode for memory in experiment.model.memories}
    if "rows" not in modes:
        return None
    if mesh.shape["table"] == 1:
        # Copies; yet every device reads for its part of the batch alone.
        return None if "host" in modes else RowSharding(mesh)
    by = experiment.mesh.table_by
    columns = hash_columns(experiment.model) if by == "hash_columns" else ()
    return RowSharding(mesh, by, of_tables=columns)


def table_layout(rows: dict[str, int], sharding: RowSharding | None) -> dict[str, Any]:
    """What a checkpoint says of tables by rows; `parallel.division.divisions_of`."""
    if sharding is None:
        return {"rows": rows, "parts": 1, "by": "rows"}
    layout = {"rows": rows, "parts": sharding.n_parts, "by": sharding.by}
    if sharding.of_tables:
        layout["columns"] = {path: list(x) for path, x in sharding.of_tables}
    return layout


def table_shardings(
    mesh: Mesh, sharding: RowSharding | None, optimizer: TablesOptimizer
) -> Any:
    """(tables, state) -> shardings of both."""

    def placed(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    def shardings(tables: Any, state: Any) -> tuple[Any, Any]:
        if sharding is None:
            whole = replicated(mesh)
            return jax.tree.map(lambda _: whole, (tables, state))
        divided = placed(sharding.spec)
        specs = optimizer.state_specs(tables)
        return (
            jax.tree.map(lambda _: divided, tables),
            jax.tree.map(placed, specs, is_leaf=_is_spec),
        )

    return shardings


def _rules(experiment: Experiment, mesh: Mesh) -> LogicalRules:
    return LogicalRules(tuple(mesh.shape.items()), experiment.mesh.rules)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)
