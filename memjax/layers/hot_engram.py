"""Engram with rows of their own for the most frequent n-grams.

What: `HotEngram`: where the n-gram of an order is hot, one row of a hot table stands in
    for the rows of that order's heads; all else is Engram.
Why: frequent n-grams then share no row with anybody (arXiv:2601.16531).
When not: finding the n-grams; see ops.hot_tier and evaluate.hot_ngrams.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError
from memjax.layers.engram import Engram, EngramConfig
from memjax.layers.memory import TableSpec
from memjax.layers.record import record
from memjax.layers.table import Table
from memjax.ops.hot_tier import MISS, HotLayout, load_hot_index
from memjax.ops.ngram_layout import NgramLayout


@dataclass(frozen=True, kw_only=True)
class HotEngramConfig(EngramConfig):
    """Options of a hot tier, beside those of `EngramConfig`.

    Attributes:
        hot_rows: how many n-grams of each order are hot, the most frequent ones; a
            tuple gives one number per order. 0: none, which is Engram.
        hot_file: what `evaluate.hot_ngrams` found, saved by `HotIndex.save`. Needed
            when any n-gram is hot, and counted in the ids (or token classes) that are
            hashed. A checkpoint holds a fingerprint of the n-grams, not the file.
        hot_sha256: `HotIndex.sha256` that the file must have; None: any.
    """

    host_table: ClassVar[bool] = False

    hot_rows: int | tuple[int, ...] = 0
    hot_file: str | None = None
    hot_sha256: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.hot_rows
        if isinstance(sizes, tuple) and len(sizes) != len(self.orders):
            want = f"one number, or one for each of the {len(self.orders)} orders"
            raise ConfigError("memories.hot_rows", sizes, want)
        for size in sizes if isinstance(sizes, tuple) else (sizes,):
            if type(size) is not int or size < 0:
                raise ConfigError("memories.hot_rows", sizes, "integers >= 0")
        if self.n_hot > 0 and self.hot_file is None:
            want = "a file of n-grams when hot_rows > 0"
            raise ConfigError("memories.hot_file", None, want)
        for field in ("hot_file", "hot_sha256"):
            value = getattr(self, field)
            if value is None or (self.n_hot > 0 and isinstance(value, str)):
                continue
            want = "a text" if self.n_hot else "None when hot_rows = 0"
            raise ConfigError(f"memories.{field}", value, want)

    @property
    def hot_sizes(self) -> tuple[int, ...]:
        """Hot n-grams of each order."""
        sizes = self.hot_rows
        return sizes if isinstance(sizes, tuple) else (sizes,) * len(self.orders)

    @property
    def n_hot(self) -> int:
        """Hot n-grams of all orders."""
        return sum(self.hot_sizes)

    @property
    def hot_width(self) -> int:
        """Width of a hot row: that of the rows of an order's heads together."""
        return self.n_heads * self.row_width

    def table_widths(self, d_model: int) -> dict[str, int]:
        widths = super().table_widths(d_model)
        return widths | ({"hot_table": self.hot_width} if self.n_hot else {})

    def specs(self, n_rows: int) -> dict[str, TableSpec]:
        """The hashed table, and the hot one with one row more, for what is not hot."""
        found = super().specs(n_rows)
        if self.n_hot:
            found["hot_table"] = TableSpec(
                self.n_hot + 1, self.hot_width, self.table_std, len(self.orders)
            )
        return found

    def layout_of(self, layout: NgramLayout) -> NgramLayout | HotLayout:
        """The hash's layout with the hot n-grams; reads `hot_file`."""
        if self.hot_file is None:
            return layout
        index = load_hot_index(self.hot_file)
        if self.hot_sha256 not in (None, index.sha256):
            want = f"{index.sha256}, that of {self.hot_file}"
            raise ConfigError("memories.hot_sha256", self.hot_sha256, want)
        return HotLayout(layout, index, self.hot_sizes)


class HotEngram(Engram):
    """Gated n-gram memory with a hot tier; see `Engram` for all that is not said here.

    Parameters: those of `Engram` and, where n-grams are hot, `hot_table` [hot + 1,
    H * W] (in mode "rows" in the collection "tables"). Its last row stands for all that
    is not hot; it is read and thrown away, so its gradient is 0, and so is that of the
    cold rows of a hot n-gram.

    Reads rows [B, T, C + G]: those of the hash, then a column per order in the hot
    table, or MISS. Records beside Engram's: "hot_frac", the part of the (token, order)
    pairs at real positions that were hot.

    Cost: beside Engram's, G rows of width H * W for each token.
    Source: arXiv:2601.16531 ("Engram-Nine"; a preprint by one author, without code that
    we know of). Differs: exact search instead of a perfect hash with fingerprints.
    """

    config: HotEngramConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def columns(self) -> int:
        hot = len(self.config.orders) if self.config.n_hot else 0
        return super().columns() + hot

    def retrieve(
        self, tables: dict[str, Table], rows_BTC: Array, token_mask_BT: Array | None
    ) -> Array:
        """Rows [B, T, G, H * W], hot or cold."""
        config = self.config
        n_orders = len(config.orders)
        if not config.n_hot:
            return super().retrieve(tables, rows_BTC, token_mask_BT)
        cold_BTCW = super().retrieve(tables, rows_BTC[..., :-n_orders], token_mask_BT)
        hot_BTG = rows_BTC[..., -n_orders:]
        is_hot_BTG = hot_BTG != MISS
        hot_rows_BTG = jnp.where(is_hot_BTG, hot_BTG, config.n_hot)
        hot_BTGE = tables["hot_table"].gather(self, hot_rows_BTG)
        real_BT1 = jnp.ones(hot_BTG.shape[:2], bool)[..., None]
        if token_mask_BT is not None:
            real_BT1 = token_mask_BT[..., None]
        pairs = jnp.maximum(jnp.sum(real_BT1) * n_orders, 1)
        record(self, "hot_frac", jnp.sum(is_hot_BTG & real_BT1) / pairs)
        cold_BTGE = cold_BTCW.reshape(hot_BTGE.shape)
        return jnp.where(is_hot_BTG[..., None], hot_BTGE, cold_BTGE)
