"""The tables on the host of an experiment: made, read, and loaded from checkpoints.

What: `open_host_tables` for training, `HostReader` for batches that only read, and
    `with_tables`, the tables on the device.
Why: training, evaluation and sampling must read the same rows.
When not: what the device holds while training; see `host_plan`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from memjax.build.host_plan import GIVEN, OPTIMIZERS, SLOTS, HostPlan
from memjax.build.parts import Parts
from memjax.errors import ConfigError
from memjax.layers.table import TABLE_KEYS
from memjax.ops.init_rows import init_rows
from memjax.ops.rows import carrier_of, store
from memjax.optim.labels import path_name
from memjax.optim.table_optimizer import TableOptimizer
from memjax.parallel.mesh import global_batch, replicated
from memjax.train.host_store import HostLeaf, HostStore, open_saved
from memjax.train.host_tables import HostTable, find_rows, table_folder

PARAMS, TABLE_STATE = "params", "table_state"
# Shapes are asked for at sizes above any buffer, so that only rows make them differ.
_MANY = 2**30


def open_host_tables(parts: Parts, run_dir: Path) -> list[HostTable]:
    """The tables on the host of a run, where `train.host_tables` says; not filled yet.

    Raises:
        ConfigError: several processes.
        TrainingError: a file cannot be made.
    """
    plans, where = parts.host_plans, parts.experiment.train.host_tables
    if not plans:
        return []
    if jax.process_count() > 1:
        raise ConfigError(
            "memories.table_mode", "host", "'rows' or 'dense' for several processes"
        )
    folder = None
    if where != "memory":
        folder = run_dir if where == "run" else Path(where).expanduser()
    keys = _keys(parts)
    return [
        _host_table(parts, path, plan, keys[path], folder)
        for path, plan in plans.items()
    ]


def _keys(parts: Parts) -> dict[str, Callable[[], np.ndarray]]:
    """{path: data of the key that a table is drawn from}, found when asked for."""

    def find() -> dict[str, np.ndarray]:
        key = jax.random.fold_in(jax.random.key(parts.experiment.seed), 0)
        tokens_11 = jnp.zeros((1, 1), jnp.int32)
        found = jax.jit(lambda key: parts.model.init(key, tokens_11)[TABLE_KEYS])(key)
        leaves = jax.tree_util.tree_leaves_with_path(found)
        return {path_name(path): np.asarray(leaf) for path, leaf in leaves}

    known: dict[str, np.ndarray] = {}

    def of(path: str) -> np.ndarray:
        if not known:
            known.update(find())
        return known[path]

    return {path: partial(of, path) for path in parts.host_plans}


def _host_table(
    parts: Parts,
    path: str,
    plan: HostPlan,
    key: Callable[[], np.ndarray],
    folder: Path | None,
) -> HostTable:
    dtype = jnp.dtype(parts.experiment.model.precision.tables)
    optimizer = _optimizer(parts, path)
    prefix = f"{TABLE_STATE}/{OPTIMIZERS}/{path}/"
    name = f"{PARAMS}/{path}"
    leaves = {name: HostLeaf((plan.spec.width,), carrier_of(dtype), None)}
    if optimizer is not None:
        leaves |= _row_leaves(optimizer, plan.spec.width, dtype, prefix)
    kept = HostStore(plan.spec.n_rows, leaves, folder)

    def fill() -> None:
        if plan.spec.std == 0:
            return
        rows = init_rows(plan.spec.initializer(), key(), plan.spec.width, dtype)
        kept.fill(name, lambda first, n: store(rows(first, n)))

    table = HostTable(
        path=path,
        fields=plan.fields,
        store=kept,
        n_slots=plan.n_slots,
        n_reads=plan.n_reads,
        slots=f"{TABLE_STATE}/{SLOTS}/{path}",
        fill=fill,
    )
    if optimizer is None or optimizer.streamed is None:
        return table
    return table._replace(
        place=f"{prefix}place_R",
        due=f"{prefix}held/due",
        dense_step=_DenseStep(optimizer, name, prefix, (plan.n_slots, plan.spec.width)),
    )


def _optimizer(parts: Parts, path: str) -> TableOptimizer | None:
    """The optimizer of a table; None where it is not trained."""
    assert parts.tables is not None
    return parts.table_optimizers.of(parts.split(parts.abstract)[1]).get(path)


def _named(state: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {path_name(path): leaf for path, leaf in leaves}


def _row_leaves(
    optimizer: TableOptimizer, width: int, dtype: Any, prefix: str
) -> dict[str, HostLeaf]:
    """The arrays of a state that have an entry for every row."""

    def shapes(n_rows: int) -> dict[str, Any]:
        table = jax.ShapeDtypeStruct((n_rows, width), carrier_of(dtype))
        return _named(jax.eval_shape(optimizer.init, table))

    few, many = shapes(_MANY), shapes(_MANY + 1)
    one = _named(jax.jit(optimizer.init)(jnp.zeros((1, width), carrier_of(dtype))))
    found = {}
    for name, leaf in few.items():
        if leaf.shape == many[name].shape:
            continue
        values = np.unique(np.asarray(one[name]))
        if len(values) != 1:
            raise ConfigError(
                f"state {name} of the optimizer", values.tolist(), "one number a row"
            )
        found[prefix + name] = HostLeaf(leaf.shape[1:], leaf.dtype, values[0].item())
    return found


class _DenseStep(NamedTuple):
    """`optimizer.streamed` for the names of one table; see `host_tables.DenseStep`."""

    optimizer: TableOptimizer
    table: str
    prefix: str
    shape: tuple[int, int]

    def __call__(
        self, kept: HostStore, leaves: Mapping[str, Any], row_S: np.ndarray
    ) -> tuple[dict[str, Any], np.ndarray, float]:
        assert self.optimizer.streamed is not None
        table = jax.ShapeDtypeStruct(self.shape, kept[self.table].dtype)
        state = jax.eval_shape(self.optimizer.init, table)
        names = [self.prefix + name for name in _named(state)]
        # Copies: what does not change goes back to the device as it is.
        values = [np.array(leaves[name]) for name in names]
        done = self.optimizer.streamed(
            jax.tree.unflatten(jax.tree.structure(state), values),
            row_S,
            kept[self.table],
            kept[f"{self.prefix}momentum_RW"],
            kept[f"{self.prefix}place_R"],
            kept.blocks(),
        )
        new = {self.prefix + name: leaf for name, leaf in _named(done.state).items()}
        return new | {self.table: done.table_SW}, done.row_S, done.square


class HostReader(NamedTuple):
    """Places batches that read tables on the host, with the rows they read.

    Called with a batch of the pipeline; `Parts.logits` takes what it returns.

    Attributes:
        mesh: the mesh.
        fields: {path of a table: fields of a batch that hold its rows}.
        tables: {path: values of all rows, as stored}, numpy or mapped.
    """

    mesh: Any
    fields: Mapping[str, tuple[str, ...]]
    tables: Mapping[str, np.ndarray]

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        batch, distinct = find_rows(batch, list(self.fields.values()))
        placed = global_batch(self.mesh, batch)
        for (path, fields), rows in zip(self.fields.items(), distinct, strict=True):
            table_RW = self.tables[path]
            n_reads = sum(np.size(batch[field]) for field in fields)
            size = min(n_reads, len(table_RW))
            values = np.zeros((size, table_RW.shape[1]), table_RW.dtype)
            values[: len(rows)] = table_RW[rows]
            placed[GIVEN + path] = jax.device_put(values, replicated(self.mesh))
        return placed


def live_reader(parts: Parts, tables: Sequence[HostTable]) -> HostReader:
    """A reader of the tables of a run that is training; refresh them before."""
    return HostReader(
        parts.mesh,
        {table.path: table.fields for table in tables},
        {table.path: table.store[f"{PARAMS}/{table.path}"] for table in tables},
    )


def saved_reader(parts: Parts, folder: Path) -> HostReader:
    """A reader of the tables in a checkpoint, from its files."""
    return HostReader(
        parts.mesh,
        {path: plan.fields for path, plan in parts.host_plans.items()},
        {
            path: open_saved(table_folder(folder, path), f"{PARAMS}/{path}")
            for path in parts.host_plans
        },
    )


def with_tables(params: Any, reader: HostReader) -> Any:
    """Parameters of `on_device` from those with slots, with the tables read whole.

    Raises:
        ConfigError: a device has less memory left than they take.
    """
    needed = sum(table.nbytes for table in reader.tables.values())
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", needed) - stats.get("bytes_in_use", 0)
    if needed > free:
        raise ConfigError(
            "memories.table_mode",
            f"'host' with {needed} bytes of tables",
            f"at most {free} bytes, the memory left on a device, for what reads them "
            "there; `memjax eval` reads them from the host",
        )
    flat: dict[str, Any] = dict(flatten_dict(params, sep="/"))
    for path, table_RW in reader.tables.items():
        flat[path] = jax.device_put(np.asarray(table_RW), replicated(reader.mesh))
    return unflatten_dict(flat, sep="/")


def on_device(parts: Parts) -> Parts:
    """The same experiment with its tables on the host on the device, in mode "rows"."""
    memories = tuple(
        replace(memory, table_mode="rows") if memory.table_mode == "host" else memory
        for memory in parts.experiment.model.memories
    )
    model = replace(parts.experiment.model, memories=memories)
    return Parts(replace(parts.experiment, model=model), parts.mesh)
