"""How one table is divided over a mesh axis, as seen from inside `shard_map`.

What: `Split`, which reductions over rows or columns cross which axis.
Why: an operation on a table is written once and runs on a whole table or on a part.
When not: placing arrays on devices; that is `parallel.row_sharding`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Split:
    """The part of a table [R, W] that the arrays at hand are.

    Attributes:
        n_rows: rows of the whole table without padding; None: those at hand.
        row_axis: name of the mesh axis that divides the rows; None: not divided.
        column_axis: the same for the columns. At most one of the two is set.
        bounds: first row of each part, and the rows of the table, where parts hold
            different numbers of rows beside their padding; None: n_rows each, in order.
    """

    n_rows: int | None = None
    row_axis: str | None = None
    column_axis: str | None = None
    bounds: tuple[int, ...] | None = None

    def sum_over_rows(self, partial: jax.Array) -> jax.Array:
        """A sum over the rows at hand, made a sum over all rows."""
        return partial if self.row_axis is None else lax.psum(partial, self.row_axis)

    def max_over_rows(self, partial: jax.Array) -> jax.Array:
        """A maximum over the rows at hand, made one over all rows."""
        return partial if self.row_axis is None else lax.pmax(partial, self.row_axis)

    def sum_over_columns(self, partial: jax.Array) -> jax.Array:
        """A sum over the columns at hand, made a sum over all columns."""
        axis = self.column_axis
        return partial if axis is None else lax.psum(partial, axis)

    def max_over_columns(self, partial: jax.Array) -> jax.Array:
        """A maximum over the columns at hand, made one over all columns."""
        axis = self.column_axis
        return partial if axis is None else lax.pmax(partial, axis)

    def first_row(self, n_local: int) -> jax.Array:
        """Number of the first row at hand, where every part holds `n_local` rows."""
        if self.row_axis is None:
            return jnp.zeros((), jnp.int32)
        part = lax.axis_index(self.row_axis).astype(jnp.int32)
        if self.bounds is None:
            return part * n_local
        return jnp.asarray(self.bounds, jnp.int32)[part]

    def local_ids(self, ids: jax.Array, n_local: int) -> jax.Array:
        """Row ids of the whole table as ids of the `n_local` rows at hand.

        Ids of other rows, of padding rows and outside the table become `n_local`.
        """
        end = n_local if self.n_rows is None else self.n_rows
        if self.bounds is not None and self.row_axis is not None:
            end = jnp.asarray(self.bounds, jnp.int32)[lax.axis_index(self.row_axis) + 1]
        local = ids - self.first_row(n_local)
        mine = (ids >= 0) & (ids < end) & (local >= 0) & (local < n_local)
        return jnp.where(mine, local, n_local)

    def first_column(self, n_local: int) -> jax.Array:
        """Number of the first column at hand."""
        if self.column_axis is None:
            return jnp.zeros((), jnp.int32)
        return lax.axis_index(self.column_axis).astype(jnp.int32) * n_local


WHOLE = Split()
