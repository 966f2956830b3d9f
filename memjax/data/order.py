"""Orders that are pure functions of a few integers.

What: a permutation of 0..n-1 from a key, by sorting hashes; and a small cache.
Why: any window of any epoch can be addressed without replaying what came before, and
the order cannot change with the release of a library.
When not: nothing here is random enough for anything but shuffling.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1


def _mix(value: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, a bijection of uint64. Works in place."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


def permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of 0..n-1, int64 [n], that depends on n and the key only.

    Args:
        n: length, 0 allowed.
        key: integers 0 <= k < 2**64; another key gives another order.

    Cost: sorting n 64-bit hashes, about 0.15 s for a million.
    """
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state + np.uint64((part + 0x9E3779B97F4A7C15) & _MASK))
    # The state enters twice, around a mixing, so that two keys never give orders that
    # are images of each other under one fixed map of the numbers.
    hashes = _mix(_mix(np.arange(n, dtype=np.uint64) + state) ^ state)
    return np.argsort(hashes, kind="stable")


class EpochCache:
    """Keeps the last few values of a function of the epoch; safe between threads.

    A value is made once, while other threads that want it wait. Pickles without its
    values.
    """

    def __init__(self, make: Callable[[int], Any], size: int) -> None:
        self._make = make
        self._size = size
        self._start_empty()

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[int, Any] = OrderedDict()

    def __call__(self, epoch: int) -> Any:
        with self._lock:
            if epoch in self._values:
                self._values.move_to_end(epoch)
            else:
                self._values[epoch] = self._make(epoch)
                if len(self._values) > self._size:
                    self._values.popitem(last=False)
            return self._values[epoch]

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_size": self._size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_empty()
