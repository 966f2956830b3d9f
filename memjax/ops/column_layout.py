"""Where the rows of each hash column lie in one table.

What: `ColumnLayout`, sizes and offsets by order and head, for every hash but Engram's.
Why: whoever reads, measures or saves a hashed table needs the same few numbers.
When not: Engram's layout, with its primes and multipliers; see ngram_layout.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import jax
import numpy as np

from memjax.errors import ConfigError

_MAX_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ColumnLayout:
    """Rows of a table by hash column; column c = (index of the order) * H + head.

    Attributes:
        vocab_size: ids are 0 .. vocab_size - 1.
        orders: n-gram lengths, ascending, each at least 1.
        column_rows: per order, per head: rows of that column.

    Raises:
        ConfigError: the numbers do not belong together, or the table would have 2^31
            rows or more.
    """

    vocab_size: int
    orders: tuple[int, ...]
    column_rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_orders(self.orders)
        if not 1 <= self.vocab_size <= _MAX_ID:
            raise ConfigError("vocab_size", self.vocab_size, f"1 to {_MAX_ID}")
        heads = [len(rows) for rows in self.column_rows]
        if len(heads) != len(self.orders) or len(set(heads)) != 1 or heads[0] < 1:
            want = f"{len(self.orders)} orders of equally many heads"
            raise ConfigError("column_rows", self.column_rows, want)
        if min(self.flat_rows) < 1 or self.n_rows > _MAX_ID:
            want = f"1 or more each, at most {_MAX_ID} together"
            raise ConfigError("column_rows", self.column_rows, want)

    @property
    def flat_rows(self) -> tuple[int, ...]:
        """Rows of each column."""
        return tuple(n for rows in self.column_rows for n in rows)

    @property
    def n_rows(self) -> int:
        """Rows R of the table."""
        return sum(self.flat_rows)

    @property
    def n_heads(self) -> int:
        """Columns of each order."""
        return len(self.column_rows[0])

    @property
    def n_columns(self) -> int:
        """Rows read per token."""
        return len(self.flat_rows)

    @property
    def max_order(self) -> int:
        """Length of the longest n-gram; the history has one id less."""
        return self.orders[-1]

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each column."""
        return tuple(accumulate(self.flat_rows, initial=0))[:-1]

    @property
    def pad_id(self) -> int:
        """The id that stands for a token that may not be seen."""
        return 0

    def seen_ids(self, ids_BT: Any) -> Any:
        """The ids that windows are made of, numpy or jax; -1 for what is none."""
        return ids_BT

    def rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> jax.Array:
        """int32 rows [..., T, C] inside jit, offsets added.

        Arguments and errors as in `ngram_hash.ngram_rows`: an id outside gives BAD_ROW
        in every column whose window sees it.
        """
        raise NotImplementedError(type(self).__name__)

    def host_rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> np.ndarray:
        """`rows` on the host, bit-equal; DataError for an id outside."""
        raise NotImplementedError(type(self).__name__)

    def fingerprint(self) -> str:
        """SHA-256 (hex) over kind and numbers: equal iff the rows mean the same."""
        numbers = {"kind": type(self).__name__, **asdict(self)}
        text = json.dumps(numbers, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def check_orders(orders: tuple[int, ...], field: str = "orders") -> None:
    """ConfigError unless the orders ascend and are at least 1."""
    good = isinstance(orders, tuple) and list(orders) == sorted(set(orders))
    if not good or not orders or orders[0] < 1:
        raise ConfigError(field, orders, "a tuple of ascending n-gram lengths from 1")
