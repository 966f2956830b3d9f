"""Tables in the parts of a checkpoint, and in the parts of a run.

What: which leaves of a state depend on the parts, their shapes as saved, and the state
    moved into the parts that are wanted.
Why: a checkpoint of four devices goes on on three, and nobody takes padding for rows.
When not: equal parts; the arrays are then restored as they are.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from memjax.errors import CheckpointError
from memjax.train.state import TrainState, state_leaves
from memjax.train.tables import TableTraining


def differs(meta: Mapping[str, Any], tables: TableTraining | None) -> bool:
    """Whether a checkpoint holds the same tables in other parts.

    Raises:
        CheckpointError: its tables have other rows, or only one side has such tables.
    """
    saved, wanted = meta.get("tables"), None if tables is None else tables.layout
    if saved == wanted:
        return False
    if saved is None or wanted is None or saved["rows"] != wanted["rows"]:
        raise CheckpointError(
            "the checkpoint is of another configuration: tables by rows saved "
            f"{None if saved is None else saved['rows']}, "
            f"wanted {None if wanted is None else wanted['rows']}"
        )
    return True


def as_saved(
    abstract: TrainState, meta: Mapping[str, Any], tables: TableTraining, sharding: Any
) -> TrainState:
    """The abstract state with tables and their state in the shapes of a checkpoint.

    Args:
        abstract: the state that is wanted.
        meta: of the checkpoint.
        tables: its row counts name the tables.
        sharding: where the arrays of other shapes are put.
    """
    moving = {f"params/{path}" for path in tables.layout["rows"]}
    moving |= set(state_leaves(abstract.table_state, "table_state/"))

    def shape(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name not in moving or name not in meta["leaves"]:
            return leaf
        dtype, dims = parse_kind(meta["leaves"][name])
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(shape, abstract)


def moved(
    state: TrainState, meta: Mapping[str, Any], tables: TableTraining
) -> TrainState:
    """A state as saved, with its tables in the parts of `tables`."""
    dense, values = tables.split(state.params)
    values, table_state = tables.repartition(values, state.table_state, meta["tables"])
    return state._replace(params=tables.merge(dense, values), table_state=table_state)


def parse_kind(kind: str) -> tuple[Any, tuple[int, ...]]:
    """(dtype, shape) of a leaf as the meta item writes it: "float32[3, 4]"."""
    name, dims = kind.rstrip("]").split("[")
    return jnp.dtype(name), tuple(int(n) for n in re.findall(r"\d+", dims))
