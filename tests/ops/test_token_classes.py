"""Ids to classes: host, device, and ids that no vocabulary has."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from memjax.errors import ConfigError, DataError
from memjax.ops.ngram_hash import (
    BAD_ROW,
    DEAD,
    host_ngram_rows,
    ngram_layouts,
    ngram_rows,
)
from memjax.ops.token_classes import BAD_CLASS, token_classes

_CLASSES = np.array([0, 1, 0, 2, 1], np.int32)
_V = len(_CLASSES)
_jitted = jax.jit(partial(token_classes, _CLASSES))


@given(arrays(np.int32, (2, 5), elements=st.integers(0, _V - 1)))
def test_host_and_device_read_the_table(ids: np.ndarray) -> None:
    want = [[int(_CLASSES[i]) for i in row] for row in ids]
    for got in (token_classes(_CLASSES, ids), _jitted(ids)):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want)


def test_ids_of_the_host_are_checked() -> None:
    for bad in (_V, 2**32, -1, -9):
        with pytest.raises(DataError, match=rf"ids\[0, 1\] = {bad} .*: 0 <= id < 5"):
            token_classes(_CLASSES, np.array([[1, bad]]))
    with pytest.raises(DataError, match="18446744073709551615"):
        token_classes(_CLASSES, np.array([2**64 - 1], np.uint64))
    for bad in (np.array([1.0]), jnp.array([1.0])):
        with pytest.raises(DataError, match="ids have dtype float"):
            token_classes(_CLASSES, bad)
    with pytest.raises(ConfigError, match="compat = 'loose' .*strict or demo"):
        token_classes(_CLASSES, [0], compat="loose")


def test_on_the_device_no_id_outside_looks_like_a_class() -> None:
    ids = jnp.array([4, 5, -1, -9, 2**31 - 1, -(2**31)])
    assert _jitted(ids).tolist() == [1, BAD_CLASS, DEAD, DEAD, BAD_CLASS, DEAD]
    wide = jnp.array([2**32 - 1, 4, 2**31], jnp.uint32)
    assert _jitted(wide).tolist() == [BAD_CLASS, 1, BAD_CLASS]


def test_narrow_ids_and_large_tables() -> None:
    classes = np.arange(1000)[::-1]
    for dtype in (np.uint8, np.int8):
        ids = np.array([0, 100, np.iinfo(dtype).max], dtype)
        want = [999, 899, 999 - np.iinfo(dtype).max]
        for given_ids in (ids, jnp.asarray(ids)):
            assert token_classes(classes, given_ids).tolist() == want


def test_the_demo_leaves_negative_ids_as_they_are() -> None:
    ids = np.array([4, -1, -9], np.int64)
    host = token_classes(_CLASSES, ids, compat="demo")
    assert (host.dtype, host.tolist()) == (np.int64, [1, -1, -9])
    device = token_classes(_CLASSES, jnp.array([4, -9, 5]), compat="demo")
    assert device.tolist() == [1, -9, BAD_CLASS]
    with pytest.raises(DataError, match=r"ids\[0\] = 5"):
        token_classes(_CLASSES, [5], compat="demo")


def test_p06_an_id_outside_the_vocabulary_reads_no_row() -> None:
    (layout,) = ngram_layouts(
        vocab_size=3, pad_id=0, orders=(2,), n_heads=1, rows_per_head=7, layer_ids=(0,)
    )
    rows = ngram_rows(_jitted(jnp.array([1, _V, 1, 1])), layout)[:, 0]
    assert (rows[1:3] == BAD_ROW).all()
    want = host_ngram_rows(token_classes(_CLASSES, [1, 1]), layout)[:, 0]
    assert [int(rows[0]), int(rows[3])] == want.tolist()


def test_empty_batches_and_no_second_compilation() -> None:
    assert token_classes(_CLASSES, np.zeros((0, 3), int)).shape == (0, 3)
    assert token_classes(_CLASSES, jnp.zeros((2, 0), int)).shape == (2, 0)
    function = jax.jit(partial(token_classes, _CLASSES))
    for i in range(2):
        function(jnp.array([i]))
    assert function._cache_size() == 1
