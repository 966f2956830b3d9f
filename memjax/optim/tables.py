"""The optimizer of all tables of a model: groups, clipping, and the mesh.

What: `table_optimizer` joins one `TableOptimizer` per group of tables into a
    `TablesOptimizer`; `apply_updates` applies both kinds of updates of a step.
Why: rows are summed once per table, their norm is known before they are clipped, and
    all of it stays inside the parts of divided tables.
When not: dense weights; optax has `partition` for those.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from memjax.errors import ConfigError, ShapeError
from memjax.ops.order import wait_for
from memjax.ops.row_gradient import RowGradient, UniqueRows, unique_rows
from memjax.ops.split import WHOLE, Split
from memjax.optim.clip import clip_factor
from memjax.optim.labels import path_name
from memjax.optim.repartition import Repartition
from memjax.optim.table_optimizer import Metrics, TableOptimizer
from memjax.parallel.division import Division
from memjax.parallel.logical_axes import BATCH_AXES
from memjax.parallel.row_sharding import RowSharding

Gradients = Mapping[str, RowGradient | Sequence[RowGradient]]


@dataclass(frozen=True)
class TableGroup:
    """Tables that share an optimizer and a clipping norm.

    Attributes:
        pattern: regular expression, searched in the path of a table, such as
            "block_1/memory/table".
        optimizer: trains each table of the group; None leaves them as they are.
        clip_norm: largest Euclidean norm of the gradients of the group, all its tables
            together; None leaves them. With 0 the gradients are 0. Gradients that are
            not finite become NaN, so that training stops.
    """

    pattern: str
    optimizer: TableOptimizer | None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(
                "pattern", self.pattern, f"a regular expression ({error})"
            ) from None
        if self.optimizer is not None and not isinstance(
            self.optimizer, TableOptimizer
        ):
            raise ConfigError(
                "optimizer",
                type(self.optimizer).__name__,
                "None or a TableOptimizer; wrap an optax transform that works entry by "
                "entry in memjax.rowwise(...)",
            )
        if self.clip_norm is not None and not self.clip_norm >= 0:
            raise ConfigError("clip_norm", self.clip_norm, "None or a number from 0 up")


class TablesOptimizer(NamedTuple):
    """How the tables of a model are trained.

    Attributes:
        init: tables -> {path: state}.
        apply: (gradients, state, tables, scale, slots) -> (tables, state, metrics).
            Gradients are {path: row gradients}, multiplied by `scale` (a number or
            scalar) before anything else. Of a table in `slots`, {path: int32 [U]}, only
            some rows are at hand: ids count its slots, ascending by row, and slots[i]
            is the row at hand of id i; for `sinkhorn_rows`, n_rows says how many rows
            the table has. Metrics are scalars named "NAME/PATH": "grad_norm" before
            clipping, "update_norm", and those of the optimizers. With tables and state
            donated to jit, tables are written in place if the scale was made to
            `ops.order.wait_for` whatever else a backward pass reads them for.
        mean: (tables, state) -> running means where they are kept, else the tables.
        state_specs: (tables) -> a tree of PartitionSpec like the state; None when the
            tables are not divided.
        repartition: (tables, state, old) -> (tables, state) in the parts of this
            optimizer, on its devices, from the parts of `old`, a `Division` or one for
            each path, and the
            same groups. It takes numpy or jax arrays by way of the host, where they
            must fit. Rows, their states and means are kept bit by bit and padding is
            made anew; after `sinkhorn_rows` in other parts the next step is a dense
            one, and counted. ShapeError when a table has not the shape of old parts.
        of: tables -> {path: its optimizer}, of those that are trained.
    """

    init: Callable[[Any], dict[str, Any]]
    apply: Callable[..., tuple[Any, dict[str, Any], Metrics]]
    mean: Callable[[Any, dict[str, Any]], Any]
    state_specs: Callable[[Any], Any]
    repartition: Callable[[Any, dict[str, Any], Any], tuple[Any, dict[str, Any]]]
    of: Callable[[Any], dict[str, TableOptimizer]]


def table_optimizer(
    groups: TableOptimizer | Sequence[TableGroup],
    *,
    sharding: RowSharding | None = None,
    n_rows: Mapping[str, int] | None = None,
    kernels: Mapping[str, str] | None = None,
) -> TablesOptimizer:
    """An optimizer of a tree of tables.

    Args:
        groups: one optimizer for all tables, or groups; the first group whose pattern
            is found in a table's path takes it.
        sharding: how the tables are divided; None: not divided.
        n_rows: {path: rows without padding} of tables that are divided, here or in
            the checkpoint that `repartition` takes them from.
        kernels: {path: program that sums gradients by row}, names of `ops.bag_kernels`;
            "auto" for others.

    Returns:
        A TablesOptimizer; its functions raise ConfigError when a table belongs to no
        group, a group has no table, a gradient has no table, or n_rows lacks a table.
    """
    if isinstance(groups, TableOptimizer | optax.GradientTransformation):
        groups = (TableGroup("", groups),)  # pyright: ignore[reportArgumentType]
    chosen = tuple(groups)
    kernel_of = dict(kernels or {})

    def group_of(paths: Sequence[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in paths:
            hits = [i for i, g in enumerate(chosen) if re.search(g.pattern, path)]
            if not hits:
                patterns = [group.pattern for group in chosen]
                raise ConfigError(
                    f"group of table {path}", None, f"a match of one of {patterns}"
                )
            found[path] = hits[0]
        for i, group in enumerate(chosen):
            if paths and i not in found.values():
                raise ConfigError(
                    "pattern", group.pattern, f"one that takes some of {list(paths)}"
                )
        return found

    def rows_of(path: str) -> int:
        if n_rows is None or path not in n_rows:
            raise ConfigError("n_rows", n_rows, f"the rows of table {path}")
        return n_rows[path]

    def split_of(path: str, slots: Mapping[str, jax.Array]) -> Split:
        if path in slots:
            return Split(rows_of(path))
        return WHOLE if sharding is None else sharding.of(path).split(rows_of(path))

    def trained(named: Mapping[str, Any]) -> dict[str, TableOptimizer]:
        found = {}
        for path, i in group_of(list(named)).items():
            optimizer = chosen[i].optimizer
            if optimizer is not None:
                found[path] = optimizer
        return found

    def state_specs(tables: Any) -> Any:
        if sharding is None:
            return None
        named = flat_tables(tables)
        shapes = {
            path: jax.eval_shape(optimizer.init, named[path])
            for path, optimizer in trained(named).items()
        }
        return {path: sharding.of(path).state_specs(x) for path, x in shapes.items()}

    def init(tables: Any) -> dict[str, Any]:
        named = flat_tables(tables)

        def local(named: dict[str, jax.Array]) -> dict[str, Any]:
            return {
                path: optimizer.init(named[path], split_of(path, {}))
                for path, optimizer in trained(named).items()
            }

        if sharding is None:
            return local(named)
        specs = {path: sharding.of(path).spec for path in named}
        return _divided(sharding, local, (specs,), state_specs(tables))(named)

    def update(
        named: dict[str, jax.Array],
        state: dict[str, Any],
        gradients: Gradients,
        scale: jax.Array,
        slots: Mapping[str, jax.Array],
    ) -> tuple[dict[str, jax.Array], dict[str, Any], Metrics]:
        """The step on whole tables, or on the parts at hand."""
        optimizers = trained(named)
        splits = {path: split_of(path, slots) for path in optimizers}
        rows = {
            path: _summed(path, gradients, scale, named, slots, split, kernel_of)
            for path, split in splits.items()
        }
        squares = {path: _square(rows[path], splits[path]) for path in optimizers}
        group = group_of(list(named))
        for i, limit in enumerate(chosen):
            members = [path for path in optimizers if group[path] == i]
            if limit.clip_norm is not None and members:
                norm = jnp.sqrt(sum(squares[path] for path in members))
                factor = clip_factor(norm, limit.clip_norm)
                rows |= {path: _scaled(rows[path], factor) for path in members}
        # Every read of a table comes before its first write, so nothing is copied.
        named, rows = lax.optimization_barrier((named, rows))
        new, new_state, metrics = dict(named), {}, {}
        for path, optimizer in optimizers.items():
            new[path], new_state[path], found = optimizer.apply(
                rows[path], state[path], named[path], splits[path]
            )
            metrics[f"grad_norm/{path}"] = jnp.sqrt(squares[path])
            metrics |= {f"{name}/{path}": value for name, value in found.items()}
        return new, new_state, metrics

    def apply(
        gradients: Gradients,
        state: dict[str, Any],
        tables: Any,
        scale: Any = 1.0,
        slots: Mapping[str, jax.Array] | None = None,
    ) -> tuple[Any, dict[str, Any], Metrics]:
        if not isinstance(gradients, Mapping):
            raise ConfigError(
                "gradients",
                type(gradients).__name__,
                "Grads.tables: {path of a table: row gradients}",
            )
        named = flat_tables(tables)
        unknown = sorted(set(gradients) - set(named))
        if unknown:
            raise ConfigError("gradients", unknown, f"tables of {sorted(named)}")
        scale = jnp.asarray(scale, jnp.float32)
        gradients = {
            path: (gradient,) if isinstance(gradient, RowGradient) else tuple(gradient)
            for path, gradient in gradients.items()
        }
        function = update
        if sharding is not None:
            ways = {path: sharding.of(path) for path in named}
            gradients = {
                path: tuple(ways[path].gradient(found) for found in gradients[path])
                for path in gradients
            }

            def of_parts(named: Any, state: Any, gradients: Any, *rest: Any) -> Any:
                gradients = {
                    path: tuple(ways[path].at_hand(found) for found in gradients[path])
                    for path in gradients
                }
                return update(named, state, gradients, *rest)

            specs = {path: way.spec for path, way in ways.items()}
            states = state_specs(tables)
            whole = PartitionSpec()
            function = _divided(
                sharding,
                of_parts,
                (specs, states, PartitionSpec(BATCH_AXES), whole, whole),
                (specs, states, whole),
            )
        named, state, metrics = function(named, state, gradients, scale, slots or {})
        return unflat_tables(tables, named), state, metrics

    def mean(tables: Any, state: dict[str, Any]) -> Any:
        named = flat_tables(tables)
        means = {
            path: optimizer.mean(named[path], state[path])
            for path, optimizer in trained(named).items()
        }
        return unflat_tables(tables, named | means)

    def repartition(
        tables: Any, state: dict[str, Any], old: Division | Mapping[str, Division]
    ) -> tuple[Any, dict[str, Any]]:
        named = flat_tables(tables)
        before = dict.fromkeys(named, old) if isinstance(old, Division) else old
        changes, shapes = {}, {}
        for path, table in named.items():
            was = before[path]
            new = Division() if sharding is None else sharding.of(path).division
            whole = was.row_parts == new.row_parts == 1
            n_rows = table.shape[0] if whole else rows_of(path)
            if table.shape != (want := was.shape(n_rows, table.shape[1])):
                raise ShapeError(f"table {path}", table.shape, want)
            shape = new.shape(n_rows, table.shape[1])
            shapes[path] = jax.ShapeDtypeStruct(shape, table.dtype)
            changes[path] = Repartition(n_rows, was, new, None)
        states = jax.eval_shape(init, unflat_tables(tables, shapes))
        optimizers, moved = trained(named), {}
        for path, table in named.items():
            place = jnp.asarray
            if sharding is not None:
                place = sharding.of(path).place_state
            change = replace(changes[path], shapes=states.get(path))
            named[path] = place(change.rows(table))
            if path in optimizers:
                found = optimizers[path].repartition(state[path], change)
                moved[path] = jax.tree.map(place, found)
        return unflat_tables(tables, named), moved

    def of(tables: Any) -> dict[str, TableOptimizer]:
        return trained(flat_tables(tables))

    return TablesOptimizer(init, apply, mean, state_specs, repartition, of)


def apply_updates(
    params: Any,
    updates: Any,
    tables: Any,
    gradients: Gradients,
    state: dict[str, Any],
    optimizer: TablesOptimizer,
    *,
    scale: Any = 1.0,
) -> tuple[Any, Any, dict[str, Any], Metrics]:
    """Apply an optax update to the dense weights and row gradients to the tables.

    Args:
        params, updates: trees of dense weights, as for `optax.apply_updates`.
        tables: the tree of tables, donated by the caller's jit.
        gradients: {path: row gradients}, `Grads.tables`.
        state: the state of the tables' optimizer.
        optimizer: from `table_optimizer`.
        scale: factor of the row gradients, such as 1 / the number of targets.

    Returns:
        (params, tables, state, metrics).
    """
    # The backward pass reads tables for the updates too; it must end before the writes.
    scale = wait_for(jnp.asarray(scale, jnp.float32), updates)
    tables, state, metrics = optimizer.apply(gradients, state, tables, scale)
    return optax.apply_updates(params, updates), tables, state, metrics


def flat_tables(tables: Any) -> dict[str, jax.Array]:
    """{path: table} of a tree of tables, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tables)
    return {path_name(path): leaf for path, leaf in leaves}


def unflat_tables(tables: Any, named: Mapping[str, jax.Array]) -> Any:
    """The tree of `flat_tables` with other leaves."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: named[path_name(path)], tables
    )


def _divided(
    sharding: RowSharding, function: Any, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    return jax.shard_map(
        function,
        mesh=sharding.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _summed(
    path: str,
    gradients: Mapping[str, Any],
    scale: jax.Array,
    named: Mapping[str, jax.Array],
    slots: Mapping[str, jax.Array],
    split: Split,
    kernels: Mapping[str, str],
) -> UniqueRows:
    """The scaled gradient of a table by row, or by slot where its ids are those."""
    (n_rows, width), slots_U = named[path].shape, slots.get(path)
    kernel = kernels.get(path, "auto")
    found = [g._replace(cotangent=g.cotangent * scale) for g in gradients.get(path, ())]
    if slots_U is None:
        return unique_rows(found, n_rows, width, split=split, kernel=kernel)
    rows = unique_rows(found, len(slots_U), width, kernel=kernel)
    ids_U = slots_U.at[rows.ids_U].get(mode="fill", fill_value=n_rows)
    return rows._replace(ids_U=ids_U)


def _scaled(rows: UniqueRows, factor: jax.Array) -> UniqueRows:
    return rows._replace(sums_UW=rows.sums_UW * factor.astype(rows.sums_UW.dtype))


def _square(rows: UniqueRows, split: Split) -> jax.Array:
    """Squared Euclidean norm of a gradient over all parts of the table."""
    square = jnp.sum(jnp.square(rows.sums_UW))
    return split.sum_over_columns(split.sum_over_rows(square))
