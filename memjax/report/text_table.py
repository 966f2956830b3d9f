"""Aligned text tables: plain for a terminal, Markdown for a README.

What: `text_table(header, rows, markdown)`.
Why: every table of the command line looks alike and can be pasted.
When not: numbers for a program; commands print JSON for that.
"""

from collections.abc import Sequence


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False
) -> str:
    """Rows under a header, columns aligned: the first left, numbers to the right.

    A column is right-aligned when each of its non-empty cells starts like a number.
    No trailing blanks; an empty `rows` prints the header alone.
    """
    if any(len(row) != len(header) for row in rows):
        raise ValueError(f"every row needs {len(header)} cells")
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [
        all(cell[:1].isdigit() or cell[:1] in "+-." for cell in column[1:] if cell)
        and any(column[1:])
        for column in columns
    ]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(cells, widths, right, strict=True)
        ]
        if markdown:
            return "| " + " | ".join(padded) + " |"
        return "  ".join(padded).rstrip()

    if markdown:
        rule = "|".join(
            "-" * (width + 1) + (":" if numeric else "-")
            for width, numeric in zip(widths, right, strict=True)
        )
        rule = f"|{rule}|"
    else:
        rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *map(line, rows)])
