"""Tables divided over a mesh axis: their shapes, and reads of them.

What: `RowSharding`, by rows (padded up to equal parts) or by columns.
Why: a table larger than a device; ids travel to the parts, never the table to the ids.
When not: dense weights, and tables that fit every device.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memjax.errors import ConfigError
from memjax.ops.embedding_bag import (
    gather_rows,
    row_ids,
    weighted_sums,
    weights_gradient,
)
from memjax.ops.split import Split

DIVISIONS = ("rows", "columns")


@dataclass(frozen=True)
class RowSharding:
    """How tables lie on a mesh.

    Attributes:
        mesh: the mesh; other axes than `axis` hold copies of a table.
        axis: the mesh axis over which tables are divided.
        by: "rows": part i holds rows i * n .. (i + 1) * n - 1, the last ones padded
            with rows of zeros that nobody sees; "columns": every part holds all rows
            and an equal share of the columns.
        batch_axis: the mesh axis over which the first axis of a batch is divided.
    """

    mesh: Mesh
    axis: str = "table"
    by: str = "rows"
    batch_axis: str = "data"

    def __post_init__(self) -> None:
        if self.by not in DIVISIONS:
            raise ConfigError("by", self.by, f"one of {DIVISIONS}")
        for name in (self.axis, self.batch_axis):
            if name not in self.mesh.shape:
                raise ConfigError("axis", name, f"one of {tuple(self.mesh.shape)}")

    @property
    def n_parts(self) -> int:
        """Parts of a table."""
        return self.mesh.shape[self.axis]

    @property
    def spec(self) -> PartitionSpec:
        """How a table is divided."""
        if self.by == "rows":
            return PartitionSpec(self.axis)
        return PartitionSpec(None, self.axis)

    def shape(self, n_rows: int, width: int) -> tuple[int, int]:
        """Stored shape of a table: padded to equal parts by rows.

        Raises:
            ConfigError: the columns do not divide into equal parts.
        """
        if self.by == "rows":
            return -(-n_rows // self.n_parts) * self.n_parts, width
        if width % self.n_parts:
            raise ConfigError(
                "row_width", width, f"a multiple of the {self.n_parts} parts by columns"
            )
        return n_rows, width

    def state_spec(self, n_axes: int) -> PartitionSpec:
        """How an array of an optimizer's state is divided, by its number of axes."""
        if n_axes == 0 or (self.by == "columns" and n_axes == 1):
            return PartitionSpec()
        return self.spec

    def split(self, n_rows: int) -> Split:
        """The part of a table of n_rows rows at hand, inside `shard_map`."""
        if self.by == "rows":
            return Split(n_rows=n_rows, row_axis=self.axis)
        return Split(n_rows=n_rows, column_axis=self.axis)

    def place(self, table_RW: Any) -> jax.Array:
        """Put a whole table [R, W] on the mesh, padded."""
        shape = self.shape(*table_RW.shape)
        padding = [
            (0, want - have) for want, have in zip(shape, table_RW.shape, strict=True)
        ]
        sharding = NamedSharding(self.mesh, self.spec)
        return jax.jit(partial(jnp.pad, pad_width=padding), out_shardings=sharding)(
            table_RW
        )

    def gather(self, table_RW: jax.Array, ids: Any, n_rows: int) -> jax.Array:
        """`gather_rows` of a divided table; by columns the result is divided too.

        Cost: by rows, a sum over the parts of the result; by columns, nothing. The
            gradient stops at the table.
        """
        ids = row_ids(ids, n_rows)

        def local(table_RW: jax.Array, ids: jax.Array) -> jax.Array:
            at, mine = self._own(n_rows, table_RW, ids)
            rows = jnp.where(mine[..., None], gather_rows(table_RW, at), 0)
            if self.by == "rows":
                rows = lax.psum(rows, self.axis)
            inside = (ids >= 0) & (ids < n_rows)
            return jnp.where(inside[..., None], rows, jnp.nan)

        batch = PartitionSpec(*self._batch(ids))
        divided = self._divided(
            local, (self.spec, batch), self._out(batch, ids.ndim + 1)
        )
        return divided(lax.stop_gradient(table_RW), ids)

    def bag(
        self, table_RW: jax.Array, ids: Any, weights: jax.Array, n_rows: int
    ) -> jax.Array:
        """`embedding_bag` of a divided table; by columns the result is divided too.

        Cost: by rows, weighted sums of the rows at hand and one sum over the parts of
            the result [..., W], K times less than of the rows; and of the weights'
            gradient. By columns, a sum over the parts of the weights' gradient alone.
            The gradient stops at the table.
        """
        ids = row_ids(ids, n_rows)
        batch = PartitionSpec(*self._batch(ids))
        out = self._out(batch, ids.ndim)

        # Nothing traced may be closed over: inside a scan the backward pass is another
        # trace.
        @jax.custom_vjp
        def bag(table_RW: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            sums = partial(self._sums, n_rows)
            divided = self._divided(sums, (self.spec, batch, batch), out)
            return divided(table_RW, ids, weights)

        def forward(table_RW: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
            return bag(table_RW, ids, weights), (table_RW, ids, weights)

        def backward(saved: Any, cotangent: jax.Array) -> Any:
            table_RW, ids, weights = saved
            products = partial(self._products, n_rows)
            divided = self._divided(products, (self.spec, batch, out), batch)
            bar = divided(table_RW, ids, cotangent).astype(weights.dtype)
            return None, None, bar

        bag.defvjp(forward, backward)
        return bag(table_RW, ids, weights)

    def _sums(
        self, n_rows: int, table_RW: jax.Array, ids: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """The weighted sums over all parts."""
        at, mine = self._own(n_rows, table_RW, ids)
        weights = jnp.where(mine, weights, 0)
        n_read = ids.shape[-1]
        sums = weighted_sums(
            table_RW, at.reshape(-1, n_read), weights.reshape(-1, n_read)
        )
        sums = sums.reshape(*ids.shape[:-1], table_RW.shape[1])
        if self.by == "rows":
            sums = lax.psum(sums, self.axis)
        inside = jnp.all((ids >= 0) & (ids < n_rows), axis=-1)
        return jnp.where(inside[..., None], sums, jnp.nan)

    def _products(
        self, n_rows: int, table_RW: jax.Array, ids: jax.Array, cotangent: jax.Array
    ) -> jax.Array:
        """The gradient of the weights, over all parts."""
        at, mine = self._own(n_rows, table_RW, ids)
        products = weights_gradient(
            table_RW,
            at.reshape(-1, ids.shape[-1]),
            cotangent.reshape(-1, cotangent.shape[-1]),
        )
        products = jnp.where(mine, products.reshape(ids.shape), 0)
        return lax.psum(products, self.axis)

    def _own(
        self, n_rows: int, table_RW: jax.Array, ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Local ids, row 0 in place of rows of other parts; and which are at hand."""
        n_local = table_RW.shape[0]
        at = self.split(n_rows).local_ids(ids, n_local)
        return jnp.where(at < n_local, at, 0), at < n_local

    def _divided(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _out(self, batch: PartitionSpec, n_axes: int) -> PartitionSpec:
        """How a read [..., W] is divided."""
        if self.by == "rows":
            return batch
        return PartitionSpec(*batch, *(None,) * (n_axes - 1 - len(batch)), self.axis)

    def _batch(self, ids: jax.Array) -> tuple[str, ...]:
        """The batch axis when it divides the first axis of the ids, else nothing."""
        n = self.mesh.shape[self.batch_axis]
        divides = ids.ndim > 1 and ids.shape[0] % n == 0
        return (self.batch_axis,) if divides else ()
