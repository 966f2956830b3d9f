"""The protocol of optimizers that take the gradient of a table by rows.

What: `TableOptimizer`, two functions; and `rowwise`, which makes one of an optax
    transform that works entry by entry.
Why: an optax update has the shape of the parameter; here only rows that were read
    exist, and the table is written in place.
When not: dense weights and dense tables; optax trains those.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from memjax.errors import ConfigError
from memjax.ops.row_gradient import UniqueRows
from memjax.ops.rows import get_rows, load, set_rows
from memjax.ops.split import WHOLE, Split
from memjax.optim.row_write import RowWriter, WriteState

Metrics = dict[str, jax.Array]


class Init(Protocol):
    """Makes the state of a table, or of the part of it at hand."""

    def __call__(self, table_RW: jax.Array, split: Split = WHOLE) -> Any: ...


class Apply(Protocol):
    """One step: (rows, state, table) -> (table, state, metrics)."""

    def __call__(
        self,
        rows: UniqueRows,
        state: Any,
        table_RW: jax.Array,
        split: Split = WHOLE,
    ) -> tuple[jax.Array, Any, Metrics]: ...


class TableOptimizer(NamedTuple):
    """How one table is trained from the gradient of the rows that were read.

    Arrays of the state are either scalars, the same on every device that holds a part
    of the table, or divided like the table: along their first axis when rows are
    divided, matrices along their second when columns are.

    Attributes:
        init: table -> state.
        apply: (rows, state, table, split) -> (table, state, metrics). Inside jit with
            table and state donated, rows that are not concerned cost nothing. Metrics
            are scalars over the whole table, "update_norm" among them.
        mean: (table, state) -> the running mean of the table, or the table.
    """

    init: Init
    apply: Apply
    mean: Callable[[jax.Array, Any], jax.Array]


class RowwiseState(NamedTuple):
    """State of `rowwise`.

    Attributes:
        inner: state of the optax transform over the whole table.
        writes: state of the writer.
    """

    inner: Any
    writes: WriteState


def rowwise(
    inner: optax.GradientTransformation,
    *,
    writer: RowWriter | None = None,
    block_rows: int = 512,
) -> TableOptimizer:
    """An entry-by-entry optax transform, applied to the rows that were read alone.

    Lazy: the state of a row that was not read stands still. For SGD and Adagrad that is
    what the dense transform does, since their state and update are 0 for a gradient of
    0. Adam differs from its dense form: moments of unread rows do not decay and such
    rows do not move (a row with gradients 1, 0, 0 at rate 0.1 moves by -0.1, 0, 0;
    dense Adam moves it by -0.100, -0.067, -0.052), and its bias correction counts all
    steps. Decoupled weight decay reaches only the rows of the step.

    Args:
        inner: a transform whose update of an entry depends on that entry's gradient,
            parameter and state, and on scalars that do not depend on gradients: SGD,
            momentum, Adagrad, Adam and schedules do; norms over the tree do not.
        writer: how rows are written; plain by default.
        block_rows: rows updated at a time.

    Returns:
        A TableOptimizer. Gradients and the state of the transform are float32 (or wider
        for wider tables), whatever the dtype of the table.

    Raises:
        ConfigError: a trial shows that one row's update depends on another row.

    Cost: reads and writes of the table's and the state's rows that were read.
    """
    writer = RowWriter() if writer is None else writer
    _check_rowwise(inner)

    def init(table_RW: jax.Array, split: Split = WHOLE) -> RowwiseState:
        del split
        values_RW = load(table_RW)
        wide = jnp.promote_types(values_RW.dtype, jnp.float32)
        return RowwiseState(inner.init(values_RW.astype(wide)), writer.init(table_RW))

    def apply(
        rows: UniqueRows,
        state: RowwiseState,
        table_RW: jax.Array,
        split: Split = WHOLE,
    ) -> tuple[jax.Array, RowwiseState, Metrics]:
        writes = writer.begin(state.writes)
        n_rows, width = table_RW.shape
        size = max(min(block_rows, len(rows.ids_U)), 1)
        padding = -len(rows.ids_U) % size
        ids_U = jnp.pad(rows.ids_U, (0, padding), constant_values=n_rows)
        sums_UW = jnp.pad(rows.sums_UW, ((0, padding), (0, 0)))

        per_row = _per_row(inner, state.inner)
        leaves, tree = jax.tree.flatten(state.inner)

        def update(
            ids_B: jax.Array, sums_BW: jax.Array, old_BW: jax.Array, leaves: list[Any]
        ) -> tuple[jax.Array, list[Any]]:
            # Scalars (counts) move once a step, not once a block: every block starts
            # from the old ones.
            rows_of = [
                get_rows(leaf, ids_B) if is_row else leaf
                for leaf, is_row in zip(leaves, per_row, strict=True)
            ]
            update_BW, new = inner.update(sums_BW, tree.unflatten(rows_of), old_BW)
            return update_BW, jax.tree.leaves(new)

        def block(i: jax.Array, carry: Any) -> Any:
            table_RW, leaves, writes, square = carry
            ids_B = lax.dynamic_slice_in_dim(ids_U, i * size, size)
            sums_BW = lax.dynamic_slice_in_dim(sums_UW, i * size, size)
            old_BW = get_rows(table_RW, ids_B)
            old_BW = old_BW.astype(sums_BW.dtype)
            update_BW, new = update(ids_B, sums_BW, old_BW, leaves)
            update_BW = jnp.where((ids_B < n_rows)[:, None], update_BW, 0)
            leaves = [
                set_rows(leaf, ids_B, new_leaf) if is_row else leaf
                for leaf, new_leaf, is_row in zip(leaves, new, per_row, strict=True)
            ]
            table_RW, writes = writer.add(
                table_RW, writes, ids_B, update_BW, split=split
            )
            return table_RW, leaves, writes, square + jnp.sum(update_BW**2)

        # An update without rows tells what the scalars become.
        empty_0W = jnp.zeros((0, width), sums_UW.dtype)
        _, last = update(jnp.zeros((0,), jnp.int32), empty_0W, empty_0W, leaves)
        n_blocks = (rows.count + size - 1) // size
        table_RW, leaves, writes, square = lax.fori_loop(
            0,
            n_blocks,
            block,
            (table_RW, leaves, writes, jnp.zeros((), sums_UW.dtype)),
        )
        leaves = [
            leaf if is_row else new
            for leaf, new, is_row in zip(leaves, last, per_row, strict=True)
        ]
        square = split.sum_over_columns(split.sum_over_rows(square))
        metrics = {"update_norm": jnp.sqrt(square)}
        return table_RW, RowwiseState(tree.unflatten(leaves), writes), metrics

    def mean(table_RW: jax.Array, state: RowwiseState) -> jax.Array:
        return writer.mean(table_RW, state.writes)

    return TableOptimizer(init, apply, mean)


def _per_row(inner: optax.GradientTransformation, state: Any) -> list[bool]:
    """For every leaf of the state: whether it has the shape of the table."""
    marks = optax.tree_utils.tree_map_params(
        inner, lambda _: True, state, transform_non_params=lambda _: False
    )
    return jax.tree.leaves(marks)


def _check_rowwise(inner: optax.GradientTransformation) -> None:
    """ConfigError when two rows together are updated otherwise than one by one."""
    grads = np.array([[1.0, -2.0], [30.0, 0.5]], np.float32)
    params = np.array([[0.5, 1.0], [-3.0, 2.0]], np.float32)

    @jax.jit
    def two_steps(grads: Any, params: Any) -> Any:
        state = inner.init(params)
        _, state = inner.update(grads, state, params)
        return inner.update(grads, state, params)[0]

    together = np.asarray(two_steps(grads, params))
    alone = [np.asarray(two_steps(grads[i], params[i])) for i in (0, 1)]
    if not np.allclose(together, np.stack(alone), rtol=1e-5, atol=1e-7):
        raise ConfigError(
            "rowwise.inner",
            inner,
            "a transform whose update of an entry depends on that entry alone; this "
            "one updates two rows together otherwise than each by itself",
        )
