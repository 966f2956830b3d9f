"""N-gram embeddings added to the token embedding, without a gate.

What: hashed rows of the last n tokens, projected or as they are, summed into the
    stream; by the hash of LongCat or of BLT.
Why: the input-side baselines of the hash family.
When not: rows that the stream weighs; see `engram`.
"""

from dataclasses import dataclass
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from memjax.arrays import check_shape
from memjax.errors import ConfigError, ShapeError
from memjax.layers.join import check_gate, join, token_gate
from memjax.layers.memory import (
    MemoryConfig,
    MemoryInputs,
    TableSpec,
    check_fields,
    check_least,
    check_orders,
    own_tables,
)
from memjax.layers.precision import Dtypes
from memjax.layers.projection import projection
from memjax.layers.slot_read import check_std
from memjax.layers.token_rows import TokenRows
from memjax.ops.column_layout import ColumnLayout
from memjax.ops.modular_hash import modular_layout
from memjax.ops.polynomial_hash import FIRST_PRIME, PolynomialLayout
from memjax.parallel.row_sharding import RowSharding

HASHES = ("modular", "polynomial")


@dataclass(frozen=True, kw_only=True)
class NgramEmbeddingConfig(TokenRows, MemoryConfig):
    """Options of an n-gram embedding, beside those of `MemoryConfig`.

    At layer 0, `before_attention` and mode "sum" (the defaults) it is added to the
    token embedding, where both sources have it; elsewhere it is added to the stream.

    Attributes:
        hash: "modular" (arXiv:2601.21204, LongCat; `ops.modular_hash`) or "polynomial"
            (arXiv:2412.09871, BLT; `ops.polynomial_hash`).
        orders: n-gram lengths, ascending; from 2 on with "modular".
        n_heads: tables (hashes) by order. LongCat: 4; BLT: 1.
        rows_per_head: rows of one. "modular" tables have 1, 3, 5, .. rows more, see
            `ops.modular_hash.modular_layout`; LongCat: 78 V.
        primes: of "polynomial", one by head.
        row_width: width W of a row, with a linear map (without bias) of all rows of a
            token to the stream. None: rows as wide as the stream, summed as they are.
            LongCat: W = D / (n_heads * number of orders); BLT: None.
        average: divide the sum of stream and rows by 1 + the number of rows: (x + sum)
            / (1 + C) instead of x + sum. LongCat does; BLT's code adds.
        gate: "none", or "sigmoid": the branch times sigmoid(w . x + b). Ours.
        table_std: standard deviation of the table; None: 1 (the scale of this model's
            token embedding) with row_width None, W^-1/2 else.
    """

    normed_input: ClassVar[bool] = False
    host_table: ClassVar[bool] = True

    layers: tuple[int, ...] = (0,)
    hash: str = "modular"
    orders: tuple[int, ...] = (2, 3, 4)
    n_heads: int = 4
    rows_per_head: int = 4096
    primes: tuple[int, ...] | None = None
    row_width: int | None = 32
    average: bool = True
    gate: str = "none"
    table_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"hash": HASHES, "average": (False, True)})
        check_orders(self.orders)
        check_gate(self, self.gate)
        check_least(self, {"n_heads": 1, "rows_per_head": 1})
        if self.row_width is not None:
            check_least(self, {"row_width": 1})
        check_std(self, "table_std")
        if self.primes is not None and self.hash == "modular":
            raise ConfigError(
                "memories.primes", self.primes, "None when hash = 'modular'"
            )
        if self.primes is None and self.hash == "polynomial" and self.n_heads > 1:
            want = f"{self.n_heads} primes, one a head (n_heads)"
            raise ConfigError("memories.primes", None, want)
        self.row_layout(256)

    def row_layout(self, vocab_size: int) -> ColumnLayout:
        """The hash for a vocabulary; number and size of tables do not depend on it."""
        try:
            if self.hash == "modular":
                return modular_layout(
                    vocab_size, self.orders, self.n_heads, self.rows_per_head
                )
            return PolynomialLayout(
                vocab_size=vocab_size,
                orders=self.orders,
                column_rows=((self.rows_per_head,) * self.n_heads,) * len(self.orders),
                primes=self.primes or (FIRST_PRIME,),
            )
        except ConfigError as error:
            name = {"column_rows": "rows_per_head"}.get(error.field, error.field)
            raise ConfigError(f"memories.{name}", error.value, error.allowed) from None

    @property
    def n_columns(self) -> int:
        """Rows C read per token."""
        return len(self.orders) * self.n_heads

    def table_specs(self, d_model: int) -> dict[str, TableSpec]:
        std = 1.0 if self.row_width is None else self.row_width**-0.5
        std = std if self.table_std is None else self.table_std
        n_rows, width = self.row_layout(256).n_rows, self.row_width or d_model
        return {"table": TableSpec(n_rows, width, std, self.n_columns)}


class NgramEmbedding(nn.Module):
    """One n-gram embedding.

    Parameters: `table` [R, W] (in mode "rows" a variable of the collection "tables"),
    the tables of all columns one after the other; `value` [C * W, D] where rows are
    projected, which is the same as a map of its own for each table; `token_gate` and
    `dense` where the config asks for them.

    Attributes:
        n_rows: rows R, those of `config.row_layout(vocab_size)`.

    Cost per token: C rows, and C * W * D products where they are projected.
    Source: arXiv:2601.21204 (LongCat) and arXiv:2412.09871 (BLT). Differs: the initial
    kernel has the fan-in of all rows together, not of one table's; padding reads
    nothing; everything else that a memory can do (gate, dropout, modes, places) is
    there to be compared.
    """

    config: NgramEmbeddingConfig
    n_rows: int
    dtypes: Dtypes
    sharding: RowSharding | None = None

    @nn.compact
    def read(
        self,
        x_BTD: Array,
        inputs: MemoryInputs,
        *,
        train: bool = False,
        drop: bool = False,
    ) -> Array:
        """The branch to be added to the stream.

        Args:
            x_BTD: the stream.
            inputs: of it segments_BT, tables and rows_BTC, int32 [B, T, C].
            train: apply memory dropout (needs the rng "dropout").
            drop: drop the read of every sequence.

        Returns:
            [B, T, D] in the dtype of `x_BTD`.
        """
        config, (n_batch, n_tokens, d_model) = self.config, x_BTD.shape
        acc = self.dtypes.accumulation
        rows_BTC, n_columns = inputs.rows_BTC, config.n_columns
        if rows_BTC is None:
            raise ShapeError("rows_BTC", (), (n_batch, n_tokens, n_columns))
        check_shape("rows_BTC", rows_BTC, (n_batch, n_tokens, n_columns))
        table = own_tables(
            self,
            config,
            config.table_specs(d_model),
            inputs.tables,
            self.dtypes,
            self.sharding,
        )["table"]
        if config.row_width is None:
            sum_BTD = table.bag(self, rows_BTC, jnp.ones(rows_BTC.shape, acc))
        else:
            rows_BTE = table.gather(self, rows_BTC).reshape(n_batch, n_tokens, -1)
            rows_BTE = rows_BTE.astype(self.dtypes.compute)
            sum_BTD = projection("value", d_model, self.dtypes)(rows_BTE)
        sum_BTD = sum_BTD.astype(acc)
        if config.average:
            # x + branch is then (x + sum) / (1 + C).
            sum_BTD = (sum_BTD - n_columns * x_BTD.astype(acc)) / (1 + n_columns)
        gate_BT = token_gate(config.gate, x_BTD, self.dtypes)
        return join(
            self,
            config,
            sum_BTD,
            jnp.where(inputs.segments_BT > 0, gate_BT, 0),
            x_BTD,
            self.dtypes,
            train=train,
            drop=drop,
        )
