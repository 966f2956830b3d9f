"""How often each n-gram of a corpus occurs, counted on the host.

What: `KeyCounts` of a stream of keys, and `NgramCounts`, which counts a corpus, answers
    for any token how often its n-gram was there, and names the most frequent ones.
Why: whether a memory helps on what it saw often or on what it saw once is decided by
    these counts.
When not: which rows a table reads; see ops.ngram_hash.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from memjax.errors import ConfigError
from memjax.ops.look_back import look_backs
from memjax.ops.ngram_key import keys_are_exact, ngram_keys

_PENDING = 1 << 20


class KeyCounts:
    """Distinct keys of a stream, how often each came, and values of its first coming.

    Args:
        n_values: int32 values that come with a key; the same key must bring the same.

    Cost: 16 + 4 * n_values bytes per distinct key, up to twice that while pieces wait
        to be merged; a sort of the stream, and of the distinct keys a few times.
    """

    def __init__(self, n_values: int = 0) -> None:
        self._merged = _empty(n_values)
        self._pending: list[tuple[np.ndarray, ...]] = []

    def add(self, keys: np.ndarray, values: np.ndarray | None = None) -> None:
        """Count uint64 keys [P] that bring int32 values [P, n_values]."""
        if values is None:
            values = np.zeros((len(keys), 0), np.int32)
        self._pending.append(_merge([(keys, np.ones(len(keys), np.int64), values)]))
        waiting = sum(len(keys) for keys, _, _ in self._pending)
        if waiting > max(_PENDING, len(self._merged[0])):
            self.result()

    def result(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(keys uint64 [U] ascending, counts int64 [U], values int32 [U, n_values])."""
        if self._pending:
            self._merged = _merge([self._merged, *self._pending])
            self._pending = []
        return self._merged

    def counts_of(self, keys: np.ndarray) -> np.ndarray:
        """int64, the shape of `keys`: how often each came; 0 for those that did not."""
        known, counts, _ = self.result()
        if not len(known):
            return np.zeros(keys.shape, np.int64)
        place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        return np.where(known[place] == keys, counts[place], 0)


class NgramCounts:
    """Counts of the n-grams inside documents.

    Args:
        order: n >= 1.
        vocab_size: ids are 0 .. vocab_size - 1.

    Attributes:
        exact: False when n-grams are told apart by a 64-bit mix; see `ngram_keys`.

    Raises:
        ConfigError: the order is not a whole number of at least 1.
    """

    def __init__(self, order: int, vocab_size: int) -> None:
        if not isinstance(order, int) or order < 1:
            raise ConfigError("order", order, "a whole number of at least 1")
        self.order, self.vocab_size = order, vocab_size
        self.exact = keys_are_exact(order, vocab_size)
        self._counts = KeyCounts()

    def add(self, ids_BT: Any, segments_BT: Any) -> None:
        """Count the n-grams of some rows; what reaches out of a segment is none."""
        keys_BT, whole_BT = self._keys(ids_BT, segments_BT)
        self._counts.add(keys_BT[whole_BT])

    def of(self, ids_BT: Any, segments_BT: Any) -> np.ndarray:
        """int64 [B, T]: how often the n-gram that ends at each token was counted.

        -1 where the segment holds fewer than n tokens up to there, and at padding.
        """
        keys_BT, whole_BT = self._keys(ids_BT, segments_BT)
        return np.where(whole_BT, self._counts.counts_of(keys_BT), -1)

    def most_frequent(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys (uint64) and counts of the n most frequent n-grams, or of all there are.

        By falling count, equal counts by rising key (`ops.ngram_key.ngram_keys`).
        """
        keys, counts, _ = self._counts.result()
        best = np.argsort(-counts, kind="stable")[:n]
        return keys[best], counts[best]

    def _keys(self, ids_BT: Any, segments_BT: Any) -> tuple[np.ndarray, np.ndarray]:
        windows = look_backs(np.asarray(ids_BT), self.order, segments_BT=segments_BT)
        tokens = [np.where(blocked, 0, token) for token, blocked in windows]
        return ngram_keys(tokens, self.vocab_size), ~windows[-1][1]


def _empty(n_values: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = np.zeros((0, n_values), np.int32)
    return np.zeros(0, np.uint64), np.zeros(0, np.int64), values


def _merge(
    parts: Sequence[tuple[np.ndarray, ...]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    keys, counts, values = (np.concatenate(part) for part in zip(*parts, strict=True))
    distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, inverse, counts)
    return distinct, total, values[first]
