"""FNV-1a of byte windows: known vectors, a slow oracle, jit against host."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from memjax.errors import ConfigError, DataError
from memjax.ops.byte_hash import (
    FNV_BASES,
    byte_fnv,
    byte_fnv_rows,
    host_byte_fnv,
    host_byte_fnv_rows,
)
from memjax.ops.look_back import BAD_ROW, DEAD, next_history
from tests.oracles.byte_hash import byte_rows

_ORDERS, _SLOTS = (1, 3, 5), (100, 8_000_000, 97)
_SHAPE = (2, 9)


@cache
def _jitted(basis: str) -> Any:
    def hashed(bytes_BT: Any, segments_BT: Any, history_BN: Any) -> Any:
        options = {
            "basis": basis,
            "segments_BT": segments_BT,
            "history_BN": history_BN,
        }
        pair = byte_fnv(bytes_BT, _ORDERS, **options)
        return pair, byte_fnv_rows(bytes_BT, _ORDERS, _SLOTS, **options)

    return jax.jit(hashed)


def _bytes(lowest: int = 0) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.int32, _SHAPE, elements=st.integers(lowest, 255))


def test_published_vectors_of_the_standard_basis() -> None:
    """FNV-1a 64 of "a" and "foobar" as the authors of FNV publish them."""
    text = np.frombuffer(b"foobar", np.uint8)
    assert host_byte_fnv(text, (6,), basis="standard")[-1, 0] == 0x85944171F73967E8
    a = np.frombuffer(b"a", np.uint8)
    assert host_byte_fnv(a, (6,), basis="standard")[0, 0] == 0xAF63DC4C8601EC8C


@given(_bytes(), st.sampled_from(sorted(FNV_BASES)))
def test_host_equals_the_definition(data: np.ndarray, basis: str) -> None:
    got = host_byte_fnv_rows(data, _ORDERS, _SLOTS, basis=basis)
    want = [byte_rows(row, _ORDERS, _SLOTS, FNV_BASES[basis]) for row in data.tolist()]
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)


@given(
    _bytes(DEAD),
    arrays(np.int32, _SHAPE, elements=st.integers(0, 2)),
    arrays(np.int32, (2, 4), elements=st.integers(DEAD, 255)),
    st.sampled_from(sorted(FNV_BASES)),
)
def test_jit_is_bit_equal_to_the_host(
    data: np.ndarray, segments: np.ndarray, history: np.ndarray, basis: str
) -> None:
    options: dict[str, Any] = {
        "basis": basis,
        "segments_BT": segments,
        "history_BN": history,
    }
    (high, low), rows = _jitted(basis)(data, segments, history)
    joined = np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low)
    np.testing.assert_array_equal(joined, host_byte_fnv(data, _ORDERS, **options))
    np.testing.assert_array_equal(
        rows, host_byte_fnv_rows(data, _ORDERS, _SLOTS, **options)
    )
    assert rows.dtype == jnp.int32


@given(_bytes(DEAD), st.integers(0, 9))
def test_chunks_equal_the_whole(data: np.ndarray, cut: int) -> None:
    whole = host_byte_fnv(data, _ORDERS)
    history = next_history(data[:, :cut], None, max(_ORDERS))
    rest = host_byte_fnv(data[:, cut:], _ORDERS, history_BN=history)
    np.testing.assert_array_equal(rest, whole[:, cut:])


def test_p09_packed_documents_hash_as_they_would_alone() -> None:
    data = np.array([5, 6, 7, 8], np.uint8)
    packed = host_byte_fnv(data, _ORDERS, segments_BT=np.array([1, 1, 2, 2]))
    np.testing.assert_array_equal(packed[:2], host_byte_fnv(data[:2], _ORDERS))
    np.testing.assert_array_equal(packed[2:], host_byte_fnv(data[2:], _ORDERS))
    assert (packed[2, 1:] != host_byte_fnv(data, _ORDERS)[2, 1:]).all()


def test_columns_stand_in_the_order_of_the_lengths() -> None:
    data = np.arange(12, dtype=np.uint8).reshape(2, 6)
    up, down = (host_byte_fnv(data, orders) for orders in ((2, 5), (5, 2)))
    np.testing.assert_array_equal(up, down[..., ::-1])
    rows = byte_fnv_rows(data, (5, 2), (7, 11))
    np.testing.assert_array_equal(rows, host_byte_fnv_rows(data, (5, 2), (7, 11)))
    assert (np.asarray(rows[..., 1]) >= 7).all()


def test_a_window_without_bytes_is_the_basis() -> None:
    nothing = host_byte_fnv(np.array([DEAD]), (2,))
    assert nothing[0, 0] == FNV_BASES["dormouse"]


def test_p06_a_value_that_is_no_byte_is_an_error_or_marked() -> None:
    """On the host an error; inside jit every window that sees it is outside."""
    data = np.full(_SHAPE, 65, np.int32)
    data[0, 2] = 256
    with pytest.raises(DataError, match=r"bytes\[0, 2\] = 256 .*id < 256"):
        host_byte_fnv(data, _ORDERS)
    with pytest.raises(DataError, match=r"bytes\[0, 2\] = 256"):
        byte_fnv(data, _ORDERS)
    start = np.full((2, 4), DEAD, np.int32)
    rows = np.asarray(_jitted("dormouse")(data, np.ones_like(data), start)[1])
    marked = np.zeros((*_SHAPE, 3), bool)
    for column, n in enumerate(_ORDERS):
        marked[0, 2 : 2 + n, column] = True
    np.testing.assert_array_equal(rows == BAD_ROW, marked)


@pytest.mark.parametrize(
    ("orders", "slots", "basis", "message"),
    [
        ((), (), "standard", "orders"),
        ((2, 2), (5, 5), "standard", "orders"),
        ((0,), (5,), "standard", "orders"),
        ((2,), (5,), "other", "basis = 'other'.*dormouse.*standard"),
        ((2, 3), (5,), "standard", "n_slots.*2 sizes"),
        ((2,), (0,), "standard", "n_slots"),
        ((2, 3), (2**30, 2**30), "standard", "n_slots.*2147483647"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    orders: tuple[int, ...], slots: tuple[int, ...], basis: str, message: str
) -> None:
    data = np.zeros((1, 3), np.uint8)
    for rows in (host_byte_fnv_rows, byte_fnv_rows):
        with pytest.raises(ConfigError, match=message):
            rows(data, orders, slots, basis=basis)


def test_no_64_bit_number_in_jit() -> None:
    jaxpr = jax.make_jaxpr(lambda x: byte_fnv_rows(x, _ORDERS, _SLOTS))(
        jnp.zeros((1, 4), jnp.uint8)
    )
    assert "64[" not in str(jaxpr)
