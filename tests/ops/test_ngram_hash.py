"""Token ids to rows: host against a slow oracle, jit against host, and the laws."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from memjax.errors import ConfigError, DataError, ShapeError
from memjax.ops.look_back import look_backs
from memjax.ops.ngram_hash import (
    BAD_ROW,
    DEAD,
    host_ngram_rows,
    next_history,
    ngram_layouts,
    ngram_rows,
)
from tests.oracles.ngram_hash import ngram_rows as oracle_rows

_V, _B, _T = 50, 2, 11
(_TOY,) = ngram_layouts(
    vocab_size=_V,
    pad_id=3,
    orders=(1, 2, 4),
    n_heads=2,
    rows_per_head=97,
    layer_ids=(5,),
    seed=4,
)
_N = _TOY.max_order


@cache
def _jitted() -> Any:
    """One compiled function for every property: it takes segments and a history."""

    def rows(ids_BT: Any, segments_BT: Any, history_BN: Any) -> jax.Array:
        return ngram_rows(ids_BT, _TOY, segments_BT=segments_BT, history_BN=history_BN)

    return jax.jit(rows)


def _ids(lowest: int = DEAD) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.int32, (_B, _T), elements=st.integers(lowest, _V - 1))


@st.composite
def _segments(draw: Any) -> np.ndarray:
    """Documents of random length, then perhaps padding."""
    starts = draw(arrays(bool, (_B, _T)))
    n_real = draw(arrays(np.int32, (_B, 1), elements=st.integers(0, _T)))
    numbers = 1 + np.cumsum(starts, axis=1).astype(np.int32)
    return np.where(np.arange(_T) < n_real, numbers, 0).astype(np.int32)


def _start(n_batch: int = _B) -> np.ndarray:
    return np.full((n_batch, _N - 1), DEAD, np.int32)


@given(_ids(), _segments())
def test_host_equals_the_definition(ids: np.ndarray, segments: np.ndarray) -> None:
    got = host_ngram_rows(ids, _TOY, segments_BT=segments)
    want = [
        oracle_rows(*row)
        for row in zip(ids.tolist(), [_TOY] * _B, segments.tolist(), strict=True)
    ]
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)


@given(_ids(), _segments(), arrays(np.int32, (_B, _N - 1), elements=st.integers(-1, 9)))
def test_jit_is_bit_equal_to_the_host(
    ids: np.ndarray, segments: np.ndarray, history: np.ndarray
) -> None:
    want = host_ngram_rows(ids, _TOY, segments_BT=segments, history_BN=history)
    got = _jitted()(ids, segments, history)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("vocab_size", [2, 257, 99092, 2**31 - 1])
def test_jit_is_bit_equal_for_small_and_large_vocabularies_and_moduli(
    vocab_size: int,
) -> None:
    size = {2: 2, 257: 60000, 99092: 16_000_000, 2**31 - 1: 2**30}[vocab_size]
    (layout,) = ngram_layouts(
        vocab_size=vocab_size,
        pad_id=1,
        orders=(3,),
        n_heads=1,
        rows_per_head=size,
        layer_ids=(1,),
    )
    ids = np.random.default_rng(0).integers(0, vocab_size, (4, 64)).astype(np.int32)
    got = jax.jit(partial(ngram_rows, layout=layout))(ids)
    np.testing.assert_array_equal(got, host_ngram_rows(ids, layout))
    assert int(got.max()) < layout.n_rows


@given(_ids(), st.lists(st.integers(0, _T), max_size=4))
def test_any_cutting_into_chunks_gives_the_same_rows(
    ids: np.ndarray, cuts: list[int]
) -> None:
    history, parts = None, []
    for chunk in np.split(ids, sorted(cuts), axis=1):
        parts.append(host_ngram_rows(chunk, _TOY, history_BN=history))
        history = next_history(chunk, history, _N)
    rows = np.concatenate(parts, axis=1)
    np.testing.assert_array_equal(rows, host_ngram_rows(ids, _TOY))
    extended = np.concatenate([_start(), ids], axis=1)
    np.testing.assert_array_equal(history, extended[:, -(_N - 1) :])


@given(_ids(), _segments(), st.integers(1, _T - 1))
def test_packed_rows_may_be_cut_too(
    ids: np.ndarray, segments: np.ndarray, cut: int
) -> None:
    whole = host_ngram_rows(ids, _TOY, segments_BT=segments)
    history = next_history(ids[:, :cut], None, _N, segments_BT=segments[:, :cut])
    goes_on = segments[:, cut] == segments[:, cut - 1]
    history = np.where(goes_on[:, None], history, DEAD)
    rest = host_ngram_rows(
        ids[:, cut:], _TOY, segments_BT=segments[:, cut:], history_BN=history
    )
    np.testing.assert_array_equal(rest, whole[:, cut:])


@given(_ids(), _segments())
def test_a_document_has_the_rows_it_has_alone(
    ids: np.ndarray, segments: np.ndarray
) -> None:
    packed = host_ngram_rows(ids, _TOY, segments_BT=segments)
    for b in range(_B):
        for number in set(segments[b].tolist()) - {0}:
            here = segments[b] == number
            alone = host_ngram_rows(ids[b, here], _TOY)
            np.testing.assert_array_equal(packed[b, here], alone)


@given(_ids(), _ids())
def test_rows_depend_on_the_last_n_tokens_only(a: np.ndarray, b: np.ndarray) -> None:
    mixed = np.concatenate([a[:, : _T - _N], b[:, _T - _N :]], axis=1)
    segments, history = np.ones_like(a), _start()
    from_mixed = np.asarray(_jitted()(mixed, segments, history))[:, -1]
    from_b = np.asarray(_jitted()(b, segments, history))[:, -1]
    np.testing.assert_array_equal(from_mixed, from_b)
    before = np.asarray(_jitted()(mixed, segments, history))[:, : _T - _N]
    np.testing.assert_array_equal(
        before, np.asarray(_jitted()(a, segments, history))[:, : _T - _N]
    )


@given(_ids())
def test_permuting_the_batch_permutes_the_rows(ids: np.ndarray) -> None:
    segments, history = np.ones_like(ids), _start()
    rows = np.asarray(_jitted()(ids, segments, history))
    flipped = np.asarray(_jitted()(ids[::-1], segments, history))
    np.testing.assert_array_equal(flipped, rows[::-1])


def test_p06_an_id_outside_the_vocabulary_is_an_error_naming_it() -> None:
    """Vocabulary of 4 ids; 10 and -9 in a host batch."""
    (layout,) = ngram_layouts(
        vocab_size=4, pad_id=0, orders=(2,), n_heads=1, rows_per_head=7, layer_ids=(0,)
    )
    for rows in (host_ngram_rows, ngram_rows):
        for bad in (10, 4, -9):
            batch = np.array([[1, bad]])
            with pytest.raises(DataError, match=rf"ids\[0, 1\] = {bad} .*id < 4"):
                rows(batch, layout)
    with pytest.raises(DataError, match=r"history\[0, 0\] = 4"):
        host_ngram_rows(np.array([[1]]), layout, history_BN=np.array([[4]], np.uint64))
    with pytest.raises(DataError, match="float64"):
        host_ngram_rows(np.array([[1.0]]), layout)


def test_p06_inside_jit_a_bad_id_marks_every_window_that_sees_it() -> None:
    """Such a row is outside of every table, so a filling gather shows it."""
    ids = np.full((_B, _T), 5, np.int32)
    ids[0, 3], ids[1, 8] = _V, -9
    segments = np.ones_like(ids)
    segments[0, 5:] = 2
    good = np.where((ids == _V) | (ids == -9), 5, ids)
    want = host_ngram_rows(good, _TOY, segments_BT=segments)
    per_order = np.repeat(_TOY.orders, _TOY.n_heads)
    for b, at, end in ((0, 3, 5), (1, 8, _T)):
        for t in range(at, end):
            want[b, t, t - at < per_order] = BAD_ROW
    got = np.asarray(_jitted()(ids, segments, _start()))
    np.testing.assert_array_equal(got, want)
    table = jnp.ones((_TOY.n_rows, 1))
    read = table.at[got].get(mode="fill", fill_value=jnp.nan)[..., 0]
    np.testing.assert_array_equal(np.isnan(read), want == BAD_ROW)


def test_p06_no_token_reads_the_rows_of_padding_never_the_last_row() -> None:
    dead = host_ngram_rows(np.full((1, 3), DEAD), _TOY)
    padding = host_ngram_rows(np.full((1, 1), _TOY.pad_id), _TOY)
    np.testing.assert_array_equal(dead, np.broadcast_to(padding, dead.shape))


def test_p07_64_bit_ids_are_never_wrapped() -> None:
    """[2**32, 2**31, 2**40 + 5] would reach the device as [0, -2147483648, 5]."""
    ids = np.array([[2**32, 2**31, 2**40 + 5]])
    for dtype in (np.int64, np.uint64):
        with pytest.raises(DataError, match="4294967296"):
            ngram_rows(ids.astype(dtype), _TOY)


def test_p07_wide_ids_inside_jit_are_marked_not_wrapped() -> None:
    """uint32 is the widest type a device has without 64-bit mode."""
    ids = jnp.array([[1, 2**32 - 1, 2**31 + 1, 1, 1]], jnp.uint32)
    rows = np.asarray(jax.jit(partial(ngram_rows, layout=_TOY))(ids))
    assert (rows[0, 1:3] == BAD_ROW).all()
    assert (rows[0, 0] < _TOY.n_rows).all()


def test_p09_packed_documents() -> None:
    """Tokens [5, 6, 7, 8], segments [1, 1, 2, 2], n = 3, fill 0."""
    ids, segments = np.array([5, 6, 7, 8]), np.array([1, 1, 2, 2])
    windows = look_backs(ids, 3, segments_BT=segments)
    oldest_first = [np.where(blocked, 0, token) for token, blocked in windows][::-1]
    assert np.stack(oldest_first, axis=-1).tolist() == [
        [0, 0, 5],
        [0, 5, 6],
        [0, 0, 7],
        [0, 7, 8],
    ]
    rows = host_ngram_rows(ids, _TOY, segments_BT=segments)
    np.testing.assert_array_equal(rows[2:], host_ngram_rows(ids[2:], _TOY))
    padded = host_ngram_rows(
        np.array([5, 6, 9, 9]), _TOY, segments_BT=np.array([1, 1, 0, 0])
    )
    np.testing.assert_array_equal(padded[:2], rows[:2])


@pytest.mark.parametrize("lengths", [(11,), (1, 10), (4, 4, 3), (1,) * 11])
def test_p10_step_by_step_equals_all_at_once(lengths: tuple[int, ...]) -> None:
    """Eleven tokens fed as 11; 1 + 10; 4 + 4 + 3; and one by one, on the device."""
    ids = np.random.default_rng(1).integers(0, _V, (_B, _T)).astype(np.int32)
    rows, history = [], jnp.asarray(_start())
    for chunk in np.split(ids, np.cumsum(lengths)[:-1], axis=1):
        rows.append(_jitted()(chunk, np.ones_like(chunk), history))
        history = next_history(jnp.asarray(chunk), history, _N)
    want = host_ngram_rows(ids, _TOY)
    np.testing.assert_array_equal(np.concatenate(rows, axis=1), want)


def test_p10_rejected_guesses_leave_no_trace() -> None:
    """Feed 8, guess 3, reject the last 2, feed 2 others."""
    ids = np.random.default_rng(2).integers(0, _V, (1, _T)).astype(np.int32)
    after_8 = next_history(ids[:, :8], None, _N)
    guesses = np.concatenate([ids[:, 8:9], ids[:, :2]], axis=1)
    host_ngram_rows(guesses, _TOY, history_BN=after_8)
    after_9 = next_history(guesses[:, :1], after_8, _N)
    rows = host_ngram_rows(ids[:, 9:], _TOY, history_BN=after_9)
    np.testing.assert_array_equal(rows, host_ngram_rows(ids, _TOY)[:, 9:])


def test_histories_of_other_rows_do_not_matter() -> None:
    ids = np.array([[7], [8]], np.int32)
    history = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    both = host_ngram_rows(ids, _TOY, history_BN=history)
    history[0] = DEAD
    idle = host_ngram_rows(ids, _TOY, history_BN=history)
    np.testing.assert_array_equal(idle[1], both[1])
    assert (idle[0, 0, _TOY.n_heads :] != both[0, 0, _TOY.n_heads :]).any()


def test_demo_compat_multiplies_negative_ids_in_twos_complement() -> None:
    ids = [3, -9, 7, -1, 0]
    got = host_ngram_rows(np.array(ids), _TOY, compat="demo")
    seen = [ids[4], ids[3], ids[2], ids[1]]
    mix, want = 0, []
    for k in range(_N):
        mix ^= seen[k] * _TOY.multipliers[k]
        if k + 1 in _TOY.orders:
            primes = _TOY.primes[_TOY.orders.index(k + 1)]
            want += [mix % prime for prime in primes]
    np.testing.assert_array_equal(got[-1] - _TOY.offsets, want)
    assert (got >= 0).all() and (got < _TOY.n_rows).all()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"segments_BT": np.ones((1, 3), int)}, ShapeError),
        ({"history_BN": np.zeros((1, 2), int)}, ShapeError),
        ({"compat": "loose"}, ConfigError),
        ({"compat": "demo", "history_BN": np.zeros((1, 3), int)}, ConfigError),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        host_ngram_rows(np.zeros((1, 4), int), _TOY, **options)


def test_shapes_of_any_rank_and_empty_ones() -> None:
    ids = np.arange(6)
    flat = host_ngram_rows(ids, _TOY)
    deep = host_ngram_rows(ids.reshape(1, 1, 6), _TOY)
    assert flat.shape == (6, 6)
    np.testing.assert_array_equal(deep[0, 0], flat)
    assert host_ngram_rows(ids[:0], _TOY).shape == (0, 6)
    assert next_history(ids[:0], None, _N).tolist() == [DEAD] * (_N - 1)
    nothing = jax.jit(partial(ngram_rows, layout=_TOY))(jnp.zeros((2, 0), jnp.int32))
    assert nothing.shape == (2, 0, 6)


def test_no_64_bit_number_and_no_second_compilation() -> None:
    jaxpr = jax.make_jaxpr(partial(ngram_rows, layout=_TOY))(jnp.zeros((1, 4), int))
    assert "64[" not in str(jaxpr)
    function = jax.jit(partial(ngram_rows, layout=_TOY))
    for seed in range(2):
        function(np.full((1, 4), seed, np.int32))
    assert function._cache_size() == 1


def test_jit_equals_no_jit_also_for_64_bit_host_ids() -> None:
    ids = np.random.default_rng(3).integers(0, _V, (_B, _T))
    assert ids.dtype == np.int64
    segments = np.ones_like(ids, np.int32)
    eager = ngram_rows(ids, _TOY, segments_BT=segments, history_BN=_start())
    jitted = _jitted()(ids.astype(np.int32), segments, _start())
    np.testing.assert_array_equal(eager, jitted)
