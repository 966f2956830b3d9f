"""Slow n-gram rows in python integers, one token at a time, from the definition."""

from collections.abc import Sequence

from memjax.ops.ngram_hash import NgramLayout


def ngram_rows(
    ids: Sequence[int], layout: NgramLayout, segments: Sequence[int] | None = None
) -> list[list[int]]:
    """Rows of one sequence; -1 is DEAD, segment 0 is padding."""
    segments = [1] * len(ids) if segments is None else segments
    rows = []
    for t in range(len(ids)):
        seen = []
        open_ = True
        for k in range(layout.max_order):
            at = t - k
            open_ = (
                open_
                and at >= 0
                and ids[at] != -1
                and segments[at] != 0
                and segments[at] == segments[t]
            )
            seen.append(ids[at] if open_ else layout.pad_id)
        row = []
        for g, n in enumerate(layout.orders):
            mix = 0
            for k in range(n):
                mix ^= seen[k] * layout.multipliers[k]
            for head in range(layout.n_heads):
                column = g * layout.n_heads + head
                row.append(mix % layout.primes[g][head] + layout.offsets[column])
        rows.append(row)
    return rows
