"""Into which parts a table is divided, without devices.

What: `Division`, by rows, by columns or by hash columns; `divisions_of` a checkpoint.
Why: shapes, padding and what a checkpoint holds follow from a few numbers.
When not: reading a divided table; that is `row_sharding`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError

DIVISIONS = ("rows", "columns", "hash_columns")


@dataclass(frozen=True)
class Division:
    """Into which parts a table is divided; plain data, as a checkpoint records it.

    Attributes:
        n_parts: parts of the table; 1: not divided.
        by: "rows": part i holds rows i * n .. (i + 1) * n - 1; "columns": every part
            holds all rows and an equal share of the columns; "hash_columns": part i
            holds the rows of C / n_parts hash columns, which lie one after the other.
            By rows and hash columns, parts are padded to the same number of rows with
            rows of zeros that nobody sees.
        column_rows: by "hash_columns" the rows of each of the C hash columns.
    """

    n_parts: int = 1
    by: str = "rows"
    column_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.n_parts < 1:
            raise ConfigError("n_parts", self.n_parts, "at least 1 part")
        if self.by not in DIVISIONS:
            raise ConfigError("by", self.by, f"one of {DIVISIONS}")
        if (self.by == "hash_columns") != bool(self.column_rows):
            want = "the rows of each hash column by 'hash_columns', else ()"
            raise ConfigError("column_rows", self.column_rows, want)
        if len(self.column_rows) % self.n_parts:
            want = f"a divisor of the {len(self.column_rows)} hash columns"
            raise ConfigError("n_parts", self.n_parts, want)

    @property
    def row_parts(self) -> int:
        """Parts that the rows are divided into."""
        return 1 if self.by == "columns" else self.n_parts

    def bounds(self, n_rows: int) -> tuple[int, ...]:
        """First row of each part of a table of n_rows rows, and n_rows."""
        if self.column_rows:
            if sum(self.column_rows) != n_rows:
                want = f"{n_rows} rows together"
                raise ConfigError("column_rows", self.column_rows, want)
            ends = tuple(accumulate(self.column_rows, initial=0))
            return ends[:: len(self.column_rows) // self.n_parts]
        size = -(-n_rows // self.row_parts)
        return tuple(min(i * size, n_rows) for i in range(self.row_parts + 1))

    def padded(self, n_rows: int) -> int:
        """Rows stored for a table of n_rows rows."""
        bounds = self.bounds(n_rows)
        return self.row_parts * int(np.max(np.diff(bounds)))

    def shape(self, n_rows: int, width: int) -> tuple[int, int]:
        """Stored shape of a table of n_rows rows.

        Raises:
            ConfigError: the columns do not divide into equal parts.
        """
        if self.by == "columns" and width % self.n_parts:
            raise ConfigError(
                "row_width", width, f"a multiple of the {self.n_parts} parts by columns"
            )
        return self.padded(n_rows), width

    def spread(self, array: Any, n_rows: int) -> Any:
        """An array [R, ...] by rows of the whole table, numpy or jax, as it is stored:
        padding in its place."""
        numpy = np if isinstance(array, np.ndarray) else jnp
        bounds, size = self.bounds(n_rows), self.padded(n_rows) // self.row_parts
        rest = ((0, 0),) * (array.ndim - 1)
        if not self.column_rows:  # all padding is at the end
            return numpy.pad(array, ((0, size * self.row_parts - n_rows), *rest))
        parts = [
            numpy.pad(array[start:end], ((0, size - (end - start)), *rest))
            for start, end in zip(bounds, bounds[1:], strict=False)
        ]
        return numpy.concatenate(parts)

    def joined(self, array: np.ndarray, n_rows: int) -> np.ndarray:
        """The inverse of `spread`, on the host."""
        bounds, size = self.bounds(n_rows), self.padded(n_rows) // self.row_parts
        if not self.column_rows:
            return array[:n_rows]
        sizes = enumerate(np.diff(bounds))
        return np.concatenate([array[i * size : i * size + n] for i, n in sizes])


def divisions_of(layout: Mapping[str, Any]) -> dict[str, Division]:
    """{path: its parts} of the tables of a checkpoint, from what it says of them."""
    columns = layout.get("columns", {})
    found = {}
    for path in layout["rows"]:
        rows, by = tuple(columns.get(path, ())), layout["by"]
        by = "rows" if by == "hash_columns" and not rows else by
        found[path] = Division(layout["parts"], by, rows)
    return found
