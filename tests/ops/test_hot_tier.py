"""The exact index: dictionary oracle, no false positives, jit against host, files."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from memjax.errors import ConfigError, DataError
from memjax.ops.hashed_rows import hashed_rows, host_hashed_rows
from memjax.ops.hot_tier import (
    MISS,
    HotIndex,
    HotLayout,
    first_not_below,
    load_hot_index,
)
from memjax.ops.look_back import BAD_ROW, DEAD, next_history
from memjax.ops.ngram_layout import ngram_layouts
from memjax.ops.uint32_pairs import split64
from tests.oracles import hot_tier as oracle

VOCAB, T = 4, 12
ORDERS = (1, 2, 3)
SIZES = (2, 5, 7)
TEXT = np.random.default_rng(0).integers(0, VOCAB, 400)


def cold(vocab=VOCAB, orders=ORDERS):
    (layout,) = ngram_layouts(
        vocab_size=vocab,
        pad_id=0,
        orders=orders,
        n_heads=2,
        rows_per_head=11,
        layer_ids=(0,),
    )
    return layout


def number(gram, vocab=VOCAB):
    return sum(x * vocab**k for k, x in enumerate(gram))


RANKED = [oracle.ranked([(TEXT, np.ones(400))], n, VOCAB) for n in ORDERS]
INDEX = HotIndex(
    VOCAB,
    {
        n: np.array([number(gram) for gram in grams], np.uint64)
        for n, grams in zip(ORDERS, RANKED, strict=True)
    },
)
LAYOUT = HotLayout(cold(), INDEX, SIZES)


@cache
def jitted():
    return jax.jit(
        lambda ids, segments, history: hashed_rows(
            LAYOUT, ids, segments_BT=segments, history_BN=history
        )
    )


@settings(max_examples=40, deadline=None)
@given(
    arrays(np.int32, (2, T), elements=st.integers(DEAD, VOCAB - 1)),
    arrays(np.int32, (2, T), elements=st.integers(0, 2)),
)
def test_rows_are_those_of_a_dictionary(ids, segments):
    host = host_hashed_rows(LAYOUT, ids, segments_BT=segments)
    hot = [grams[:n] for grams, n in zip(RANKED, SIZES, strict=True)]
    want = [oracle.hot_rows(*row, hot) for row in zip(ids, segments, strict=True)]
    np.testing.assert_array_equal(host[..., -3:], want)
    plain = host_hashed_rows(cold(), ids, segments_BT=segments)
    np.testing.assert_array_equal(host[..., :-3], plain)
    np.testing.assert_array_equal(jitted()(ids, segments, None), host)


def test_no_false_positives_and_one_row_each():
    """Every 3-gram of a vocabulary once: exactly the hot ones hit, each its own row."""
    rng = np.random.default_rng(1)
    vocab, n_hot = 12, 500
    keys = rng.permutation(vocab**3)[:n_hot].astype(np.uint64)
    layout = HotLayout(cold(vocab, (3,)), HotIndex(vocab, {3: keys}), (n_hot,))
    grams = np.stack(np.unravel_index(np.arange(vocab**3), (vocab,) * 3), axis=-1)
    rows = np.asarray(jax.jit(layout.rows)(jnp.asarray(grams)))[:, -1, -1]
    rank = {int(key): i for i, key in enumerate(keys)}
    want = [rank.get(int(g @ [vocab**2, vocab, 1]), MISS) for g in grams]
    np.testing.assert_array_equal(rows, want)
    np.testing.assert_array_equal(np.sort(rows[rows != MISS]), np.arange(n_hot))


def test_keys_that_need_all_64_bits():
    vocab = 2**16
    far = [(vocab - 1, vocab - 1, vocab - 1, vocab - 1), (5, 0, 0, vocab - 1)]
    keys = np.array([number(gram, vocab) for gram in far], np.uint64)
    assert int(keys[0]) == 2**64 - 1
    layout = HotLayout(cold(vocab, (4,)), HotIndex(vocab, {4: keys}), (2,))
    ids = np.array([*far, (5, 0, 0, vocab - 2), (5, 0, 1, vocab - 1)])[:, ::-1]
    want = [0, 1, MISS, MISS]
    assert layout.host_rows(ids)[:, -1, -1].tolist() == want
    rows = jax.jit(layout.rows)(jnp.asarray(ids.astype(np.int32)))
    assert rows[:, -1, -1].tolist() == want


@settings(max_examples=30, deadline=None)
@given(
    arrays(np.uint64, (9,), elements=st.integers(0, 2**64 - 1)),
    arrays(np.uint64, (5,), elements=st.integers(0, 2**64 - 1)),
)
def test_the_search_is_numpys(keys, ascending):
    ascending = np.sort(ascending)
    keys[:2] = ascending[1:3]
    keys[2:4] = ascending[[0, 4]] + np.uint64(1)
    pairs = [tuple(map(jnp.asarray, split64(x))) for x in (keys, ascending)]
    got = first_not_below(*pairs)
    np.testing.assert_array_equal(got, np.searchsorted(ascending, keys))


def test_any_pieces_give_the_same_rows():
    ids = TEXT[:T][None].astype(np.int32)
    whole = LAYOUT.host_rows(ids)
    history = np.full((1, 2), DEAD, np.int32)
    for t in range(0, T, 4):
        piece = ids[:, t : t + 4]
        want = whole[:, t : t + 4]
        got = jitted()(piece, None, jnp.asarray(history))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(LAYOUT.host_rows(piece, history_BN=history), want)
        history = next_history(piece, history, 3)


def test_a_bad_id_is_never_hot():
    ids = np.zeros((1, T), np.int32)
    ids[0, 3] = VOCAB
    rows = np.asarray(jitted()(jnp.asarray(ids), None, None))[0]
    assert (rows[3, :-3] == BAD_ROW).all()
    for order in ORDERS:
        column = rows[:, order - 4]
        assert (column[3 : 3 + order] == MISS).all()
    with pytest.raises(DataError, match=r"ids\[0, 3\] = 4"):
        LAYOUT.host_rows(ids)


def test_without_hot_ngrams_every_column_misses():
    none = HotLayout(cold(), HotIndex(VOCAB, {}), (0, 0, 0))
    ids = TEXT[:T][None].astype(np.int32)
    for rows in (none.host_rows(ids), jax.jit(none.rows)(jnp.asarray(ids))):
        np.testing.assert_array_equal(rows[..., :-3], host_hashed_rows(cold(), ids))
        assert (np.asarray(rows)[..., -3:] == MISS).all()


def test_files_and_fingerprints(tmp_path):
    path = tmp_path / "new" / "hot.npz"
    INDEX.save(path)
    again = load_hot_index(path)
    assert again.sha256 == INDEX.sha256 and again.vocab_size == VOCAB
    same = dataclasses.replace(LAYOUT, index=again)
    assert same.fingerprint() == LAYOUT.fingerprint()
    fewer = HotIndex(VOCAB, {n: keys[:7] for n, keys in INDEX.keys.items()})
    assert fewer.sha256 != INDEX.sha256
    # What is not hot makes no difference; order and number of hot ones do.
    trimmed = dataclasses.replace(LAYOUT, index=fewer)
    assert trimmed.fingerprint() == LAYOUT.fingerprint()
    swapped = HotIndex(VOCAB, {**INDEX.keys, 3: INDEX.keys[3][::-1].copy()})
    others = [
        dataclasses.replace(LAYOUT, hot_rows=(2, 5, 6)),
        dataclasses.replace(LAYOUT, index=swapped),
    ]
    assert len({x.fingerprint() for x in (LAYOUT, *others)}) == 3
    fewer.save(path)
    assert load_hot_index(path).sha256 == fewer.sha256
    with pytest.raises(DataError, match="cannot be read"):
        load_hot_index(tmp_path / "none.npz")
    whole = path.read_bytes()
    for content in (
        b"no zip",
        whole[: len(whole) // 2],
        whole[:100] + b"\xff" + whole[101:],
    ):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(DataError, match="no file of hot n-grams"):
            load_hot_index(tmp_path / "bad.npz")


def test_errors():
    with pytest.raises(ConfigError, match="vocab_size 4"):
        HotLayout(cold(5), INDEX, SIZES)
    with pytest.raises(ConfigError, match=r"hot_rows = 17 .* at most 16 of order 2"):
        HotLayout(cold(), INDEX, (2, 17, 7))
    with pytest.raises(ConfigError, match="orders = 8"):
        HotIndex(257, {8: np.zeros(1, np.uint64)})
    for keys in ([1, 1], [64]):
        with pytest.raises(DataError, match="distinct numbers from 0 to 63"):
            HotIndex(VOCAB, {3: np.array(keys, np.uint64)})
    with pytest.raises(DataError, match="uint64"):
        HotIndex(VOCAB, {3: np.array([1])})
