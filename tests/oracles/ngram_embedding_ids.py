"""Slow row ids of n-gram embeddings in python integers, from the definitions."""

from collections.abc import Sequence


def windows(ids: Sequence[int], segments: Sequence[int], n: int) -> list[list[int]]:
    """For each token its n newest ids, newest first; 0 from the first unseen one on.

    An id of -1, padding (segment 0), another segment and the start are unseen.
    """
    found = []
    for t in range(len(ids)):
        window, open_ = [], True
        for k in range(n):
            inside = t - k >= 0 and ids[t - k] >= 0 and segments[t] > 0
            open_ = open_ and inside and segments[t - k] == segments[t]
            window.append(ids[t - k] if open_ else 0)
        found.append(window)
    return found


def polynomial_rows(ids, segments, orders, sizes, primes) -> list[list[int]]:
    """Wrapping signed 64-bit polynomial, oldest id to the power 0, floor modulo."""
    rows = []
    for t in range(len(ids)):
        row, offset = [], 0
        for order, of_order in zip(orders, sizes, strict=True):
            window = windows(ids, segments, order)[t][::-1]
            for prime, size in zip(primes, of_order, strict=True):
                value = sum(x * prime**i for i, x in enumerate(window))
                signed = (value + 2**63) % 2**64 - 2**63
                row.append(signed % size + offset)
                offset += size
        rows.append(row)
    return rows


def modular_rows(ids, segments, orders, sizes, vocab: int) -> list[list[int]]:
    """sum of x_k * (V^k mod q) mod q."""
    rows = []
    for t in range(len(ids)):
        row, offset = [], 0
        for order, of_order in zip(orders, sizes, strict=True):
            window = windows(ids, segments, order)[t]
            for size in of_order:
                terms = [x * (vocab**k % size) for k, x in enumerate(window)]
                row.append(sum(terms) % size + offset)
                offset += size
        rows.append(row)
    return rows
