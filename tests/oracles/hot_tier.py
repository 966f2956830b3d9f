"""Slow hot tier: n-grams as tuples, counted in a dictionary, ranked by hand."""

from collections.abc import Sequence


def grams(ids: Sequence[int], segments: Sequence[int], order: int):
    """The n-gram (newest first) that ends at each token; None where it is not whole."""
    found = []
    for t in range(len(ids)):
        places = [t - k for k in range(order)]
        whole = places[-1] >= 0 and segments[t] > 0
        whole = whole and all(
            ids[p] >= 0 and segments[p] == segments[t] for p in places
        )
        found.append(tuple(int(ids[p]) for p in places) if whole else None)
    return found


def ranked(rows, order: int, vocab: int) -> list[tuple[int, ...]]:
    """All n-grams of (ids, segments) rows: falling count, then rising number."""
    counts: dict[tuple[int, ...], int] = {}
    for ids, segments in rows:
        for gram in grams(ids, segments, order):
            if gram is not None:
                counts[gram] = counts.get(gram, 0) + 1

    def number(gram: tuple[int, ...]) -> int:
        return sum(x * vocab**k for k, x in enumerate(gram))

    return sorted(counts, key=lambda gram: (-counts[gram], number(gram)))


def hot_rows(ids, segments, hot: Sequence[Sequence[tuple[int, ...]]]) -> list:
    """Row in the hot table or -1, for each token and each list of hot n-grams."""
    columns, offset = [], 0
    for chosen in hot:
        order = len(chosen[0]) if chosen else 1
        column = [
            offset + chosen.index(gram) if gram in chosen else -1
            for gram in grams(ids, segments, order)
        ]
        columns.append(column)
        offset += len(chosen)
    return [list(row) for row in zip(*columns, strict=True)]
