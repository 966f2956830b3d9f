"""A store from beginning to end, in pieces of whole documents.

What: `document_pieces`: ids and segments, each document behind its separator.
Why: statistics of a corpus need every n-gram once, and not the whole corpus at a time.
When not: batches of a fixed shape; training packs (`packing`), evaluation slides
    (`scoring`).
"""

from collections.abc import Iterator

import numpy as np

from memjax.data.store import TokenStore

PIECE_TOKENS = 1 << 20


def document_pieces(
    store: TokenStore, n_tokens: int = PIECE_TOKENS
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every document once, in stored order.

    Args:
        store: the documents.
        n_tokens: wanted length of a piece. Documents stay whole: a longer one is a
            piece of its own. At least 1.

    Yields:
        ids, int32 [1, T]: separator and tokens of each document, as training reads
        them; segments, int32 [1, T]: number of the document in the piece, from 1.
        An empty store yields nothing.
    """
    ends = np.cumsum(store.lengths + 1)
    first, done = 0, 0
    while first < store.n_documents:
        last = max(int(np.searchsorted(ends, done + n_tokens, side="right")), first + 1)
        lengths = store.lengths[first:last] + 1
        segments = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
        text = np.ones(len(segments), bool)
        text[np.cumsum(lengths) - lengths] = False
        tokens = np.empty(int(text.sum()), np.int32)
        store.read_into(tokens, int(store.starts[first]))
        ids = np.full(len(segments), store.separator, np.int32)
        ids[text] = tokens
        yield ids[None], segments[None]
        first, done = last, int(ends[last - 1])
