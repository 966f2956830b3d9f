"""Packing and the order of windows against slow loops."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.data.order import EpochCache, permutation
from memjax.data.packing import MixedWindows, PackedStream, empty_batch
from memjax.data.store import write_store
from memjax.data.tokenizer import ByteTokenizer

DOCUMENTS = st.lists(st.binary(max_size=12), min_size=1, max_size=9)


def one_row(windows, context, epoch, window):
    batch = empty_batch(1, context)
    windows.fill(batch, 0, epoch, window)
    return {name: array[0] for name, array in batch.items()}


@given(DOCUMENTS, st.integers(1, 9), st.booleans(), st.integers(0, 2))
def test_windows_cut_the_stream_of_documents(
    tmp_path_factory, documents, context, shuffle, epoch
):
    """Oracle: build the epoch's stream token by token, then cut it."""
    folder = tmp_path_factory.mktemp("store") / "train"
    store = write_store(folder, documents, ByteTokenizer(), shard_tokens=7)
    stream = PackedStream(store, context=context, seed=3, salt=0, shuffle=shuffle)
    order, _ = stream._orders(epoch)
    assert sorted(order) == list(range(len(documents)))
    flat = []
    for place, document in enumerate(order):
        flat += [(token, place) for token in [256, *documents[document]]]
    assert stream.n_windows == (len(flat) - 1) // context
    assert stream.n_tail == len(flat) - 1 - stream.n_windows * context
    for window in range(stream.n_windows):
        row = one_row(stream, context, epoch, window)
        start = window * context
        inputs = flat[start : start + context]
        targets = flat[start + 1 : start + 1 + context]
        assert row["tokens"].tolist() == [token for token, _ in inputs]
        assert row["targets"].tolist() == [token for token, _ in targets]
        assert row["weights"].tolist() == [1.0] * context
        first = inputs[0][1]
        assert row["segments"].tolist() == [place - first + 1 for _, place in inputs]
        seen: dict[int, int] = {}
        for (_, place), position in zip(inputs, row["positions"], strict=True):
            assert position == seen.get(place, 0)
            seen[place] = position + 1


def windows_of(mixture, context, epoch):
    return sorted(
        tuple(one_row(mixture, context, epoch, w)["targets"])
        for w in range(mixture.n_windows)
    )


def test_weights_are_passes_over_a_corpus(tmp_path):
    """Weight 2 gives every window of a corpus twice an epoch, weight 0.5 one half in
    one epoch and the other half in the next."""
    stores = [
        write_store(tmp_path / str(i), [bytes([i]) * 39 + b"abc"], ByteTokenizer())
        for i in range(2)
    ]
    plain = MixedWindows(stores, [1.0, 1.0], context=3, seed=0, shuffle=True)
    assert plain.n_each == [14, 14]
    mixed = MixedWindows(stores, [2.0, 0.5], context=3, seed=0, shuffle=True)
    assert mixed.n_each == [28, 7]
    both = windows_of(mixed, 3, 0) + windows_of(mixed, 3, 1)
    whole = windows_of(plain, 3, 0)
    of_second = {window for window in whole if 1 in window}
    for window in set(whole) - {(97, 98, 99)}:
        times = 1 if window in of_second else 4
        assert both.count(window) == times * whole.count(window)


def test_windows_are_shuffled_across_corpora_and_epochs(tmp_path):
    stores = [
        write_store(tmp_path / str(i), [bytes([i]) * 300], ByteTokenizer())
        for i in range(2)
    ]
    mixed = MixedWindows(stores, [1.0, 1.0], context=3, seed=0, shuffle=True)

    def owners(epoch):
        return [int(one_row(mixed, 3, epoch, w)["targets"][1]) for w in range(200)]

    assert owners(0) != owners(1)
    assert 20 < sum(owners(0)[:100]) < 80
    in_order = MixedWindows(stores, [1.0, 1.0], context=3, seed=0, shuffle=False)
    first = [int(one_row(in_order, 3, 0, w)["targets"][1]) for w in range(200)]
    assert first == [0] * 100 + [1] * 100


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_permutation_is_one_and_depends_on_its_key(n):
    order = permutation(n, 1, 2)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))
    assert np.array_equal(order, permutation(n, 1, 2))
    if n == 1000:
        others = [permutation(n, *key) for key in ((1, 3), (2, 1), (2, 2), (1,))]
        assert all((order == other).sum() < 10 for other in others)
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.1


def test_permutation_is_the_same_for_ever():
    """Recorded once: a change would silently move every saved place."""
    assert permutation(10, 7, 2**63).tolist() == [0, 4, 1, 7, 6, 3, 2, 9, 5, 8]


def test_an_epoch_is_made_once_for_many_threads():
    made = []
    start = threading.Barrier(4)

    def make(epoch):
        made.append(epoch)
        return epoch * 10

    cache = EpochCache(make, 2)

    def use():
        start.wait()
        assert cache(1) == 10

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert [cache(2), cache(3), cache(1)] == [20, 30, 10]
    assert made == [1, 2, 3, 1]
