"""N-grams as 64-bit keys.

What: `ngram_keys`, and whether they are one to one.
Why: counting n-grams and finding them again must agree on what an n-gram is.
When not: rows of hashed tables; see ngram_hash.
"""

from collections.abc import Sequence

import numpy as np

_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def keys_are_exact(order: int, vocab_size: int) -> bool:
    """Whether n-grams and 64-bit keys are one to one: bytes up to order 7."""
    return vocab_size**order <= 1 << 64


def ngram_keys(tokens: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """One uint64 for each n-gram.

    Args:
        tokens: n integer arrays of one shape, the newest token first; ids in
            [0, vocab_size).
        vocab_size: V.

    Returns:
        uint64, the same shape. Where V^n <= 2^64 the digits of base V, so that equal
        keys are equal n-grams. For larger n or V a 64-bit mix: some two of U distinct
        n-grams share a key with probability about U^2 / 2^65 (for ten million, 3 in
        a million).
    """
    exact = keys_are_exact(len(tokens), vocab_size)
    key = np.zeros(np.shape(tokens[0]), np.uint64)
    for token in reversed(tokens):
        key = key * np.uint64(vocab_size) + np.asarray(token).astype(np.uint64)
        if not exact:
            for mixer, shift in zip(_MIXERS, (30, 27), strict=True):
                key = (key ^ (key >> np.uint64(shift))) * mixer
            key ^= key >> np.uint64(31)
    return key
