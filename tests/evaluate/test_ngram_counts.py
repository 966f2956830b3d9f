"""Counts of n-grams: equal to a dictionary, across pieces, orders and vocabularies."""

from collections import Counter

import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.evaluate import ngram_counts
from memjax.evaluate.ngram_counts import KeyCounts, NgramCounts, keys_are_exact


def slow_ngrams(tokens, segments, order):
    """(row, place, n-gram or None) of every token."""
    for b, t in np.ndindex(tokens.shape):
        first = t - order + 1
        whole = (
            segments[b, t] > 0
            and first >= 0
            and (segments[b, first : t + 1] == segments[b, t]).all()
        )
        yield b, t, tuple(tokens[b, first : t + 1].tolist()) if whole else None


def rows(seed, vocab=3, shape=(3, 20)):
    rng = np.random.default_rng(seed)
    segments = np.array([[1] * 9 + [2] * 11, [1] * 14 + [0] * 6, [1] + [2] * 19])
    return rng.integers(0, vocab, shape) + 254, segments


@pytest.mark.parametrize("order", [1, 2, 3, 7, 8])
def test_counts_are_those_of_a_dictionary(order, monkeypatch):
    monkeypatch.setattr(ngram_counts, "_PENDING", 3)
    counts, want = NgramCounts(order, 257), Counter()
    assert counts.exact == (order <= 7)
    for seed in range(4):
        tokens, segments = rows(seed)
        counts.add(tokens, segments)
        want.update(g for _, _, g in slow_ngrams(tokens, segments, order) if g)
    tokens = np.concatenate([rows(9)[0], rows(3)[0]])
    segments = np.concatenate([segments, segments])
    got = counts.of(tokens, segments)
    assert got.dtype == np.int64
    for b, t, gram in slow_ngrams(tokens, segments, order):
        assert got[b, t] == (-1 if gram is None else want[gram])
    assert (got > 0).any() and (order < 5 or (got == 0).any())


def test_large_vocabularies_and_orders_keep_order_and_zeros_apart():
    """Mixed keys: permuted tokens, ids 0 and one token more are other n-grams."""
    vocab = 129_000
    assert keys_are_exact(3, vocab) and not keys_are_exact(4, vocab)
    grams = np.array([[0, 0, 0, 5], [5, 0, 0, 0], [0, 5, 0, 0], [0, 0, 0, 0], [1] * 4])
    counts = NgramCounts(4, vocab)
    counts.add(grams, np.ones_like(grams))
    np.testing.assert_array_equal(counts.of(grams, np.ones_like(grams))[:, 3], 1)
    rng = np.random.default_rng(0)
    many = rng.integers(0, vocab, (200_000, 4))
    keys = ngram_counts.ngram_keys(list(many.T), vocab)
    assert len(np.unique(keys)) == len(np.unique(many, axis=0))


def test_values_come_with_the_first_of_their_key(monkeypatch):
    monkeypatch.setattr(ngram_counts, "_PENDING", 0)
    counts = KeyCounts(2)
    for keys in ([9, 4, 9], [4, 1]):
        keys = np.array(keys, np.uint64)
        counts.add(keys, np.stack([keys * 10, keys + 1], -1).astype(np.int32))
    keys, n, values = counts.result()
    np.testing.assert_array_equal(keys, [1, 4, 9])
    np.testing.assert_array_equal(n, [1, 2, 2])
    np.testing.assert_array_equal(values, [[10, 2], [40, 5], [90, 10]])
    ids = np.array([[4, 7], [9, 10]], np.uint64)
    np.testing.assert_array_equal(counts.counts_of(ids), [[2, 0], [2, 0]])
    np.testing.assert_array_equal(KeyCounts().counts_of(ids), 0)


@pytest.mark.parametrize("order", [0, -1, 2.0])
def test_an_order_below_one_is_an_error(order):
    with pytest.raises(ConfigError, match="order = .* at least 1"):
        NgramCounts(order, 257)
