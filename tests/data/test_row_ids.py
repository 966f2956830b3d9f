"""Rows of tables in the batches: equal to those in jit, whoever reads them."""

import dataclasses

import jax
import numpy as np
import pytest

from memjax.data.compressed_vocab import load_classes
from memjax.data.pipeline import eval_batches, train_batches
from memjax.data.row_ids import RowIds, given_rows
from memjax.errors import ConfigError, DataError
from memjax.layers.byte_engram import ByteEngramConfig
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.models.layouts import layouts
from memjax.ops.hashed_rows import hashed_rows, host_rows
from memjax.ops.token_classes import token_classes

CLASSES = load_classes("bytes").table
MODEL = ModelConfig(
    n_layers=4,
    memories=(
        EngramConfig(layers=(0, 2), rows_per_head=53, shared_table="pool"),
        EngramConfig(layers=(1,), n_heads=2, rows_per_head=97, n_token_classes=228),
        ByteEngramConfig(layers=(3,), rows_per_head=53),
    ),
)
TEXT = bytes(i * 37 % 251 for i in range(48))


def expected(tokens, segments):
    """By the device's hash, the classes looked up first."""
    found = {}
    for layer, layout in layouts(MODEL).items():
        ids = tokens if layer != 1 else token_classes(CLASSES, tokens)
        rows_of = jax.jit(hashed_rows, static_argnums=0)
        found[layer] = np.asarray(rows_of(layout, ids, segments_BT=segments))
    return found


@pytest.mark.parametrize("n_workers", [0, 1])
def test_batches_carry_the_rows_that_the_device_would_find(make_config, n_workers):
    config = make_config(
        [TEXT, TEXT[:5], TEXT[9:]], context=8, hash_on="host", n_workers=n_workers
    )
    row_ids = RowIds(layouts(MODEL), CLASSES)
    with train_batches(config, row_ids=row_ids) as batches:
        read = [next(batches)]
    scored = list(eval_batches(config, row_ids=row_ids))
    plain = dataclasses.replace(config, hash_on="device", n_workers=0)
    for batch, bare in (
        (read[0], next(train_batches(plain))),
        (scored[0], next(iter(eval_batches(plain)))),
    ):
        assert set(bare) == {name for name in batch if "/" not in name}
        assert not given_rows(bare)
        rows = given_rows(batch)
        want = expected(bare["tokens"], bare["segments"])
        assert set(rows) == set(want)
        for layer, rows_BTC in want.items():
            assert rows[layer].dtype == np.int32
            np.testing.assert_array_equal(rows[layer], rows_BTC)
    assert len(np.unique(bare["segments"])) > 1, "documents and padding are tried"


def test_layers_of_one_layout_are_hashed_once():
    tokens = np.frombuffer(TEXT, np.uint8).astype(np.int32)[None]
    rows = host_rows(layouts(MODEL), tokens, classes_V=CLASSES)
    assert rows[0] is rows[2]
    assert rows[1].shape == (1, 48, 4)
    empty = host_rows(layouts(MODEL), tokens[:0], classes_V=CLASSES)
    assert empty[1].shape == (0, 48, 4)
    assert host_rows({}, tokens) == {}


def test_what_cannot_be_looked_up(make_config):
    config = make_config([TEXT], hash_on="host")
    for read in (train_batches, eval_batches):
        with pytest.raises(ConfigError, match="hash_on = 'host'.*without|no row_ids"):
            read(config)
    with pytest.raises(ConfigError, match="data.hash_on = 'gpu'"):
        dataclasses.replace(config, hash_on="gpu")
    with pytest.raises(DataError, match="is not allowed"):
        host_rows(layouts(MODEL), np.full((1, 3), 257), classes_V=CLASSES)
