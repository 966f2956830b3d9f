"""What every memory of a model has in common: where it sits and how it is joined.

What: `MemoryConfig`, the base of each memory's own config; `TableSpec`, what a memory
    says of its tables; `MemoryInputs`, what it is handed beside the stream.
Why: one way to attach any memory, so that ablations change a word, not code.
When not: options of one kind of memory live beside that layer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
from jax import Array

from memjax.errors import ConfigError
from memjax.layers.decode_piece import Piece
from memjax.layers.precision import Dtypes
from memjax.layers.table import TABLE_MODES, Table, declare_table
from memjax.ops.bag_kernels import KERNELS
from memjax.ops.gates import COMBINE_MODES
from memjax.parallel.row_sharding import RowSharding

PLACES = (
    "before_attention",
    "instead_of_feed_forward",
    "beside_feed_forward",
    "after_feed_forward",
)
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Attachment of a memory to a model.

    Attributes:
        layers: block indices (from 0) that read it, ascending and distinct.
        place: where in the block. "before_attention": h + m(h) first;
            "instead_of_feed_forward": in its place (arXiv:1907.05242, 2412.09764);
            "beside_feed_forward": h + f(h) + m(h); "after_feed_forward": h + m(h)
            last.
        mode: how a read joins the stream, one of `ops.gates.COMBINE_MODES`.
        cap: share of the memory in the modes that have one, in [0, 1].
        dropout: probability that the read of a whole sequence is dropped while
            training, in [0, 1). A dropped read has gate 0 and nothing is rescaled.
        table_mode: "dense": the table is an ordinary parameter with an ordinary
            gradient; "rows": only rows that were read have a gradient, so a step costs
            what the reads cost, whatever the size of the table; "host": as "rows", with
            the table in host memory or in files (`train.host_tables`), for memories
            whose rows follow from the tokens; "fp8": 8-bit floats that are only read,
            never trained (see `models.fp8_tables`); rows must be a multiple of 32 wide.
        shared_table: None: every layer has its own table. A name: one table of the
            model for all layers of all memories that say this name; they must ask for
            equal tables.
        kernel: the programs that read its tables and sum their gradients by row:
            "auto": XLA, and on NVIDIA GPUs ours; "xla"; or "triton" or "mosaic", for
            such GPUs only (docs/kernels.md).
    """

    normed_input: ClassVar[bool] = True
    """Whether it is handed the RMS-normalised stream, or the stream itself."""
    host_table: ClassVar[bool] = False
    """Whether its table may be on the host: all its rows follow from the tokens."""

    layers: tuple[int, ...] = (1,)
    place: str = "before_attention"
    mode: str = "sum"
    cap: float = 0.25
    dropout: float = 0.0
    table_mode: str = "dense"
    shared_table: str | None = None
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_numbers(self, "memories")
        if not isinstance(self.layers, tuple):
            raise ConfigError("memories.layers", self.layers, "a tuple such as (1,)")
        if any(isinstance(n, bool) or not isinstance(n, int) for n in self.layers):
            raise ConfigError("memories.layers", self.layers, "whole numbers")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(
                "memories.layers", self.layers, "ascending distinct layer indices"
            )
        if self.layers[0] < 0:
            raise ConfigError("memories.layers", self.layers, "indices >= 0")
        for field, allowed in (
            ("place", PLACES),
            ("mode", COMBINE_MODES),
            ("table_mode", TABLE_MODES),
            ("kernel", KERNELS),
        ):
            if getattr(self, field) not in allowed:
                raise ConfigError(
                    f"memories.{field}", getattr(self, field), f"one of {allowed}"
                )
        if self.table_mode == "host" and not self.host_table:
            raise ConfigError(
                "memories.table_mode",
                self.table_mode,
                "'dense' or 'rows' for a memory that finds its rows inside the model; "
                "EngramConfig, ByteEngramConfig and NgramEmbeddingConfig have others",
            )
        if not 0.0 <= self.cap <= 1.0:
            raise ConfigError("memories.cap", self.cap, "0 <= cap <= 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError("memories.dropout", self.dropout, "0 <= dropout < 1")
        name = self.shared_table
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ConfigError(
                "memories.shared_table", name, "None or a name such as pool_1"
            )

    def table_specs(self, d_model: int) -> "dict[str, TableSpec]":
        """{name: table} of the tables that one layer reads in a model of width D."""
        raise NotImplementedError(type(self).__name__)

    @property
    def inner_flops(self) -> int:
        """FLOPs of a token's forward pass that its parameters and reads do not show."""
        return 0

    def table_widths(self, d_model: int) -> dict[str, int]:
        """{name: width of a row} of the tables."""
        return {name: spec.width for name, spec in self.table_specs(d_model).items()}

    def check_width(self, d_model: int) -> None:
        """ConfigError where the memory does not fit a stream of width D."""
        del d_model


@dataclass(frozen=True)
class TableSpec:
    """A table that a memory reads.

    Attributes:
        n_rows, width: R x W.
        std: standard deviation of the initial values; 0 for zeros.
        reads: rows read per token.
        init: "normal", or "truncated_normal" (cut at two deviations).
    """

    n_rows: int
    width: int
    std: float
    reads: int
    init: str = "normal"

    def initializer(self) -> nn.initializers.Initializer:
        """(key, shape, dtype) -> initial values."""
        if self.std == 0:
            return nn.initializers.zeros
        if self.init == "normal":
            return nn.initializers.normal(self.std)
        if self.init == "truncated_normal":
            # Flax's divides by the deviation of the cut normal, so std is that of
            # the values.
            return nn.initializers.variance_scaling(
                self.std**2 * self.n_rows, "fan_in", "truncated_normal"
            )
        raise ConfigError("init", self.init, "'normal' or 'truncated_normal'")


@flax.struct.dataclass
class MemoryInputs:
    """What a memory is handed beside the stream.

    Attributes:
        segments_BT: int32 document number inside the row, 0 for padding.
        positions_BT: int32 position inside the document.
        rows_BTC: int32 row ids of a memory addressed by tokens; None for the others.
        tables: {name: table} when the table is shared; None: it has its own.
        piece: when rows go on from a cache, where they stand; the segments are then
            its documents. A memory that looks at other tokens than its own keeps what
            it needs of them in the collection "cache".
    """

    segments_BT: Array
    positions_BT: Array
    rows_BTC: Array | None = None
    tables: dict[str, Table] | None = None
    piece: Piece | None = None


def own_tables(
    module: nn.Module,
    config: MemoryConfig,
    specs: Mapping[str, TableSpec],
    shared: dict[str, Table] | None,
    dtypes: Dtypes,
    sharding: RowSharding | None,
) -> dict[str, Table]:
    """The tables of `specs`: the shared ones where given, else `module`'s own."""
    if shared is not None:
        return shared
    return {
        name: declare_table(
            module,
            name,
            spec.n_rows,
            spec.width,
            init=spec.initializer(),
            dtype=dtypes.tables,
            mode=config.table_mode,
            sharding=sharding,
            kernel=config.kernel,
        )
        for name, spec in specs.items()
    }


def check_numbers(config: Any, prefix: str) -> None:
    """ConfigError for a field annotated as a float that is no number."""
    for field in fields(config):
        if field.type not in (float, float | None):
            continue
        value = getattr(config, field.name)
        if value is None and field.type is not float:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{prefix}.{field.name}", value, "a number")


def check_fields(config: Any, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """ConfigError for a field of a memory that is not among its allowed values."""
    for field, values in allowed.items():
        if getattr(config, field) not in values:
            raise ConfigError(
                f"memories.{field}", getattr(config, field), f"one of {values}"
            )


def check_least(config: Any, least: Mapping[str, int]) -> None:
    """ConfigError for a field of a memory that is not an integer of at least this."""
    for field, low in least.items():
        value = getattr(config, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"memories.{field}", value, f"an integer >= {low}")


def check_orders(orders: Any) -> None:
    """ConfigError for the `orders` of a memory that are not a tuple of integers."""
    if not isinstance(orders, tuple) or any(type(n) is not int for n in orders):
        raise ConfigError("memories.orders", orders, "a tuple such as (2, 3)")
