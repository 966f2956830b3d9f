"""The kjv corpus from its package to batches, with all its published numbers."""

import hashlib

import numpy as np
import pytest

from memjax.data.config import DataConfig
from memjax.data.corpora import CORPORA, build_splits
from memjax.data.pipeline import eval_batches, prepare, train_batches
from memjax.errors import MissingExtraError


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    config = DataConfig(cache_dir=str(cache), n_threads=0)
    try:
        prepare(config)
    except MissingExtraError as error:
        pytest.skip(str(error))
    return config


def test_splits_have_the_published_bytes_and_hashes(config):
    recipe = CORPORA["kjv"]
    documents = build_splits("kjv")
    for split, n_bytes in recipe.split_bytes.items():
        store = prepare(config).store("kjv", split)
        assert store.n_bytes == n_bytes
        text = b"".join(bytes(ids.astype(np.uint8)) for ids in store)
        wanted = recipe.split_sha256.get(split, hashlib.sha256(text).hexdigest())
        assert hashlib.sha256(text).hexdigest() == wanted
        assert text == b"".join(documents[split])


def test_first_batches_are_text_and_differ_between_epochs(config):
    batches = train_batches(config)
    assert batches.steps_per_epoch == (3816224 + 108 - 1) // 256 // 8
    batch = next(batches)
    assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert batch["weights"].min() == 1.0
    batches.seek(batches.steps_per_epoch)
    assert not np.array_equal(next(batches)["tokens"], batch["tokens"])


def test_evaluation_scores_every_byte_once(config):
    batches = eval_batches(config)
    assert batches.n_bytes == 199653 == batches.n_targets
    assert sum(int(batch["weights"].sum()) for batch in batches) == 199653
    assert sum(1 for _ in batches) == batches.n_batches
