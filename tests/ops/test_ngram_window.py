"""Windows as rows: a slow loop, jit against host, pieces, documents, bad ids."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, DataError
from memjax.ops.hashed_rows import hashed_rows, host_hashed_rows
from memjax.ops.look_back import BAD_ROW, DEAD, next_history
from memjax.ops.ngram_window import WindowLayout

LAYOUT = WindowLayout(vocab_size=10, order=3)
IDS = np.array([[5, 6, 7, 8, DEAD, 0, 9]], np.int32)
SEGMENTS = np.array([[1, 1, 2, 2, 2, 2, 2]], np.int32)


def test_rows_are_those_of_a_loop_and_of_literal_windows():
    got = LAYOUT.host_rows(IDS, segments_BT=SEGMENTS)
    none = 10
    want = [
        (5, none, none),
        (6, 5, none),
        (7, none, none),
        (8, 7, none),
        (none, none, none),
        (0, none, none),
        (9, 0, none),
    ]
    rows = [[11 * k + token for k, token in enumerate(window)] for window in want]
    np.testing.assert_array_equal(got[0], rows)
    assert LAYOUT.n_rows == 33 and LAYOUT.n_columns == 3


def test_jit_equals_host_and_any_pieces_give_the_same():
    jitted = jax.jit(
        lambda ids, segments, history: hashed_rows(
            LAYOUT, ids, segments_BT=segments, history_BN=history
        )
    )
    got = jitted(IDS, SEGMENTS, None)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(
        got, host_hashed_rows(LAYOUT, IDS, segments_BT=SEGMENTS)
    )
    whole = LAYOUT.host_rows(IDS)
    history = np.full((1, 2), DEAD, np.int32)
    for t in range(IDS.shape[1]):
        piece = IDS[:, t : t + 1]
        for rows in (
            jitted(piece, None, history),
            LAYOUT.host_rows(piece, history_BN=history),
        ):
            np.testing.assert_array_equal(rows, whole[:, t : t + 1])
        history = next_history(piece, history, 3)


def test_ids_outside():
    with pytest.raises(DataError, match=r"ids\[0, 1\] = 10"):
        LAYOUT.host_rows(np.array([[0, 10]]))
    rows = jax.jit(LAYOUT.rows)(jnp.array([[0, 10, 1, 2, 3]]))
    assert (np.asarray(rows)[0] == BAD_ROW).tolist() == [
        [False] * 3,
        [True, False, False],
        [False, True, False],
        [False, False, True],
        [False] * 3,
    ]
    with pytest.raises(ConfigError, match="order = 0"):
        WindowLayout(vocab_size=10, order=0)
    with pytest.raises(ConfigError, match=r"order = 3 is not allowed: at most 1 "):
        WindowLayout(vocab_size=2**30 + 1, order=3)


def test_the_fingerprint_tells_layouts_apart():
    assert LAYOUT.fingerprint() == dataclasses.replace(LAYOUT).fingerprint()
    others = [
        dataclasses.replace(LAYOUT, **change)
        for change in ({"order": 2}, {"vocab_size": 11})
    ]
    assert len({layout.fingerprint() for layout in (LAYOUT, *others)}) == 3
