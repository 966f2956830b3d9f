"""Slow FNV-1a of byte windows in python integers, from the definition."""

from collections.abc import Sequence

_PRIME = 1099511628211


def window_hash(window: Sequence[int], basis: int) -> int:
    """FNV-1a of a window, oldest byte first."""
    value = basis
    for byte in window:
        value = (value ^ byte) * _PRIME % 2**64
    return value


def byte_rows(
    data: Sequence[int], orders: Sequence[int], slots: Sequence[int], basis: int
) -> list[list[int]]:
    """Rows of one byte sequence without segments."""
    return [
        [
            window_hash(data[max(0, t + 1 - n) : t + 1], basis) % slots[g]
            + sum(slots[:g])
            for g, n in enumerate(orders)
        ]
        for t in range(len(data))
    ]
