"""The n-grams of a corpus by frequency: a dictionary, ties, classes, errors."""

from pathlib import Path

import numpy as np
import pytest

from memjax.data.compressed_vocab import CompressedVocab
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.prepare import prepare_text
from memjax.data.store import TokenStore, write_store
from memjax.data.tokenizer import load_tokenizer
from memjax.errors import ConfigError
from memjax.evaluate.hot_ngrams import cached_hot_file, hot_ngrams
from memjax.ops.hot_tier import load_hot_index
from tests.oracles.hot_tier import ranked

TEXTS = [b"abababc", b"", b"cab cab", b"ABAB"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    found = []
    for i, texts in enumerate((TEXTS[:2], TEXTS[2:])):
        folder = tmp_path_factory.mktemp("store") / str(i)
        write_store(folder, texts, load_tokenizer("bytes"))
        found.append(TokenStore(folder))
    return found


def number(gram, vocab):
    return sum(int(x) * vocab**k for k, x in enumerate(gram))


def rows(change=lambda x: x):
    return [
        ([change(x) for x in (256, *text)], [1] * (len(text) + 1)) for text in TEXTS
    ]


def test_they_are_those_of_a_dictionary(stores):
    index = hot_ngrams(stores, (1, 2, 3), 6, 257)
    for order, keys in index.keys.items():
        want = [number(gram, 257) for gram in ranked(rows(), order, 257)]
        assert keys.tolist() == want[:6]
    all_there = hot_ngrams(stores, (3,), 10_000, 257).keys[3]
    assert all_there.tolist() == [number(g, 257) for g in ranked(rows(), 3, 257)]


def test_of_classes(stores):
    table = np.arange(257, dtype=np.int32)
    table[65:91] += 32  # upper case letters into the class of the lower case ones
    table = np.unique(table, return_inverse=True)[1].astype(np.int32)
    classes = CompressedVocab(table)
    index = hot_ngrams(stores, (2,), 4, 257, classes)
    assert index.vocab_size == 231
    grams = ranked(rows(lambda x: int(table[x])), 2, 231)
    assert index.keys[2].tolist() == [number(gram, 231) for gram in grams[:4]]


def test_errors(stores):
    with pytest.raises(ConfigError, match="n_hot = 0"):
        hot_ngrams(stores, (2,), 0, 257)
    with pytest.raises(ConfigError, match="orders = 8"):
        hot_ngrams(stores, (2, 8), 5, 257)


def test_an_experiments_file_is_made_once(tmp_path):
    (tmp_path / "text.txt").write_text("abab\ncab\nabcd\n" * 7)
    prepare_text([tmp_path / "text.txt"], tmp_path / "out")
    data = DataConfig(
        corpora=(CorpusConfig(name=str(tmp_path / "out")),), cache_dir=str(tmp_path)
    )
    path = Path(cached_hot_file(data, (1, 2), 3))
    index = load_hot_index(path)
    assert index.vocab_size == 257
    assert sorted(index.keys) == [1, 2] and path.parent == tmp_path
    made = path.stat().st_mtime_ns
    assert cached_hot_file(data, (1, 2), 3) == str(path)
    assert path.stat().st_mtime_ns == made
    assert cached_hot_file(data, (1, 2), 2) != str(path)
    assert not list(tmp_path.glob("*.npz.*"))
