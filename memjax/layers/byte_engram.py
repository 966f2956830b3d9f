"""Engram's read of rows that are addressed by FNV hashes of the last bytes.

What: `ByteEngramConfig`; the module is `Engram`.
Why: byte models without a tokenizer; sehaxe/dormouse hashes the last 3, 5 and 8
    bytes.
When not: token vocabularies, and Engram's own hash; see `engram`.
"""

from dataclasses import dataclass

from memjax.errors import ConfigError
from memjax.layers.engram import EngramConfig
from memjax.layers.memory import TableSpec
from memjax.layers.token_rows import TokenRows
from memjax.ops.byte_hash import FNV_BASES, ByteLayout


@dataclass(frozen=True, kw_only=True)
class ByteEngramConfig(TokenRows, EngramConfig):
    """Options beside those of `EngramConfig`; the defaults here are dormouse's.

    One hash by order, `rows_per_head` rows each (a tuple: by order). The hash has no
    seed and no padding id, so those fields of Engram keep their defaults.
    What is known of dormouse is its addressing, its table (rows of width 32 from
    N(0, 0.02^2)) and its orders; that its rows are joined as Engram's is ours.

    Attributes:
        basis: offset basis of FNV-1a, "dormouse" or "standard"; see `ops.byte_hash`.
    """

    orders: tuple[int, ...] = (3, 5, 8)
    n_heads: int = 1
    row_width: int = 32
    table_std: float = 0.02
    basis: str = "dormouse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.basis not in FNV_BASES:
            raise ConfigError(
                "memories.basis", self.basis, f"one of {sorted(FNV_BASES)}"
            )
        for field, only in (
            ("n_heads", 1),
            ("hash_seed", 0),
            ("pad_id", None),
            ("n_token_classes", None),
        ):
            if getattr(self, field) != only:
                raise ConfigError(
                    f"memories.{field}", getattr(self, field), f"{only}: FNV has none"
                )

    def table_specs(self, d_model: int) -> dict[str, TableSpec]:
        """The table, the same in all layers."""
        del d_model
        return self.specs(self.row_layout(256).n_rows)

    def row_layout(self, vocab_size: int) -> ByteLayout:
        """For bytes (and a separator); ConfigError for a larger vocabulary."""
        sizes = self.rows_per_head
        if isinstance(sizes, int):
            sizes = (sizes,) * len(self.orders)
        try:
            return ByteLayout(
                vocab_size=vocab_size,
                orders=self.orders,
                column_rows=tuple((size,) for size in sizes),
                basis=self.basis,
            )
        except ConfigError as error:
            name = {"column_rows": "rows_per_head"}.get(error.field, error.field)
            raise ConfigError(f"memories.{name}", error.value, error.allowed) from None
