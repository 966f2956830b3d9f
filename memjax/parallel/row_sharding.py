"""Tables divided over a mesh: their parts, and reads of them.

What: `RowSharding`: where the parts of a table lie, and the exchange of its reads and
    of their gradients.
Why: a table larger than a device; ids travel to the parts, and rows or sums of rows
    back, never the table to the ids.
When not: dense weights, which are divided by `logical_axes`.

The rows of a batch are split over the axis "table" too, so a group of G devices that
holds a table together reads it for G parts of the batch.
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
from memjax.ops.init_rows import counting_key
from memjax.ops.row_gradient import RowGradient
from memjax.ops.rows import get_rows, store
from memjax.ops.split import Split
from memjax.parallel.division import Division
from memjax.parallel.logical_axes import BATCH_AXES

AXIS = "table"
_BATCH = PartitionSpec(BATCH_AXES)


@dataclass(frozen=True)
class RowSharding:
    """How tables lie on a mesh.

    Attributes:
        mesh: has the axis "table", over which tables are divided, and the others of
            BATCH_AXES, over which, with "table", the first axis of ids is; devices
            along these and other axes hold copies of a table.
        by, column_rows: as in `Division`.
        of_tables: by "hash_columns", instead of column_rows: pairs (path of a table,
            its column_rows) of a whole model; `of` then says how one table lies.
    """

    mesh: Mesh
    by: str = "rows"
    column_rows: tuple[int, ...] = ()
    of_tables: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        axes = tuple(self.mesh.shape)
        if not set(BATCH_AXES) <= set(axes):
            raise ConfigError("mesh", axes, f"a mesh with the axes {BATCH_AXES}")
        if not self.of_tables:
            Division(self.n_parts, self.by, self.column_rows)
        elif self.by != "hash_columns" or self.column_rows:
            raise ConfigError("of_tables", self.of_tables, "() unless by hash columns")

    def of(self, path: str) -> "RowSharding":
        """How the table at `path` lies: by rows where it has no hash columns."""
        if not self.of_tables:
            return self
        rows = dict(self.of_tables).get(path)
        if rows is None:
            return RowSharding(self.mesh)
        return RowSharding(self.mesh, "hash_columns", rows)

    @property
    def n_parts(self) -> int:
        """Parts of a table."""
        return self.mesh.shape[AXIS]

    @property
    def n_shards(self) -> int:
        """Parts of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)

    @property
    def division(self) -> Division:
        """The parts of one table without the devices."""
        return Division(self.n_parts, self.by, self.column_rows)

    @property
    def spec(self) -> PartitionSpec:
        """How a table is divided."""
        return (
            PartitionSpec(None, AXIS) if self.by == "columns" else PartitionSpec(AXIS)
        )

    def shape(self, n_rows: int, width: int) -> tuple[int, int]:
        """Stored shape of a table; see `Division.shape`."""
        return self.division.shape(n_rows, width)

    def state_spec(self, n_axes: int) -> PartitionSpec:
        """How an array of an optimizer's state is divided, by its number of axes."""
        if n_axes == 0 or (self.by == "columns" and n_axes == 1):
            return PartitionSpec()
        return self.spec

    def state_specs(self, state: Any) -> Any:
        """`state_spec` of every array of a tree."""
        return jax.tree.map(lambda x: self.state_spec(x.ndim), state)

    def split(self, n_rows: int) -> Split:
        """The part of a table of n_rows rows at hand, inside `shard_map`."""
        if self.by == "columns":
            return Split(n_rows=n_rows, column_axis=AXIS)
        bounds = self.division.bounds(n_rows) if self.column_rows else None
        return Split(n_rows=n_rows, row_axis=AXIS, bounds=bounds)

    def drawn(
        self, init: Any, key: jax.Array, n_rows: int, width: int, dtype: Any
    ) -> jax.Array:
        """Initial values init(key, (n_rows, width), dtype), as a table is stored.

        The same rows on any number of devices. By hash columns a device draws its own
        rows, where keys are those of threefry; init must draw once, entry by entry.
        """
        shape = (n_rows, width)
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        counts = typed and str(jax.random.key_impl(key)) == "threefry2x32"
        if not (self.column_rows and counts and jax.config.jax_threefry_partitionable):  # pyright: ignore[reportAttributeAccessIssue]
            return store(self.division.spread(init(key, shape, dtype), n_rows))
        bounds = np.array(self.division.bounds(n_rows), np.int64)
        first = bounds[:-1] * width
        starts_G2 = np.stack([first >> 32, first & 0xFFFFFFFF], 1).astype(np.uint32)
        n_stored = self.division.padded(n_rows) // self.n_parts

        def part(key_2: jax.Array) -> jax.Array:
            at = lax.axis_index(AXIS)
            own_key = counting_key(key_2, jnp.asarray(starts_G2)[at])
            values = init(own_key, (n_stored, width), dtype)
            n_own = jnp.asarray(np.diff(bounds), jnp.int32)[at]
            return store(jnp.where(jnp.arange(n_stored)[:, None] < n_own, values, 0))

        divided = jax.shard_map(
            part,
            mesh=self.mesh,
            in_specs=PartitionSpec(),
            out_specs=self.spec,
            check_vma=False,
        )
        return divided(jax.random.key_data(key))

    def place(self, table_RW: Any) -> jax.Array:
        """Put a whole table [R, W], stored as tables are, on the mesh, padded.

        It goes by way of the host, where it must fit; no device holds all of it.
        """
        host_RW = np.asarray(table_RW)
        self.shape(*host_RW.shape)
        return self.place_state(self.division.spread(host_RW, len(host_RW)))

    def place_state(self, host: np.ndarray) -> jax.Array:
        """Put an array of a state, or a padded table, on the mesh part by part."""
        sharding = NamedSharding(self.mesh, self.state_spec(host.ndim))
        return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])

    def gather(self, table_RW: jax.Array, ids: Any, n_rows: int) -> jax.Array:
        """`gather_rows` of a divided table; the first axis of ids and result is split.

        By hash columns, ids are [B, ..., C], one of each column; an id in another part
        than that of its column is NaN, and ids of other shapes are read as by rows.

        Cost, for T rows of S bytes read on each device of a group of G, beside the ids:
            by hash columns and by columns an exchange in which a device sends and gets
            T * S * (G - 1) / G bytes, the least there is, in equal parts; by rows a sum
            that is scattered, G times that. The gradient stops at the table.
        """
        ids = row_ids(ids, n_rows)
        read = self._rows_of_columns if self._by_column(ids) else self._rows
        flat = ids if ids.ndim else ids[None]
        found = self._of_batch(partial(read, n_rows), lax.stop_gradient(table_RW), flat)
        return found if ids.ndim else found[0]

    def bag(
        self,
        table_RW: jax.Array,
        ids: Any,
        weights: jax.Array,
        n_rows: int,
        kernel: str = "auto",
    ) -> jax.Array:
        """`embedding_bag` of a divided table; the first axis of the ids is split.

        Cost: weighted sums of the rows at hand for the tokens of the whole group. By
            rows (and hash columns) they are added up where they are needed: a device
            sends (G - 1) * T * W numbers for its T tokens, less than the T * K * W of
            an exchange of rows as long as G < K. By columns each device sends its
            columns of the sums, T * W * (G - 1) / G numbers. The gradient of the
            weights is a sum of (G - 1) * T * K numbers. It stops at the table.
        """
        ids = row_ids(ids, n_rows)
        check_weights(ids, weights)
        lead = ids.shape[:-1]
        flat = ids if lead else ids[None]
        weights = weights.reshape(flat.shape)
        sums = self._bag(table_RW, flat, weights, n_rows, kernel)
        return sums if lead else sums[0]

    def _bag(
        self,
        table_RW: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        n_rows: int,
        kernel: str,
    ) -> jax.Array:
        # Nothing traced may be closed over: inside a scan the backward pass is another
        # trace.
        @jax.custom_vjp
        def bag(table_RW: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            sums = partial(self._sums, n_rows, kernel)
            return self._of_batch(sums, table_RW, ids, weights)

        def forward(table_RW: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
            like_0 = jnp.zeros(0, weights.dtype)
            return bag(table_RW, ids, weights), (table_RW, ids, like_0)

        def backward(saved: Any, cotangent: jax.Array) -> Any:
            table_RW, ids, like_0 = saved
            products = partial(self._products, n_rows, kernel)
            found = self._of_batch(products, table_RW, ids, cotangent)
            return None, None, found.astype(like_0.dtype)

        bag.defvjp(forward, backward)
        return bag(table_RW, ids, weights)

    def gradient(self, gradient: RowGradient) -> RowGradient:
        """A gradient whose first axis divides over the parts of a batch: padded with
        reads of no row."""
        return jax.tree.map(self._padded, gradient)

    def at_hand(self, gradient: RowGradient) -> RowGradient:
        """Inside `shard_map`: of one part of a batch -> of the whole batch, as far as
        the part of the table at hand needs it, in the order of the batch.

        By hash columns the cotangents of a column go to its part alone, and by columns
        each part gets its columns of them; by rows all go to all.
        """
        ids, weights, cotangent = gradient
        if weights is None and ids.shape[-1] == 1 and self._by_column(ids[..., 0]):
            axis = ids.ndim - 2
            ids, cotangent = _sent(ids, axis), _sent(cotangent, axis)
        else:
            send = partial(_sent, axis=cotangent.ndim - 1)
            ids = _of_group(ids)
            weights = None if weights is None else _of_group(weights)
            cotangent = (send if self.by == "columns" else _of_group)(cotangent)
        found = RowGradient(ids, weights, cotangent)
        others = [axis for axis in BATCH_AXES[:-1] if self.mesh.shape[axis] > 1]
        if not others:
            return found
        return jax.tree.map(
            lambda x: lax.all_gather(x, tuple(others), tiled=True), found
        )

    def _by_column(self, ids: jax.Array) -> bool:
        """Whether ids [..., C] have the hash columns of this table."""
        n_columns = len(self.column_rows)
        return n_columns > 0 and ids.ndim > 1 and ids.shape[-1] == n_columns

    def _rows(self, n_rows: int, table_RW: jax.Array, ids: jax.Array) -> jax.Array:
        rows = get_rows(table_RW, self._local(n_rows, table_RW, _of_group(ids)))
        return _nan_outside(self._returned(rows), ids, n_rows)

    def _rows_of_columns(
        self, n_rows: int, table_RW: jax.Array, ids: jax.Array
    ) -> jax.Array:
        local = self._local(n_rows, table_RW, _sent(ids, ids.ndim - 1))
        rows = get_rows(table_RW, local)
        rows = jnp.where(local[..., None] < len(table_RW), rows, jnp.nan)
        return _sent_back(rows, rows.ndim - 2)

    def _sums(
        self,
        n_rows: int,
        kernel: str,
        table_RW: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
    ) -> jax.Array:
        """The weighted sums over all parts."""
        group, flat = _of_group(ids), (-1, ids.shape[-1])
        sums = weighted_sums(
            table_RW,
            self._local(n_rows, table_RW, group).reshape(flat),
            _of_group(weights).reshape(flat),
            nan_outside=False,
            kernel=kernel,
        )
        sums = self._returned(sums.reshape(*group.shape[:-1], table_RW.shape[1]))
        inside = jnp.all(_inside(ids, n_rows), axis=-1)
        return jnp.where(inside[..., None], sums, jnp.nan)

    def _products(
        self,
        n_rows: int,
        kernel: str,
        table_RW: jax.Array,
        ids: jax.Array,
        cotangent: jax.Array,
    ) -> jax.Array:
        """The gradient of the weights, over all parts."""
        group = _of_group(ids)
        if self.by == "columns":
            cotangent = _sent(cotangent, cotangent.ndim - 1)
        else:
            cotangent = _of_group(cotangent)
        products = weights_gradient(
            table_RW,
            self._local(n_rows, table_RW, group).reshape(-1, ids.shape[-1]),
            cotangent.reshape(-1, cotangent.shape[-1]),
            nan_outside=False,
            kernel=kernel,
        )
        products = _added_up(products.reshape(group.shape))
        return jnp.where(_inside(ids, n_rows), products, jnp.nan)

    def _returned(self, found: jax.Array) -> jax.Array:
        """What the parts found for all tokens of the group, where the tokens are."""
        if self.by == "columns":
            return _sent_back(found, found.ndim - 1)
        return _added_up(found)

    def _local(self, n_rows: int, table_RW: jax.Array, ids: jax.Array) -> jax.Array:
        """Ids of the rows at hand; rows of other parts become an id outside."""
        return self.split(n_rows).local_ids(ids, table_RW.shape[0])

    def _of_batch(self, function: Any, table_RW: jax.Array, *arrays: Any) -> jax.Array:
        """function(part of the table, parts of the arrays), split by their first axis
        over the parts of a batch; padded where it does not divide."""
        size = len(arrays[0])
        divided = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(self.spec, *(_BATCH,) * len(arrays)),
            out_specs=_BATCH,
            check_vma=False,
        )
        found = divided(table_RW, *map(self._padded, arrays))
        return found if len(found) == size else found[:size]

    def _padded(self, array: jax.Array) -> jax.Array:
        """More entries of a first axis: ids of no row, zeros."""
        n_more = -len(array) % self.n_shards
        if n_more == 0:
            return array
        fill = -1 if jnp.issubdtype(array.dtype, jnp.integer) else 0
        padding = ((0, n_more), *((0, 0),) * (array.ndim - 1))
        return jnp.pad(array, padding, constant_values=fill)


def _of_group(x: jax.Array) -> jax.Array:
    """The first axis of the whole group, from all its devices."""
    return x if _alone() else lax.all_gather(x, AXIS, tiled=True)


def _sent(x: jax.Array, axis: int) -> jax.Array:
    """Each device's share of an axis, for the first axis of the whole group."""
    if _alone():
        return x
    return lax.all_to_all(x, AXIS, split_axis=axis, concat_axis=0, tiled=True)


def _sent_back(x: jax.Array, axis: int) -> jax.Array:
    """The inverse of `_sent`."""
    if _alone():
        return x
    return lax.all_to_all(x, AXIS, split_axis=0, concat_axis=axis, tiled=True)


def _added_up(x: jax.Array) -> jax.Array:
    """Sums over the group, each device those of its own part of the first axis."""
    if _alone():
        return x
    return lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)


def _alone() -> bool:
    """Whether a device has whole tables."""
    return lax.axis_size(AXIS) == 1


def _nan_outside(rows: jax.Array, ids: jax.Array, n_rows: int) -> jax.Array:
    return jnp.where(_inside(ids, n_rows)[..., None], rows, jnp.nan)


def _inside(ids: jax.Array, n_rows: int) -> jax.Array:
    return (ids >= 0) & (ids < n_rows)
