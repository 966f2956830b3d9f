"""Documents packed into rows of equal length, for training.

What: each document is its separator and its tokens; an epoch puts all documents in one
long stream, in the epoch's order, and cuts it into windows.
Why: no padding, and window w of epoch e is a pure function of (settings, e, w), so the
place of a run is one integer.
When not: evaluation has windows of its own (`memjax.data.scoring`).

A window of `context` inputs and their targets takes context + 1 tokens of the stream;
the next window begins `context` later, so that every token but the stream's first is a
target once. What does not fill a last window (fewer than `context` tokens, others in
each epoch) is left out.
"""

import math
from typing import TypedDict

import numpy as np

from memjax.data.order import EpochCache, permutation
from memjax.data.store import TokenStore


class Batch(TypedDict):
    """Rows of a batch; all arrays [B, T] (of one row: [T]).

    Attributes:
        tokens: int32 inputs.
        targets: int32, the next token of the stream.
        segments: int32, number of the document inside the row from 1; 0 is padding.
        positions: int32, place inside the document's piece in this row, from 0.
        weights: float32, 1 = the target counts, 0 = padding or context only.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    weights: np.ndarray


def empty_batch(n_rows: int, context: int) -> Batch:
    """A batch of padding: zeros everywhere."""
    shape = (n_rows, context)
    return Batch(
        tokens=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        segments=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        weights=np.zeros(shape, np.float32),
    )


class PackedStream:
    """The packed windows of one store.

    Args:
        store: the documents.
        context: inputs of a window.
        seed, salt: two integers that fix the orders of the documents.
        shuffle: False keeps the stored order in every epoch.
        n_orders: how many epochs' orders are kept in memory.

    Attributes:
        n_windows: windows of an epoch.
        n_tail: tokens that are no target in an epoch, the first not counted.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        context: int,
        seed: int,
        salt: int,
        shuffle: bool,
        n_orders: int = 3,
    ) -> None:
        self._store = store
        self._context = context
        self._seed = seed
        self._salt = salt
        self._shuffle = shuffle
        self._orders = EpochCache(self._make_order, n_orders)
        n_stream = store.n_tokens + store.n_documents
        self.n_windows, self.n_tail = divmod(max(n_stream - 1, 0), context)

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        n = self._store.n_documents
        key = (1, self._seed, self._salt, epoch)
        order = permutation(n, *key) if self._shuffle else np.arange(n)
        return order, np.cumsum(self._store.lengths[order] + 1)

    def fill(self, batch: Batch, row: int, epoch: int, window: int) -> None:
        """Write window 0 <= window < n_windows of an epoch into a row of a batch."""
        order, ends = self._orders(epoch)
        n = self._context + 1
        tokens = np.empty(n, np.int32)
        segments, positions = batch["segments"][row], batch["positions"][row]
        start = window * self._context
        place = int(np.searchsorted(ends, start, side="right"))
        filled, segment = 0, 0
        while filled < n:
            document = order[place]
            begin = int(ends[place] - self._store.lengths[document] - 1)
            offset = start + filled - begin
            stop = min(n, int(ends[place]) - start)
            segment += 1
            segments[filled:stop] = segment
            positions[filled:stop] = np.arange(len(positions[filled:stop]))
            if offset == 0:
                tokens[filled] = self._store.separator
                filled, offset = filled + 1, 1
            first = int(self._store.starts[document]) + offset - 1
            self._store.read_into(tokens[filled:stop], first)
            filled, place = stop, place + 1
        batch["tokens"][row] = tokens[:-1]
        batch["targets"][row] = tokens[1:]
        batch["weights"][row] = 1.0


class MixedWindows:
    """All windows of a weighted mixture of stores, in the order of training.

    In one epoch of the mixture, corpus c gives round(weight * n_windows) windows (one
    at least), going on through its own epochs where the last one stopped.

    Args:
        stores, weights: the corpora; see `CorpusConfig.weight`.
        context, seed, shuffle: as in `PackedStream`; shuffle also mixes the windows.

    Attributes:
        n_windows: windows of an epoch of the mixture.
        n_each: the same by corpus.
        n_tail: tokens left out in an epoch, by corpus; see `PackedStream`.
    """

    def __init__(
        self,
        stores: list[TokenStore],
        weights: list[float],
        *,
        context: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        self._seed = seed
        self._shuffle = shuffle
        self._streams = [
            PackedStream(
                store,
                context=context,
                seed=seed,
                salt=salt,
                shuffle=shuffle,
                n_orders=math.ceil(weight) + 2,
            )
            for salt, (store, weight) in enumerate(zip(stores, weights, strict=True))
        ]
        self.n_each = [
            max(round(w * s.n_windows), 1) if s.n_windows else 0
            for w, s in zip(weights, self._streams, strict=True)
        ]
        self.n_tail = [s.n_tail for s in self._streams]
        self.n_windows = sum(self.n_each)
        self._bounds = np.cumsum(self.n_each)
        self._orders = EpochCache(self._make_order, 3)

    def _make_order(self, epoch: int) -> np.ndarray | None:
        if not self._shuffle:
            return None
        return permutation(self.n_windows, 2, self._seed, epoch)

    def fill(self, batch: Batch, row: int, epoch: int, window: int) -> None:
        """Write window 0 <= window < n_windows of an epoch into a row of a batch."""
        order = self._orders(epoch)
        number = window if order is None else int(order[window])
        corpus = int(np.searchsorted(self._bounds, number, side="right"))
        stream, n_each = self._streams[corpus], self.n_each[corpus]
        number += epoch * n_each - (int(self._bounds[corpus]) - n_each)
        stream.fill(batch, row, *divmod(number, stream.n_windows))
