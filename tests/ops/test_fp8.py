"""FP8 tables: all codes, all pairs of codes, the quantiser against its definition."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from memjax.errors import ConfigError, DataError, ShapeError
from memjax.ops.fp8 import dequantize_rows, e4m3fn_values, e8m0_values, quantize_rows
from memjax.ops.rows import store
from tests.oracles import fp8 as oracle

_CODES = np.arange(256, dtype=np.uint8)
_quantize = jax.jit(quantize_rows, static_argnames="block")
_dequantize = jax.jit(dequantize_rows)
_ROWS, _WIDTH, _BLOCK = 2, 8, 4


def _table(
    low: float = -(2.0**100), high: float = 2.0**100
) -> st.SearchStrategy[np.ndarray]:
    values = st.floats(low, high, width=32, allow_subnormal=False)
    return arrays(np.float32, (_ROWS, _WIDTH), elements=values)


def _read(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    rows = _dequantize(codes, scales, np.arange(len(codes), dtype=np.int32))
    return np.asarray(rows.astype(jnp.float32))


def test_the_values_of_all_codes() -> None:
    for code in range(256):
        for values, exact in (
            (e4m3fn_values(), oracle.e4m3fn(code)),
            (e8m0_values(), oracle.e8m0(code)),
        ):
            assert values.dtype == np.float32
            assert np.isnan(values[code]) if exact is None else values[code] == exact
    for values, dtype in (
        (e4m3fn_values(), ml_dtypes.float8_e4m3fn),
        (e8m0_values(), ml_dtypes.float8_e8m0fnu),
    ):
        np.testing.assert_array_equal(values, _CODES.view(dtype).astype(np.float32))
    assert np.signbit(e4m3fn_values()[0x80])
    assert (e8m0_values()[0], e8m0_values()[254]) == (2.0**-127, 2.0**127)


def test_all_pairs_of_codes_decode_to_the_rounded_product() -> None:
    """Row s has every code under scale s; 2^-127 and the subnormals are not flushed."""
    codes = np.broadcast_to(_CODES, (256, 256))
    rows = _dequantize(codes, _CODES[:, None], np.arange(256, dtype=np.int32))
    with np.errstate(over="ignore", invalid="ignore"):
        products = e8m0_values()[:, None] * e4m3fn_values()
        want = products.astype(ml_dtypes.bfloat16)
    assert rows.dtype == jnp.bfloat16
    got = np.asarray(rows)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    bits = [np.where(nan, 0, array.view(np.uint16)) for array in (got, want)]
    np.testing.assert_array_equal(*bits)
    assert got[0, 0x38].view(np.uint16) == 0x0040  # 1.0 * 2^-127, a subnormal
    assert nan[255].all() and nan[:, 0x7F].all() and nan[:, 0xFF].all()


@given(_table() | _table(-3, 3) | _table(-(2.0**-13), 2.0**-13))
def test_the_quantiser_equals_its_definition(table: np.ndarray) -> None:
    codes, scales = _quantize(table, block=_BLOCK)
    assert codes.dtype == scales.dtype == jnp.uint8
    want_codes, want_scales = oracle.quantize(table, _BLOCK)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(codes, want_codes)


def test_ties_and_borders_of_the_quantiser() -> None:
    """448 fits the scale 1; halfway between two codes the even one is taken."""
    unit = 2.0**-9  # the least code
    for row, want in (
        ([448, 17, 19, unit / 2], [0x7E, 0x58, 0x5A, 0x00]),
        ([448, -0.0, 1.5 * unit, -unit / 4], [0x7E, 0x80, 0x02, 0x80]),
    ):
        codes, scales = _quantize(np.array([row], np.float32), block=4)
        assert scales.tolist() == [[127]]
        assert codes.tolist() == [want]
    above = np.array([[np.nextafter(np.float32(448), np.float32(449)), 0, 0, 0]])
    assert _quantize(above.astype(np.float32), block=4)[1].tolist() == [[128]]
    zeros = _quantize(np.zeros((1, 4), np.float32), block=4)
    assert [array.tolist() for array in zeros] == [[[0] * 4], [[105]]]


def test_every_step_of_the_grid_and_its_midpoints_round_as_the_type_does() -> None:
    grid = e4m3fn_values()[:127]
    middle = (grid[1:] + grid[:-1]) / 2
    near = [np.nextafter(middle, np.float32(to)) for to in (0, 1000)]
    x = np.concatenate([grid, middle, *near, [448]]).astype(np.float32)
    x = np.stack([x, -x])
    codes, scales = _quantize(x, block=x.shape[1])
    assert (np.asarray(scales) == 127).all()
    want = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(codes, want)


@given(_table(-(2.0**64), 2.0**64))
def test_what_is_read_back_is_near_and_stays(table: np.ndarray) -> None:
    codes, scales = _quantize(table, block=_BLOCK)
    back = _read(codes, scales)
    scale = np.repeat(e8m0_values()[np.asarray(scales)], _BLOCK, axis=-1)
    assert (np.abs(back - table) <= np.maximum(np.abs(table) / 16, scale / 1024)).all()
    again = _read(*_quantize(back, block=_BLOCK))
    np.testing.assert_array_equal(again, back)


@given(_table(1.0, 2.0**64))
def test_a_power_of_two_moves_the_scales_alone(table: np.ndarray) -> None:
    codes, scales = _quantize(table, block=_BLOCK)
    codes_4, scales_4 = _quantize(4 * table, block=_BLOCK)
    np.testing.assert_array_equal(codes_4, codes)
    np.testing.assert_array_equal(scales_4, np.asarray(scales) + 2)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_reads_nan_and_its_neighbour_does_not(
    bad: float,
) -> None:
    table = np.ones((_ROWS, _WIDTH), np.float32)
    table[0, 1] = bad
    back = _read(*_quantize(table, block=_BLOCK))
    want = np.ones_like(table)
    want[0, :_BLOCK] = np.nan
    np.testing.assert_array_equal(back, want)


def test_bfloat16_and_its_carrier_are_quantised_as_float32() -> None:
    narrow = jax.random.normal(jax.random.key(0), (3, 64), jnp.bfloat16)
    want = quantize_rows(narrow.astype(jnp.float32))
    assert want[1].shape == (3, 2)
    for table in (narrow, store(narrow)):
        for got, expected in zip(quantize_rows(table), want, strict=True):
            np.testing.assert_array_equal(got, expected)
    jitted = _quantize(narrow)
    np.testing.assert_array_equal(jitted[0], want[0])
    np.testing.assert_array_equal(jitted[1], want[1])


def test_blocks_of_different_size_in_a_row_differ_in_scale() -> None:
    row = np.repeat(np.float32([448, 4.48, 1e6, 0]), 2)[None]
    scales = _quantize(row, block=2)[1]
    assert len(set(np.asarray(scales)[0].tolist())) == 4
    np.testing.assert_allclose(_read(*_quantize(row, block=2)), row, rtol=1 / 16)


def test_reads_of_any_shape_and_ids_outside_the_table() -> None:
    table = np.arange(24, dtype=np.float32).reshape(3, 8)
    codes, scales = _quantize(table, block=_BLOCK)
    whole = _read(codes, scales)
    ids = jnp.array([[2, 0, 2], [1, 3, -1]])
    rows = np.asarray(_dequantize(codes, scales, ids).astype(jnp.float32))
    assert rows.shape == (2, 3, 8)
    np.testing.assert_array_equal(rows[0], whole[[2, 0, 2]])
    assert np.isnan(rows[1, 1:]).all()
    assert dequantize_rows(codes, scales, np.zeros((0,), int)).shape == (0, 8)
    assert quantize_rows(np.zeros((0, 32), np.float32))[1].shape == (0, 1)
    with pytest.raises(DataError, match=r"row id -1 .* allowed: 0 <= id < 3"):
        dequantize_rows(codes, scales, [[0, -1]])
    n_compiled = _dequantize._cache_size()
    _dequantize(codes, scales, ids + 1)
    assert _dequantize._cache_size() == n_compiled


def test_what_does_not_fit_is_refused() -> None:
    table = np.zeros((2, 8), np.float32)
    for block in (3, 0, 16):
        with pytest.raises(ConfigError, match=f"block = {block} .*divisor of .* 8"):
            quantize_rows(table, block)
    with pytest.raises(DataError, match="table has dtype int32"):
        quantize_rows(table.astype(np.int32))
    codes, scales = np.zeros((2, 8), np.uint8), np.zeros((2, 2), np.uint8)
    with pytest.raises(DataError, match="codes have dtype int8"):
        dequantize_rows(codes.astype(np.int8), scales, [0])
    for bad in (scales[:1], np.zeros((2, 3), np.uint8), scales[:, :0]):
        with pytest.raises(ShapeError, match="scales has shape"):
            dequantize_rows(codes, bad, [0])


def test_a_read_has_no_64_bit_number() -> None:
    codes, scales = jnp.zeros((2, 8), jnp.uint8), jnp.zeros((2, 2), jnp.uint8)
    jaxpr = jax.make_jaxpr(dequantize_rows)(codes, scales, jnp.zeros((3,), jnp.int32))
    assert "64[" not in str(jaxpr)
