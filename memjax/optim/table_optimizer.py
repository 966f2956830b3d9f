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
from memjax.ops.rounding import stochastic_round
from memjax.ops.row_gradient import UniqueRows
from memjax.ops.rows import check_table, get_rows, load, set_rows, store, value_dtype
from memjax.ops.split import WHOLE, Split
from memjax.optim.repartition import Repartition, repartition_rows
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
            table and state donated, rows that are not concerned cost nothing; give
            both back in the order in which they were taken, since jax pairs donated
            arrays of one shape with results by their order, and copies whole tables
            where that crosses. Metrics are scalars over the whole table,
            "update_norm" among them.
        mean: (table, state) -> the running mean of the table, or the table.
        repartition: (state, change) -> the state for other parts, on the host. The
            default is for states whose arrays are scalars or have the table's rows.
        streamed: the step over all rows of a table that is not on the device, for an
            optimizer that asks for it (`sinkhorn_streamed.streamed_step` without its
            first two arguments); None: it never asks.
    """

    init: Init
    apply: Apply
    mean: Callable[[jax.Array, Any], jax.Array]
    repartition: Callable[[Any, Repartition], Any] = repartition_rows
    streamed: Callable[..., Any] | None = None


class RowwiseState(NamedTuple):
    """State of `rowwise`.

    Attributes:
        inner: state of the optax transform over the whole table; leaves like the table
            are stored as tables are (bfloat16 as uint16).
        writes: state of the writer.
    """

    inner: Any
    writes: WriteState


def rowwise(
    inner: optax.GradientTransformation,
    *,
    writer: RowWriter | None = None,
    state_dtype: Any = None,
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
        state_dtype: "bfloat16" stores the leaves of the state that are like the table
            (moments) in half the memory. They are widened to float32 for the update and
            always rounded back stochastically, as the writer's seed says: to nearest, a
            second moment with decay 0.999 would never change. None keeps their dtype.
        block_rows: rows updated at a time.

    Returns:
        A TableOptimizer. Gradients and the state of the transform are float32 (or wider
        for wider tables), whatever the dtype of the table. Call `init` inside jit: a
        state of zeros then never exists in a wider dtype.

    Raises:
        ConfigError: a trial shows that an update depends on other entries, at init a
            leaf of the state is neither a scalar nor like the table, or state_dtype is
            unknown.
        ShapeError: at init, the table has not two axes.

    Cost: reads and writes of the table's and the state's rows that were read.
    """
    writer = RowWriter() if writer is None else writer
    narrow = _narrow_dtype(state_dtype)
    _check_entrywise(inner)

    def init(table_RW: jax.Array, split: Split = WHOLE) -> RowwiseState:
        del split
        check_table(table_RW)
        values_RW = load(table_RW)
        wide = jnp.promote_types(values_RW.dtype, jnp.float32)
        state = inner.init(values_RW.astype(wide))
        leaves, tree = jax.tree.flatten(state)
        per_row = _per_row(inner, state)
        _check_leaves(inner, leaves, per_row, table_RW.shape)
        leaves = [
            store(_narrowed(leaf, narrow)) if is_row else jnp.asarray(leaf)
            for leaf, is_row in zip(leaves, per_row, strict=True)
        ]
        return RowwiseState(tree.unflatten(leaves), writer.init(table_RW))

    def apply(
        rows: UniqueRows,
        state: RowwiseState,
        table_RW: jax.Array,
        split: Split = WHOLE,
    ) -> tuple[jax.Array, RowwiseState, Metrics]:
        writes = writer.begin(state.writes)
        n_rows, width = table_RW.shape
        size = max(min(block_rows, len(rows.ids_U)), 1)
        # Without any read there is one block, of no rows.
        padding = max(-len(rows.ids_U) % size, size - len(rows.ids_U))
        ids_U = jnp.pad(rows.ids_U, (0, padding), constant_values=n_rows)
        sums_UW = jnp.pad(rows.sums_UW, ((0, padding), (0, 0)))

        per_row = _per_row(inner, state.inner)
        leaves, tree = jax.tree.flatten(state.inner)
        columns_W = split.first_column(width) + jnp.arange(width, dtype=jnp.int32)

        def update(
            ids_B: jax.Array, sums_BW: jax.Array, old_BW: jax.Array, leaves: list[Any]
        ) -> tuple[jax.Array, list[Any]]:
            # Scalars (counts) move once a step, not once a block: every block starts
            # from the old ones.
            rows_of = [
                _widened(get_rows(leaf, ids_B), narrow) if is_row else leaf
                for leaf, is_row in zip(leaves, per_row, strict=True)
            ]
            update_BW, new = inner.update(sums_BW, tree.unflatten(rows_of), old_BW)
            return jnp.asarray(update_BW, sums_BW.dtype), jax.tree.leaves(new)

        def write(
            number: int, leaf: jax.Array, ids_B: jax.Array, new_BW: jax.Array
        ) -> jax.Array:
            if narrow is not None and value_dtype(leaf) == narrow:
                new_BW = stochastic_round(
                    new_BW.astype(jnp.float32),
                    narrow,
                    _leaf_seed(writer.seed, number),
                    writes.step,
                    ids_B + split.first_row(n_rows),
                    columns_W,
                )
            return set_rows(leaf, ids_B, new_BW)

        def block(i: jax.Array, carry: Any) -> Any:
            table_RW, leaves, written, square = carry
            ids_B = lax.dynamic_slice_in_dim(ids_U, i * size, size)
            sums_BW = lax.dynamic_slice_in_dim(sums_UW, i * size, size)
            old_BW = get_rows(table_RW, ids_B)
            old_BW = old_BW.astype(sums_BW.dtype)
            update_BW, new = update(ids_B, sums_BW, old_BW, leaves)
            update_BW = jnp.where((ids_B < n_rows)[:, None], update_BW, 0)
            leaves = [
                write(number, leaf, ids_B, new[number]) if is_row else leaf
                for number, (leaf, is_row) in enumerate(
                    zip(leaves, per_row, strict=True)
                )
            ]
            table_RW, written = writer.add(
                table_RW, written, ids_B, update_BW, split=split
            )
            return table_RW, leaves, written, square + jnp.sum(update_BW**2)

        # An update without rows tells what the scalars become.
        empty_0W = jnp.zeros((0, width), sums_UW.dtype)
        _, last = update(jnp.zeros((0,), jnp.int32), empty_0W, empty_0W, leaves)
        n_blocks = (rows.count + size - 1) // size
        table_RW, leaves, written, square = lax.fori_loop(
            0,
            n_blocks,
            block,
            (table_RW, leaves, writes, jnp.zeros((), sums_UW.dtype)),
        )
        leaves = [
            leaf if is_row else jnp.asarray(new, leaf.dtype)
            for leaf, new, is_row in zip(leaves, last, per_row, strict=True)
        ]
        square = split.sum_over_columns(split.sum_over_rows(square))
        metrics = {"update_norm": jnp.sqrt(square)}
        return table_RW, RowwiseState(tree.unflatten(leaves), written), metrics

    def mean(table_RW: jax.Array, state: RowwiseState) -> jax.Array:
        return writer.mean(table_RW, state.writes)

    return TableOptimizer(init, apply, mean)


def _per_row(inner: optax.GradientTransformation, state: Any) -> list[bool]:
    """For every leaf of the state: whether it has the shape of the table."""
    marks = optax.tree_utils.tree_map_params(
        inner, lambda _: True, state, transform_non_params=lambda _: False
    )
    return jax.tree.leaves(marks)


def _check_leaves(
    inner: Any, leaves: list[Any], per_row: list[bool], shape: tuple[int, ...]
) -> None:
    """ConfigError unless every leaf is like the table, or a scalar."""
    for leaf, is_row in zip(leaves, per_row, strict=True):
        if jnp.shape(leaf) != (shape if is_row else ()):
            raise ConfigError(
                "rowwise.inner",
                inner,
                f"a transform whose state is scalars and leaves like the table {shape},"
                f" not a leaf of shape {jnp.shape(leaf)}",
            )


def _narrow_dtype(state_dtype: Any) -> jnp.dtype | None:
    """The dtype that leaves of the state are narrowed to, if any."""
    if state_dtype is None or jnp.dtype(state_dtype) == jnp.float32:
        return None
    if jnp.dtype(state_dtype) != jnp.bfloat16:
        raise ConfigError(
            "rowwise.state_dtype", state_dtype, "None, 'float32' or 'bfloat16'"
        )
    return jnp.dtype(jnp.bfloat16)


def _narrowed(leaf: jax.Array, narrow: Any) -> jax.Array:
    return leaf if narrow is None or leaf.dtype != jnp.float32 else leaf.astype(narrow)


def _widened(rows_BW: jax.Array, narrow: Any) -> jax.Array:
    if narrow is None or rows_BW.dtype != narrow:
        return rows_BW
    return rows_BW.astype(jnp.float32)


def _leaf_seed(seed: int, number: int) -> int:
    """A seed for each leaf of the state, none of them that of the table."""
    return (seed + 0x9E3779B9 * (number + 1)) & 0xFFFFFFFF


def _check_entrywise(inner: optax.GradientTransformation) -> None:
    """Try a transform on one small matrix, whole and entry by entry.

    The trial has gradients of very different size, so that limits on norms show.

    Raises:
        ConfigError: the two differ.
    """
    grads = np.array([[1.0, -2.0], [30.0, 0.5]], np.float32)
    params = np.array([[0.5, 1.0], [-3.0, 2.0]], np.float32)

    def init_one(param: Any) -> Any:
        return inner.init(param.reshape(1, 1))

    def update_one(grad: Any, state: Any, param: Any) -> tuple[Any, Any]:
        update, state = inner.update(
            grad.reshape(1, 1), state, jnp.asarray(param.reshape(1, 1))
        )
        return jnp.asarray(update)[0, 0], state

    def both(grads: Any, states: Any, params: Any) -> Any:
        each = jax.vmap(jax.vmap(update_one))
        whole, state = inner.update(grads, states[0], params)
        entries, entry_states = each(grads, states[1], params)
        return whole, entries, (state, entry_states)

    states = inner.init(jnp.asarray(params)), jax.vmap(jax.vmap(init_one))(params)
    step = jax.jit(both)
    for exponent in range(-3, 9):
        whole, entries, states = step(
            grads * np.float32(10.0**exponent), states, params
        )
        if not np.allclose(whole, entries, rtol=1e-4, atol=0, equal_nan=True):
            raise ConfigError(
                "rowwise.inner",
                inner,
                "a transform whose update of an entry depends on that entry alone; "
                "this one updates a matrix otherwise than each of its entries",
            )
