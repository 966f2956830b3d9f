"""Engram's read of FNV rows: the rows are the hash's, separators stop windows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, DataError
from memjax.evaluate.collisions import CollisionCounter
from memjax.layers.byte_engram import ByteEngramConfig
from memjax.layers.engram import Engram
from memjax.ops.byte_hash import ByteLayout, host_byte_fnv_rows
from memjax.ops.hashed_rows import hashed_rows, host_hashed_rows
from memjax.ops.look_back import BAD_ROW, DEAD
from tests.layers.memory_calls import BFLOAT16, FLOAT32, D, stream

LAYOUT = ByteLayout(vocab_size=257, orders=(3, 5), column_rows=((101,), (64,)))
IDS = np.array([[10, 20, 30, 256, 40, 50, 60, 70]], np.int32)
SEGMENTS = np.array([[1, 1, 1, 1, 1, 1, 2, 2]], np.int32)


def test_defaults_are_dormouses():
    config = ByteEngramConfig(rows_per_head=1000)
    layout = config.row_layout(257)
    assert layout.orders == (3, 5, 8) and layout.basis == "dormouse"
    spec = config.table_spec(layout.n_rows)
    assert (spec.n_rows, spec.width, spec.std, spec.reads) == (3000, 32, 0.02, 3)
    sizes = dataclasses.replace(config, rows_per_head=(5, 6, 7)).row_layout(256)
    assert sizes.offsets == (0, 5, 11)


def test_windows_end_at_a_separator_and_at_a_document():
    rows = host_hashed_rows(LAYOUT, IDS, segments_BT=SEGMENTS)[0]
    pieces = [[10, 20, 30], [40, 50], [60, 70]]
    apart = [host_byte_fnv_rows(np.array(piece), (3, 5), (101, 64)) for piece in pieces]
    np.testing.assert_array_equal(rows[[0, 1, 2, 4, 5, 6, 7]], np.concatenate(apart))
    empty = host_byte_fnv_rows(np.array([DEAD]), (3, 5), (101, 64))
    np.testing.assert_array_equal(rows[3:4], empty)


def test_jit_equals_host_in_pieces_too():
    jitted = jax.jit(lambda ids, history: hashed_rows(LAYOUT, ids, history_BN=history))
    whole = LAYOUT.host_rows(IDS)
    start = np.full((1, 4), DEAD, np.int32)
    np.testing.assert_array_equal(jitted(IDS, start), whole)
    history = IDS[:, :4]
    tail = np.concatenate([IDS[:, 4:], IDS[:, :4]], axis=1)
    got = jitted(tail, history)[:, :4]
    np.testing.assert_array_equal(got, whole[:, 4:])
    np.testing.assert_array_equal(
        LAYOUT.host_rows(IDS[:, 4:], history_BN=history), whole[:, 4:]
    )
    bad = np.where(IDS == 20, 257, IDS)
    rows = np.asarray(jitted(jnp.asarray(bad), start))[0]
    assert (rows[1] == BAD_ROW).all() and (rows[2] == BAD_ROW).all()
    assert (rows[[0, 3, 4]] != BAD_ROW).all()
    with pytest.raises(DataError, match=r"ids\[0, 1\] = 257"):
        LAYOUT.host_rows(bad)
    small = dataclasses.replace(LAYOUT, vocab_size=17)
    assert (jax.jit(small.rows)(jnp.array([[17]])) == BAD_ROW).all()


def test_collisions_know_that_windows_end_at_separators():
    """Twenty copies of one text between separators hold no new n-grams."""
    one = np.array([1, 2, 3, 4, 5, 256], np.int32)
    large = dataclasses.replace(LAYOUT, column_rows=((2**20,), (2**20,)))
    for copies in (1, 20):
        tokens = np.tile(one, copies)[None]
        counter = CollisionCounter(large)
        counter.add(tokens, np.ones_like(tokens))
        assert counter.exact
        for column in counter.columns():
            assert column["distinct_ngrams"] == column["distinct_rows"] == 6
            assert column["shared_frac"] == 0


@pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_the_module_reads_those_rows(dtypes):
    config = ByteEngramConfig(orders=(3, 5), rows_per_head=(101, 64), row_width=4)
    module = Engram(config, LAYOUT.n_rows, dtypes)
    x_BTD = stream(8)[:1].astype(dtypes.compute)
    rows_BTC = jnp.asarray(LAYOUT.host_rows(IDS))
    variables = module.init(jax.random.key(0), x_BTD, rows_BTC)
    out = module.apply(variables, x_BTD, rows_BTC)
    assert variables["params"]["table"].shape == (165, 4)
    assert out.shape == (1, 8, D) and out.dtype == dtypes.compute
    other = module.apply(variables, x_BTD, rows_BTC.at[0, 3, 1].set(0))
    changed = np.abs((out - other).astype(np.float32)).max(axis=(0, 2)) > 0
    assert changed.tolist() == [False, False, False, True] + [False] * 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"basis": "fnv"}, r"memories\.basis = 'fnv'"),
        ({"n_heads": 2}, r"memories\.n_heads = 2"),
        ({"hash_seed": 1}, r"memories\.hash_seed = 1"),
        ({"pad_id": 0}, r"memories\.pad_id = 0"),
        ({"n_token_classes": 5}, r"memories\.n_token_classes = 5"),
    ],
    ids=str,
)
def test_what_fnv_has_not_is_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        ByteEngramConfig(**change)


def test_only_byte_vocabularies():
    with pytest.raises(ConfigError, match=r"memories\.vocab_size = 8192 .* 257"):
        ByteEngramConfig().row_layout(8192)
    with pytest.raises(ConfigError, match=r"memories\.rows_per_head"):
        ByteEngramConfig(rows_per_head=2**30).row_layout(257)
    with pytest.raises(ConfigError, match="one head"):
        dataclasses.replace(LAYOUT, column_rows=((5, 5), (6, 6)))
    assert (
        LAYOUT.fingerprint()
        != dataclasses.replace(LAYOUT, basis="standard").fingerprint()
    )
