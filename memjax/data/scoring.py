"""Rows for evaluation: every token of a store scored once.

What: windows of `context` tokens that slide by `stride` through each document.
Why: a score is comparable only if all bytes count once and the context is stated.
When not: training packs documents end to end (`memjax.data.packing`).

The rule. A document is its separator and its tokens; the first window scores all its
targets; each further window begins `stride` later and scores only the targets that no
window before it scored. So every token of a document is scored once, with at least
context - stride tokens of its document before it, or all of them near its beginning.
Separators are never scored. A window never crosses a document. Windows shorter than
`context` share a row, in order, as segments of their own.
"""

import numpy as np

from memjax.data.packing import Batch
from memjax.data.store import TokenStore


class ScoredRows:
    """The evaluation rows of one store; `fill` is safe between threads.

    Attributes:
        n_rows: rows that hold all windows.
        n_bytes: bytes of the text that the windows cover, that is all.
        n_targets: scored tokens over all rows, that is all of the store.

    Cost: a few int64 per window.
    """

    def __init__(self, store: TokenStore, *, context: int, stride: int) -> None:
        self._store = store
        self._context = context
        self._stride = stride
        self.n_bytes = store.n_bytes
        self.n_targets = store.n_tokens
        lengths = store.lengths
        extra = np.maximum(lengths - context, 0)
        counts = np.where(lengths > 0, 1 + -(-extra // stride), 0)
        self._document = np.repeat(np.arange(len(lengths)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        self._number = np.arange(len(self._document)) - first
        sizes = np.minimum(lengths[self._document] - self._number * stride, context)
        self._row_starts = self._pack(sizes)
        self.n_rows = len(self._row_starts) - 1

    def _pack(self, sizes: np.ndarray) -> np.ndarray:
        """First window of each row, and the number of windows at the end."""
        starts = []
        room = 0
        for window, size in enumerate(sizes.tolist()):
            if size > room:
                starts.append(window)
                room = self._context
            room -= size
        return np.array([*starts, len(sizes)], np.int64)

    def fill(self, batch: Batch, row: int, number: int) -> None:
        """Write row 0 <= number < n_rows into a row of a batch of zeros."""
        filled = 0
        windows = range(self._row_starts[number], self._row_starts[number + 1])
        for segment, window in enumerate(windows, start=1):
            document = self._document[window]
            start = int(self._number[window]) * self._stride
            size = min(int(self._store.lengths[document]) - start, self._context)
            place = int(self._store.starts[document]) + start
            span = slice(filled, filled + size)
            tokens, targets = batch["tokens"][row, span], batch["targets"][row, span]
            self._store.read_into(targets, place)
            tokens[1:] = targets[:-1]
            if start == 0:
                tokens[0] = self._store.separator
            else:
                self._store.read_into(tokens[:1], place - 1)
            batch["segments"][row, span] = segment
            batch["positions"][row, span] = np.arange(size)
            fresh = 0 if start == 0 else self._context - self._stride
            batch["weights"][row, filled + fresh : filled + size] = 1.0
            filled += size
