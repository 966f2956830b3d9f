"""What storing and sending the rows of value tables in other forms would cost.

What: `Form`, three ways to hold a row, and `form_costs` on a number of chips.
Why: the form of a row decides whether tables fit and what their exchange takes, and is
    cheapest to choose on paper.
When not: what a run of this experiment does; that is the rest of a plan. The two forms
    with 8-bit rows are on paper: the trainer keeps rows in float32 or bfloat16.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memjax.report.chips import Chip, exchange_s

FP8_BLOCK = 32
_VECTOR_BYTES = 2  # a value, and its gradient, travel as bfloat16


@dataclass(frozen=True)
class Table:
    """A table as a plan sees it.

    Attributes:
        path: its name.
        rows: R; width: W.
        reads: rows that a token reads.
        mode: "dense", "rows", "host" or "fp8".
        itemsize: bytes of an entry as stored.
        row_state_bytes: of its optimizer's state for a row that is updated.
        weighed: whether a read is a weighted sum of rows, and not the rows.
        moving: rows that its optimizer moves in every step, read or not.
        slots: rows of a table on the host that the device holds.
    """

    path: str
    rows: int
    width: int
    reads: int
    mode: str
    itemsize: int
    row_state_bytes: float
    weighed: bool
    moving: int = 0
    slots: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as stored, with the scales of 8-bit floats."""
        return row_bytes(self.width, 1 if self.mode == "fp8" else self.itemsize)

    @property
    def by_rows(self) -> bool:
        """Whether a step has gradients of the rows that it reads, and of no others."""
        return self.mode in ("rows", "host")

    @property
    def vectors(self) -> int:
        """Vectors of width W that a token gets."""
        return 1 if self.weighed else self.reads


def row_bytes(width: int, itemsize: int) -> int:
    """Bytes of a row; an itemsize of 1 is FP8, with a scale for 32 entries."""
    return width * itemsize + (math.ceil(width / FP8_BLOCK) if itemsize == 1 else 0)


@dataclass(frozen=True)
class Form:
    """How a table is held.

    Attributes:
        name: for people.
        row: bytes of an entry that is read and sent; 1 is FP8.
        beside: bytes of an entry of all that lies beside it: master copy, momentum.
    """

    name: str
    row: int
    beside: int


FORMS = (
    Form("FP8 + float32 master + bfloat16 momentum", 1, 6),
    Form("FP8 + bfloat16 master + bfloat16 momentum", 1, 4),
    Form("bfloat16 + bfloat16 momentum", 2, 2),
    Form("float32 + float32 momentum", 4, 4),
)


def rows_read(rows: int, reads: float) -> float:
    """Distinct rows among `reads` uniform ones of a table: R (1 - exp(-reads / R)).

    An upper bound for text, which repeats its n-grams.
    """
    return rows * -math.expm1(-reads / rows)


def rows_entering(table: Table, reads: float) -> float:
    """Rows that a step fetches from the host; as many leave.

    Of uniform reads, those of rows that are not in a slot.
    """
    if table.mode != "host":
        return 0.0
    return rows_read(table.rows, reads) * (1 - table.slots / table.rows)


def form_costs(
    tables: Sequence[Table], chip: Chip, n_chips: int, n_tokens: int
) -> list[dict[str, Any]]:
    """For each form: bytes and times of a chip, tokens and tables divided by all.

    Rows go from the chip that holds them to the one whose token asks, packed, and
    gradients go back: an all-to-all. `copies_s` is the memory traffic on the way there:
    a row is read, packed, received and unpacked, and written as a bfloat16 vector.

    Args:
        tables: all tables of a model.
        chip, n_chips: the machine.
        n_tokens: of a step, on all chips.

    Returns:
        Plain data, times in seconds, bytes for a chip.
    """
    entries = sum(table.rows * table.width for table in tables)
    vectors = sum(_VECTOR_BYTES * t.width * t.vectors for t in tables)
    vector_bytes = n_tokens * vectors / n_chips
    found = []
    for form in FORMS:
        stored = sum(t.rows * row_bytes(t.width, form.row) for t in tables)
        sent = sum(t.reads * row_bytes(t.width, form.row) for t in tables)
        sent *= n_tokens / n_chips
        state = (stored + entries * form.beside) / n_chips
        found.append(
            {
                "form": form.name,
                "row_bytes": max(row_bytes(t.width, form.row) for t in tables),
                "state_bytes": state,
                "fits": state <= chip.memory,
                "rows_bytes": sent,
                "gradient_bytes": vector_bytes,
                "forward_s": exchange_s(chip, sent, n_chips),
                "back_s": exchange_s(chip, vector_bytes, n_chips),
                "copies_s": (4 * sent + vector_bytes) / chip.copy_rate,
                "host_s": sent / chip.host_rate,
            }
        )
    return found


def update_s(
    tables: Sequence[Table], chip: Chip, n_chips: int, n_tokens: int
) -> Mapping[str, float]:
    """Seconds to read and write table and momentum, float32: all rows, and those read.

    Rows that are read are counted as if drawn uniformly.
    """
    all_rows = sum(t.rows * t.width for t in tables)
    read = sum(rows_read(t.rows, n_tokens * t.reads) * t.width for t in tables)
    rate = chip.copy_rate * n_chips / (2 * 2 * 4)
    return {"all": all_rows / rate, "read": read / rate}
