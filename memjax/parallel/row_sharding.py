"""Tables divided over a mesh axis: their shapes, and reads of them.

What: `RowSharding`, by rows (padded up to equal parts) or by columns; `Division`, the
    same without devices.
Why: a table larger than a device; ids travel to the parts, never the table to the ids.
When not: dense weights, and tables that fit every device.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memjax.errors import ConfigError
from memjax.ops.embedding_bag import (
    check_weights,
    row_ids,
    weighted_sums,
    weights_gradient,
)
from memjax.ops.rows import get_rows
from memjax.ops.split import Split

DIVISIONS = ("rows", "columns")


@dataclass(frozen=True)
class Division:
    """Into how many parts tables are divided; plain data, as a checkpoint records it.

    Attributes:
        n_parts: parts of a table; 1: not divided.
        by: "rows": part i holds rows i * n .. (i + 1) * n - 1, the last ones padded
            with rows of zeros that nobody sees; "columns": every part holds all rows
            and an equal share of the columns.
    """

    n_parts: int = 1
    by: str = "rows"

    def __post_init__(self) -> None:
        if self.n_parts < 1:
            raise ConfigError("n_parts", self.n_parts, "at least 1 part")
        if self.by not in DIVISIONS:
            raise ConfigError("by", self.by, f"one of {DIVISIONS}")

    @property
    def row_parts(self) -> int:
        """Parts that the rows are divided into."""
        return self.n_parts if self.by == "rows" else 1

    def padded(self, n_rows: int) -> int:
        """Rows stored for a table of n_rows rows."""
        return -(-n_rows // self.row_parts) * self.row_parts

    def shape(self, n_rows: int, width: int) -> tuple[int, int]:
        """Stored shape of a table of n_rows rows, padded to equal parts by rows.

        Raises:
            ConfigError: the columns do not divide into equal parts.
        """
        if self.by == "columns" and width % self.n_parts:
            raise ConfigError(
                "row_width", width, f"a multiple of the {self.n_parts} parts by columns"
            )
        return self.padded(n_rows), width


@dataclass(frozen=True)
class RowSharding:
    """How tables lie on a mesh.

    Attributes:
        mesh: the mesh; other axes than `axis` hold copies of a table.
        axis: the mesh axis over which tables are divided.
        by: "rows" or "columns", as in `Division`.
        batch_axis: the mesh axis over which the first axis of a batch is divided.
    """

    mesh: Mesh
    axis: str = "table"
    by: str = "rows"
    batch_axis: str = "data"

    def __post_init__(self) -> None:
        axes = tuple(self.mesh.shape)
        for field in ("axis", "batch_axis"):
            name = getattr(self, field)
            if name not in axes:
                raise ConfigError(field, name, f"one of {axes}")
        if self.axis == self.batch_axis:
            raise ConfigError("batch_axis", self.batch_axis, "another axis than axis")
        Division(self.n_parts, self.by)

    @property
    def n_parts(self) -> int:
        """Parts of a table."""
        return self.mesh.shape[self.axis]

    @property
    def division(self) -> Division:
        """The parts without the devices."""
        return Division(self.n_parts, self.by)

    @property
    def spec(self) -> PartitionSpec:
        """How a table is divided."""
        if self.by == "rows":
            return PartitionSpec(self.axis)
        return PartitionSpec(None, self.axis)

    def shape(self, n_rows: int, width: int) -> tuple[int, int]:
        """Stored shape of a table; see `Division.shape`."""
        return self.division.shape(n_rows, width)

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
        """Put a whole table [R, W], stored as tables are, on the mesh, padded.

        It goes by way of the host, where it must fit; no device holds all of it.
        """
        host_RW = np.asarray(table_RW)
        shape = self.shape(*host_RW.shape)
        host_RW = np.pad(
            host_RW,
            [(0, new - old) for new, old in zip(shape, host_RW.shape, strict=True)],
        )
        return self.place_state(host_RW)

    def place_state(self, host: np.ndarray) -> jax.Array:
        """Put an array of a state, or a padded table, on the mesh part by part."""
        sharding = NamedSharding(self.mesh, self.state_spec(host.ndim))
        return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])

    def gather(self, table_RW: jax.Array, ids: Any, n_rows: int) -> jax.Array:
        """`gather_rows` of a divided table; by columns the result is divided too.

        Cost: by rows, a sum over the parts of the result; by columns, nothing. The
            gradient stops at the table.
        """
        ids = row_ids(ids, n_rows)

        def local(table_RW: jax.Array, ids: jax.Array) -> jax.Array:
            rows = get_rows(table_RW, self._local(n_rows, table_RW, ids))
            if self.by == "rows":
                rows = lax.psum(rows, self.axis)
            return jnp.where(_inside(ids, n_rows)[..., None], rows, jnp.nan)

        batch = self._batch(ids.shape)
        out = self._out(batch, ids.ndim + 1)
        divided = self._divided(local, (self.spec, batch), out)
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
        check_weights(ids, weights)
        batch = self._batch(ids.shape[:-1])
        out = self._out(batch, ids.ndim)

        # Nothing traced may be closed over: inside a scan the backward pass is another
        # trace.
        @jax.custom_vjp
        def bag(table_RW: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            sums = partial(self._sums, n_rows)
            divided = self._divided(sums, (self.spec, batch, batch), out)
            return divided(table_RW, ids, weights)

        def forward(table_RW: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
            like_0 = jnp.zeros(0, weights.dtype)
            return bag(table_RW, ids, weights), (table_RW, ids, like_0)

        def backward(saved: Any, cotangent: jax.Array) -> Any:
            table_RW, ids, like_0 = saved
            products = partial(self._products, n_rows)
            divided = self._divided(products, (self.spec, batch, out), batch)
            return None, None, divided(table_RW, ids, cotangent).astype(like_0.dtype)

        bag.defvjp(forward, backward)
        return bag(table_RW, ids, weights)

    def _sums(
        self, n_rows: int, table_RW: jax.Array, ids: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """The weighted sums over all parts."""
        flat = (math.prod(ids.shape[:-1]), ids.shape[-1])
        local = self._local(n_rows, table_RW, ids).reshape(flat)
        sums = weighted_sums(table_RW, local, weights.reshape(flat), nan_outside=False)
        sums = sums.reshape(*ids.shape[:-1], table_RW.shape[1])
        if self.by == "rows":
            sums = lax.psum(sums, self.axis)
        inside = jnp.all(_inside(ids, n_rows), axis=-1)
        return jnp.where(inside[..., None], sums, jnp.nan)

    def _products(
        self, n_rows: int, table_RW: jax.Array, ids: jax.Array, cotangent: jax.Array
    ) -> jax.Array:
        """The gradient of the weights, over all parts."""
        n_tokens = math.prod(ids.shape[:-1])
        products = weights_gradient(
            table_RW,
            self._local(n_rows, table_RW, ids).reshape(n_tokens, ids.shape[-1]),
            cotangent.reshape(n_tokens, cotangent.shape[-1]),
            nan_outside=False,
        )
        products = lax.psum(products.reshape(ids.shape), self.axis)
        return jnp.where(_inside(ids, n_rows), products, jnp.nan)

    def _local(self, n_rows: int, table_RW: jax.Array, ids: jax.Array) -> jax.Array:
        """Ids of the rows at hand; rows of other parts become an id outside."""
        return self.split(n_rows).local_ids(ids, table_RW.shape[0])

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

    def _batch(self, shape: tuple[int, ...]) -> PartitionSpec:
        """How ids with these axes before the reads are divided: over the batch axis
        when it divides the first axis, else not."""
        n = self.mesh.shape[self.batch_axis]
        divides = bool(shape) and shape[0] % n == 0
        return PartitionSpec(self.batch_axis) if divides else PartitionSpec()


def _inside(ids: jax.Array, n_rows: int) -> jax.Array:
    return (ids >= 0) & (ids < n_rows)
