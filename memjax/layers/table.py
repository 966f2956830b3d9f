"""Value tables inside Linen modules: where they live, and how a read is recorded.

What: `declare_table` makes a table of the calling module; `Table` reads it; and
    `ValueTable` is a module that owns one.
Why: in mode "rows" a table is not differentiated; every read hands out its row ids and
    takes a tap whose gradient is the read's, so the gradient costs what the reads cost.
When not: outside Linen; see `ops.embedding_bag` and `ops.row_gradient`.

Collections: "tables" holds tables in mode "rows" and "host", "tables_fp8" those in mode
"fp8"; "table_keys" says what tables on the host are drawn from;
"reads" is sown by every call site; "taps" is given by
`layers.row_grad.value_and_row_grad` and by nobody else.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from memjax.errors import ConfigError, ShapeError
from memjax.ops.embedding_bag import embedding_bag, gather_rows, row_ids
from memjax.ops.fp8 import dequantize_rows, fp8_bag, quantize_rows
from memjax.ops.rows import store, value_dtype
from memjax.parallel.row_sharding import RowSharding

TABLES, READS, TAPS = "tables", "reads", "taps"
TABLES_FP8, CODES, SCALES = "tables_fp8", "_codes", "_scales"
FP8_BLOCK = 32
TABLE_KEYS = "table_keys"
TABLE_MODES = ("dense", "rows", "host", "fp8")
BY_ROWS = ("rows", "host")
MAX_ROWS = 2**31 - 2
Init = Callable[[jax.Array, tuple[int, int], Any], jax.Array]


@flax.struct.dataclass
class Read:
    """What one call site read, as it is sown.

    Attributes:
        ids: int32 [..., K].
        weights: float [..., K], or None for single rows.
        tap: zeros like the value, [..., W]; only its shape and dtype are used.
        table: path of the table, such as "block_1/memory/table".
        tapped: whether a tap was added to the value.
    """

    ids: jax.Array
    weights: jax.Array | None
    tap: jax.Array
    table: str = flax.struct.field(pytree_node=False)
    tapped: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class Table:
    """A handle on a table; pass it to whoever reads it.

    Attributes:
        stored: the array: in mode "dense" a parameter [R, W], in mode "rows" the
            stored form (see `ops.rows`), padded when it is divided by rows; in mode
            "fp8" the codes of `ops.fp8`; in mode "host" the rows at hand, as in "rows".
        n_rows: rows R without padding; in mode "host" those at hand.
        path: names of the owning modules and of the table, joined by "/".
        mode: one of TABLE_MODES.
        sharding: how it is divided; None: not divided.
        recorded: whether reads are sown where the table was declared; they must then
            be sown by every reader, or its gradient would be missing.
        scales: in mode "fp8" those of the codes, uint8 [R, W / 32]; else None.
        kernel: the program that reads, see `ops.bag_kernels`.
    """

    stored: jax.Array
    n_rows: int = flax.struct.field(pytree_node=False)
    path: str = flax.struct.field(pytree_node=False)
    mode: str = flax.struct.field(pytree_node=False)
    sharding: RowSharding | None = flax.struct.field(pytree_node=False)
    recorded: bool = flax.struct.field(pytree_node=False, default=False)
    scales: jax.Array | None = None
    kernel: str = flax.struct.field(pytree_node=False, default="auto")

    def gather(self, caller: nn.Module, ids: Any) -> jax.Array:
        """Rows [..., W] of ids [...], in the dtype of the table; of FP8, bfloat16.

        Args:
            caller: the module that reads; the read is recorded under it.
            ids: int32; ids outside [0, R) give NaN.
        """
        ids = row_ids(ids, self.n_rows)
        if self.scales is not None:
            value = dequantize_rows(self.stored, self.scales, ids, self.kernel)
        elif self.sharding is not None:
            value = self.sharding.gather(self.stored, ids, self.n_rows)
        else:
            value = gather_rows(self.stored, ids, self.kernel)
        return self._tapped(caller, ids[..., None], None, value)

    def bag(self, caller: nn.Module, ids: Any, weights: jax.Array) -> jax.Array:
        """Weighted sums [..., W] of the rows ids [..., K], float32 or wider."""
        ids = row_ids(ids, self.n_rows)
        if self.scales is not None:
            value = fp8_bag(self.stored, self.scales, ids, weights, self.kernel)
        elif self.sharding is not None:
            value = self.sharding.bag(
                self.stored, ids, weights, self.n_rows, self.kernel
            )
        else:
            stored = self.stored
            if self.mode in BY_ROWS:
                stored = jax.lax.stop_gradient(stored)
            value = embedding_bag(stored, ids, weights, self.kernel)
        return self._tapped(caller, ids, weights, value)

    def _tapped(
        self,
        caller: nn.Module,
        ids: jax.Array,
        weights: jax.Array | None,
        value: jax.Array,
    ) -> jax.Array:
        if self.mode not in BY_ROWS or caller.is_initializing():
            return value
        value = jax.lax.stop_gradient(value) if weights is None else value
        name = self.path.replace("/", ".")
        mutable = caller.is_mutable_collection(READS)
        if self.recorded and not mutable:
            raise ConfigError(
                f"variable_axes of the layers around {'/'.join(caller.path)}",
                "without 'reads'",
                f"{{'reads': 0, 'taps': 0, ...}}, and variable_broadcast=['tables'], "
                f"so that reads of {self.path} have a gradient",
            )
        if caller.has_variable(TAPS, name):
            if not mutable:
                raise ConfigError(
                    "mutable", "without 'reads'", "apply(..., mutable=['reads'])"
                )
            # A module called twice has a tap for each call, in their order.
            number = len(caller.get_variable(READS, name, ()))
            tap = caller.get_variable(TAPS, name)[number]
            if tap.shape != value.shape:
                raise ConfigError(
                    f"read of {self.path}",
                    f"shape {value.shape} with a tap of shape {tap.shape}",
                    "apply() once a loss, not under jax.vmap or jax.lax.scan; nn.vmap "
                    "and nn.scan take 'reads' and 'taps' in variable_axes",
                )
            value = value + tap
        if mutable:
            weights = None if weights is None else jax.lax.stop_gradient(weights)
            tap = jnp.zeros(value.shape, value.dtype)
            tapped = caller.has_variable(TAPS, name)
            caller.sow(READS, name, Read(ids, weights, tap, self.path, tapped))
        return value


def declare_table(
    module: nn.Module,
    name: str,
    n_rows: int,
    width: int,
    *,
    init: Init,
    dtype: Any = jnp.float32,
    mode: str = "dense",
    sharding: RowSharding | None = None,
    kernel: str = "auto",
) -> Table:
    """Make, or find again, a table of `module`; call it as you would `module.param`.

    Args:
        module: the owner, inside its `setup` or compact method.
        name: of the variable.
        n_rows, width: R x W, without padding.
        init: (key, shape, dtype) -> values; the same values in all modes (in "fp8"
            quantised) and on any number of devices.
        dtype: of the values.
        mode: "dense": an ordinary parameter; "rows": a variable of the collection
            "tables", bfloat16 stored as uint16; "fp8", for tables that are only read:
            two variables of the collection "tables_fp8", NAME_codes uint8 [R, W] and
            NAME_scales uint8 [R, W / 32], see `ops.fp8`. A read has no gradient to
            the table, but to the weights. `models.fp8_tables` makes them of a trained
            table; what init makes has the float32 table once in memory. "host": as
            "rows", but only some rows are handed in, and ids count those; init makes
            the whole table, to be dropped inside jit, and beside it, in "table_keys",
            the data of the key that its values are drawn from.
        sharding: how a table in mode "rows" is divided.
        kernel: the program that reads it, one of `ops.bag_kernels.KERNELS`.

    Raises:
        ConfigError: n_rows, width or mode out of range, a dense or FP8 table divided,
            or a width of an FP8 table that is no multiple of 32.
        ShapeError: the variable that was handed in has another shape.
    """
    check_table_size("n_rows", n_rows)
    if width < 1:
        raise ConfigError("width", width, "at least 1 column")
    if mode not in TABLE_MODES:
        raise ConfigError("table_mode", mode, f"one of {TABLE_MODES}")
    path = "/".join((*module.scope.path, name)) if module.scope else name
    if mode != "rows" and sharding is not None:
        raise ConfigError("table_mode", mode, "'rows' for a table that is divided")
    if mode == "fp8":
        shape = n_rows, width
        return _declare_fp8(module, name, path, shape, init, dtype, kernel)
    if mode == "dense":
        stored = module.param(name, init, (n_rows, width), dtype)
        return Table(stored, n_rows, path, mode, None, kernel=kernel)
    sharding = None if sharding is None else sharding.of(path)
    shape = (n_rows, width) if sharding is None else sharding.shape(n_rows, width)
    key = functools.cache(lambda: module.make_rng("params"))
    if mode == "host" and module.is_initializing():
        module.variable(TABLE_KEYS, name, lambda: jax.random.key_data(key()))

    def make() -> jax.Array:
        if sharding is not None:
            return sharding.drawn(init, key(), n_rows, width, dtype)
        return store(init(key(), (n_rows, width), dtype))

    stored = module.variable(TABLES, name, make).value
    if mode == "host" and stored.shape[1:] == (width,):
        n_rows = stored.shape[0]
    elif stored.shape != shape:
        raise ShapeError(f"table {path}", stored.shape, shape)
    if value_dtype(stored) != jnp.dtype(dtype):
        raise ConfigError(f"dtype of table {path}", value_dtype(stored), f"{dtype}")
    recorded = module.is_mutable_collection(READS)
    return Table(stored, n_rows, path, mode, sharding, recorded, kernel=kernel)


def _declare_fp8(
    module: nn.Module,
    name: str,
    path: str,
    shape: tuple[int, int],
    init: Init,
    dtype: Any,
    kernel: str,
) -> Table:
    n_rows, width = shape
    check_fp8_width("width", width)

    @functools.cache
    def made() -> tuple[jax.Array, jax.Array]:
        values = init(module.make_rng("params"), shape, dtype)
        return quantize_rows(values, FP8_BLOCK)

    codes = module.variable(TABLES_FP8, name + CODES, lambda: made()[0]).value
    scales = module.variable(TABLES_FP8, name + SCALES, lambda: made()[1]).value
    for part, got, want in (
        (CODES, codes.shape, shape),
        (SCALES, scales.shape, (n_rows, width // FP8_BLOCK)),
    ):
        if got != want:
            raise ShapeError(f"table {path}{part}", got, want)
    return Table(codes, n_rows, path, "fp8", None, scales=scales, kernel=kernel)


def check_fp8_width(field: str, width: int) -> None:
    """ConfigError unless rows of this width have whole blocks of 32 entries."""
    if width % FP8_BLOCK:
        want = f"a multiple of {FP8_BLOCK} columns in table_mode 'fp8'"
        raise ConfigError(field, width, want)


def check_table_size(field: str, n_rows: int) -> None:
    """ConfigError unless row ids, and the id after the last, fit 32 bits."""
    if not 1 <= n_rows <= MAX_ROWS:
        raise ConfigError(field, n_rows, f"1 to {MAX_ROWS} rows (32-bit ids)")


class ValueTable(nn.Module):
    """A module that owns one table and reads it for anybody.

    Attributes: as the arguments of `declare_table`; table_std is the standard deviation
    of the normal initialiser.

    Call sites: `table.handle()` gives the `Table` to pass to other modules, which read
    it with `handle.gather(self, ids)`; `table(ids)` and `table(ids, weights)` read it
    here. Cost: as in `ops.embedding_bag`.
    """

    n_rows: int
    width: int
    dtype: Any = jnp.float32
    mode: str = "dense"
    table_std: float = 0.02
    sharding: RowSharding | None = None

    def setup(self) -> None:
        self.table = declare_table(
            self,
            "table",
            self.n_rows,
            self.width,
            init=nn.initializers.normal(self.table_std),
            dtype=self.dtype,
            mode=self.mode,
            sharding=self.sharding,
        )

    def handle(self) -> Table:
        """The table, to be passed to other modules."""
        return self.table

    def __call__(self, ids: Any, weights: jax.Array | None = None) -> jax.Array:
        """Rows [..., W] of ids [...], or weighted sums of rows of ids [..., K]."""
        if weights is None:
            return self.table.gather(self, ids)
        return self.table.bag(self, ids, weights)
