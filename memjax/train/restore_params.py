"""The parameters of one checkpoint, for evaluation and sampling.

What: `restore_params`, with running means in their places.
Why: nothing but what is evaluated is read, and nothing in the folder is changed.
When not: going on with training; `Checkpoints` restores the whole state.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from memjax.errors import CheckpointError
from memjax.train import table_layout
from memjax.train.checkpoint import first_line, refill, whole_steps
from memjax.train.checkpoint_meta import check_meta, read_meta
from memjax.train.state import Ema, TrainState, state_leaves
from memjax.train.tables import TableTraining


def restore_params(
    directory: str | os.PathLike[str],
    abstract: TrainState,
    fingerprint: Mapping[str, Any],
    *,
    ema: Ema | None = None,
    tables: TableTraining | None = None,
    step: int | None = None,
) -> tuple[Any, int]:
    """The parameters that a run evaluates with, and their step.

    Args:
        directory: the folder of the step directories; nothing in it is changed.
        abstract: shapes, dtypes and shardings wanted; opt_state is not read.
        fingerprint: as in `Checkpoints.save`.
        ema: the running average of dense weights, when the run keeps one.
        tables: how tables are trained by rows, if any are. With running means, or in
            other parts than those of the checkpoint, the optimizers' states are read
            as well.
        step: which step; the newest whole one by default.

    Raises:
        CheckpointError: no such step, torn, or of another configuration.
    """
    root = Path(os.path.abspath(directory))
    steps = whole_steps(root)
    if not steps:
        raise CheckpointError(f"{root} holds no whole checkpoint: none was saved yet")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise CheckpointError(
            f"step {step} is not among the whole checkpoints of {root}: {steps}"
        )
    path = root / str(step)
    meta = read_meta(path)
    if meta is None:
        raise CheckpointError(f"{path} is torn: its meta file is unreadable")
    whole = abstract.step.sharding
    moves = table_layout.differs(meta, tables)
    saved = abstract
    if moves and tables is not None:
        saved = table_layout.as_saved(abstract, meta, tables, whole)
    averages = state_leaves(saved.ema, "ema/")
    wanted = state_leaves(saved.params, "params/") | averages
    check_meta(path, meta, wanted, fingerprint)
    with_state = tables is not None and (moves or tables.keeps_mean)
    try:
        with ocp.StandardCheckpointer() as reader:
            params = reader.restore(path / "params", saved.params)
            average = reader.restore(path / "ema", averages) if averages else {}
            rest = {}
            if with_state:
                rest = reader.restore(path / "rest", _rest(meta, saved, whole))
    except Exception as error:
        raise CheckpointError(f"{path} is torn: {first_line(error)}") from error
    state = saved._replace(params=params, ema=refill(saved.ema, "ema/", average))
    if tables is not None and with_state:
        state = state._replace(
            table_state=refill(saved.table_state, "table_state/", rest)
        )
        if moves:
            state = table_layout.moved(state, meta, tables)
    params = state.params
    if ema is not None:
        params = ema.merge(state.ema, params)
    if tables is not None and tables.keeps_mean:
        dense, values = tables.split(params)
        params = tables.merge(dense, tables.mean(values, state.table_state))
    return params, step


def _rest(meta: Mapping[str, Any], saved: TrainState, sharding: Any) -> dict[str, Any]:
    """Shapes of the item of that name, from the meta item."""
    known = state_leaves(saved.table_state, "table_state/")
    found = {}
    for name, kind in meta["leaves"].items():
        if name.split("/")[0] in ("step", "key", "opt_state", "table_state"):
            dtype, shape = table_layout.parse_kind(kind)
            struct = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            found[name] = known.get(name, struct)
    return found
