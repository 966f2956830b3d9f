"""Searches of a datastore: exact whatever the blocks, faiss complete where it can be.

What: both equal sorting all pairs; missing neighbours; one NaN query.
Why: blocks are padded, and padding must never be a neighbour.
When not: the search of arrays; tests/ops/test_knn.
"""

import numpy as np
import pytest

from memjax.errors import ConfigError, MissingExtraError
from memjax.evaluate import knn_search
from memjax.evaluate.datastore import Datastore
from memjax.evaluate.knn_search import exact_search, faiss_search
from tests.oracles import knn as oracle


def datastore(n_entries, dtype=np.float16, low=-2, high=3):
    rng = np.random.default_rng(0)
    keys = rng.integers(low, high, (n_entries, 3)).astype(dtype)
    return Datastore(keys, np.zeros(n_entries, np.uint16), {})


@pytest.fixture(scope="module")
def queries():
    return np.random.default_rng(1).integers(-2, 3, (11, 3)).astype(np.float32)


@pytest.mark.parametrize(("key_block", "query_block"), [(7, 4), (100, 11), (50, 100)])
def test_blocks_do_not_change_the_exact_search(queries, key_block, query_block):
    store = datastore(50)
    want, entries = oracle.nearest(queries, store.keys, 6)
    found = exact_search(
        store, queries, 6, key_block=key_block, query_block=query_block
    )
    np.testing.assert_array_equal(found.distances, want)
    np.testing.assert_array_equal(found.entries, entries)


def test_a_long_search_says_how_far_it_is(queries):
    said = []
    exact_search(datastore(50), queries, 3, key_block=4, report=said.append)
    assert said[0] == "searched 10 % of the entries" and len(said) == 10
    assert said[-1] == "searched 100 % of the entries"


def test_padding_is_no_neighbour_and_no_query_gives_nothing(queries):
    store = datastore(5, low=3, high=9)  # padding, all 0, would be nearer
    found = exact_search(store, queries, 8, key_block=4)
    assert np.all(found.entries[:, 5:] == -1) and np.all(found.entries[:, :5] >= 0)
    assert np.isinf(found.distances[:, 5:]).all()
    none = exact_search(store, queries[:0], 8)
    assert none.distances.shape == none.entries.shape == (0, 8)


def test_p04_one_nan_query_leaves_the_others_alone(queries):
    store = datastore(20)
    spoilt = queries.copy()
    spoilt[2, 1] = np.nan
    found, whole = (exact_search(store, q, 3, key_block=8) for q in (spoilt, queries))
    assert np.isnan(found.distances[2]).all()
    others = np.arange(len(queries)) != 2
    np.testing.assert_array_equal(found.entries[others], whole.entries[others])


@pytest.fixture
def faiss():
    return pytest.importorskip("faiss")


def test_faiss_that_looks_into_every_list_is_exact(queries, faiss):
    store = datastore(300, np.float32)
    rng = np.random.default_rng(2)
    store.keys[:] += rng.normal(size=store.keys.shape)  # no ties
    exact = exact_search(store, queries, 6)
    for keys in (store.keys, store.keys.astype(np.float16)):
        low = Datastore(keys, store.values, {})
        found = faiss_search(low, queries, 6, probe=4)
        want = exact if keys.dtype == np.float32 else exact_search(low, queries, 6)
        np.testing.assert_array_equal(found.entries, want.entries)
        np.testing.assert_allclose(found.distances, want.distances, rtol=1e-6)
        assert found.entries.dtype == np.int32


def test_faiss_that_looks_into_one_list_finds_true_distances(queries, faiss):
    store = datastore(300, np.float32)
    found = faiss_search(store, queries, 4, probe=1)
    held = found.entries >= 0
    assert held.any()
    differences = queries[:, None] - store.keys[np.maximum(found.entries, 0)]
    np.testing.assert_array_equal(
        found.distances[held], np.sum(differences**2, axis=-1)[held]
    )
    ranks = list(zip(found.distances.tolist(), found.entries.tolist(), strict=True))
    for distances, entries in ranks:
        pairs = list(zip(distances, entries, strict=True))
        assert pairs == sorted(pairs)


def test_faiss_with_few_entries_leaves_neighbours_missing(queries, faiss):
    found = faiss_search(datastore(5), queries, 8)
    assert np.all(found.entries[:, 5:] == -1)
    assert np.isinf(found.distances[:, 5:]).all()
    assert faiss_search(datastore(5), queries[:0], 8).entries.shape == (0, 8)


def test_p04_one_nan_query_shows_with_faiss_too(queries, faiss):
    spoilt = queries.copy()
    spoilt[2, 1] = np.nan
    found = faiss_search(datastore(20), spoilt, 3)
    assert np.isnan(found.distances[2]).all()
    assert np.isfinite(np.delete(found.distances, 2, axis=0)).all()


def test_faiss_is_an_extra(queries, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(knn_search.importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"memjax\[knn\]"):
        faiss_search(datastore(5), queries, 2)
    with pytest.raises(ConfigError, match=r"knn.probe = 0"):
        faiss_search(datastore(5), queries, 2, probe=0)
