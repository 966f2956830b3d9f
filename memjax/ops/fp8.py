"""Tables of 8-bit floats with a power-of-two scale per block of a row.

What: `quantize_rows`, from a trained table to codes and scales; `dequantize_rows` and
    `fp8_bag`, which read rows of them and weighted sums; the values of all codes.
Why: half the memory of bfloat16 where a table is only read; published in this form.
When not: training; the master table stays float32 or bfloat16 and is quantised again.

Codes are float8_e4m3fn (bias 7, largest 448, no infinity, 0x7f and 0xff NaN), scales
float8_e8m0fnu (2^(code - 127), 255 NaN), both kept as uint8 and decoded by tables: no
backend need know these types, and none can flush 2^-127 to zero.

Source: DeepSeek-V4.1-Flash inference/engram.py (ParallelEngramEmbedding) for the form
and the read. How its tables were quantised is not published; the rule here is that of
public transcriptions of its activation quantiser (act_quant).
"""

import math
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memjax.errors import ConfigError, DataError, ShapeError
from memjax.ops import bag_kernels
from memjax.ops.embedding_bag import (
    check_weights,
    plain_products,
    plain_sums,
    row_ids,
)
from memjax.ops.rows import load

LARGEST = 448.0
_LEAST_AMAX = 1e-4
_NAN_CODE = 0x7F


@cache
def e4m3fn_values() -> np.ndarray:
    """The values of the 256 codes of float8_e4m3fn, float32."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    # Exponent 0 holds the subnormals: no leading 1, same power as exponent 1.
    whole = np.where(exponent > 0, 8 + mantissa, mantissa)
    values = np.ldexp(whole.astype(np.float32), np.maximum(exponent, 1) - 10)
    values[(codes & _NAN_CODE) == _NAN_CODE] = np.nan
    return np.where(codes < 128, values, -values)


@cache
def e8m0_values() -> np.ndarray:
    """The values of the 256 codes of float8_e8m0fnu, float32; 2^-127 is subnormal."""
    values = np.ldexp(np.float32(1), np.arange(255) - 127, dtype=np.float32)
    return np.append(values, np.float32(np.nan))


@cache
def _products() -> np.ndarray:
    """Bits of bfloat16(code * scale), uint16 [256 codes * 256 scales]."""
    with np.errstate(over="ignore", invalid="ignore"):
        products = np.multiply.outer(e4m3fn_values(), e8m0_values())
        return products.astype(jnp.bfloat16).view(np.uint16).ravel()


def quantize_rows(table_RW: Any, block: int = 32) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of a table.

    A block of a row has the scale 2^ceil(log2(max(amax, 1e-4) * float32(1 / 448))),
    amax its largest absolute value; the codes are x / scale, clipped to +-448 and
    rounded to nearest, ties to even.

    Args:
        table_RW: float [..., R, W] (uint16 holds the bits of bfloat16), as float32.
        block: entries that share a scale, a divisor of W; 32 in the published tables.

    Returns:
        (codes uint8 [..., R, W], scales uint8 [..., R, W / block]). An entry is off by
        at most 1/16 of itself or 2^-10 of its scale, whichever is larger. A block with
        a NaN or an infinity is NaN as a whole.

    Raises:
        ConfigError: `block` is below 1, or does not divide W.
        DataError: the table is not of floats.

    Cost: about 7 ns an entry on a CPU, and the table in float32 once more
        while it runs; a table that fills the memory is quantised some rows at a time.
    Differs: the exponent is read from the bits of the float32, where a rounded
        logarithm may be one off next to a power of two.
    """
    x_RW = load(jnp.asarray(table_RW))
    if not jnp.issubdtype(x_RW.dtype, jnp.floating):
        raise DataError(f"the table has dtype {x_RW.dtype}, allowed: floats")
    width = x_RW.shape[-1]
    if block < 1 or width % block:
        raise ConfigError("block", block, f"a divisor of the row width {width}")
    x_RBW = x_RW.astype(jnp.float32).reshape(*x_RW.shape[:-1], width // block, block)
    amax_RB = jnp.max(jnp.abs(x_RBW), axis=-1)
    ratio_RB = jnp.maximum(amax_RB, _LEAST_AMAX) * np.float32(1 / LARGEST)
    bits_RB = lax.bitcast_convert_type(ratio_RB, jnp.int32)
    # e8m0 is the exponent field of float32; anything in the fraction rounds it up.
    scales_RB = jnp.minimum((bits_RB >> 23) + ((bits_RB & 0x7FFFFF) != 0), 255)
    finite_RB1 = (scales_RB < 255)[..., None]
    inverse_RB1 = _power_of_two(127 - scales_RB)[..., None]
    scaled_RBW = jnp.where(finite_RB1, x_RBW, 0) * jnp.where(finite_RB1, inverse_RB1, 0)
    codes_RBW = jnp.where(finite_RB1, _e4m3fn_codes(scaled_RBW), _NAN_CODE)
    codes_RW = codes_RBW.reshape(x_RW.shape).astype(jnp.uint8)
    return codes_RW, scales_RB.astype(jnp.uint8)


def dequantize_rows(
    codes_RW: Any, scales_RB: Any, ids: Any, kernel: str = "auto"
) -> jax.Array:
    """Rows of a quantised table: bfloat16(code * scale).

    Args:
        codes_RW: uint8 [R, W].
        scales_RB: uint8 [R, B], B a divisor of W.
        ids: integers [...]; of the host: checked.
        kernel: the program that reads, see `bag_kernels`; one of its KERNELS.

    Returns:
        bfloat16 [..., W], for every pair of codes the float32 product rounded to
        nearest even: subnormals are kept, what is too large is infinite. All others are
        exact, since a code has 4 significant bits. A read outside the table is NaN.

    Raises:
        DataError: an id of the host is outside the table; codes or scales not uint8.
        ShapeError: codes and scales do not belong together.

    Cost: a read of W + B bytes an id, and of 2 bytes an entry from a table of 128 KiB;
        on a CPU no slower than the same rows in bfloat16.
    """
    table = _checked(codes_RW, scales_RB)
    ids = row_ids(ids, len(table[0]))
    rows_PW = bag_kernels.fp8_rows(kernel, _plain_rows, table, ids.reshape(-1))
    return rows_PW.reshape(*ids.shape, table[0].shape[1])


def fp8_bag(
    codes_RW: Any, scales_RB: Any, ids: Any, weights: jax.Array, kernel: str = "auto"
) -> jax.Array:
    """Weighted sums of rows of a quantised table.

    Args:
        codes_RW, scales_RB, kernel: as of `dequantize_rows`.
        ids: integers [..., K]; of the host: checked.
        weights: float [..., K].

    Returns:
        What `embedding_bag` gives for the rows of `dequantize_rows`. The gradient is
        that of the weights alone.

    Raises:
        DataError, ShapeError: as `dequantize_rows` and `embedding_bag`.

    Cost: K reads of W + B bytes a token, and as many again for the gradient.
    """
    table = _checked(codes_RW, scales_RB)
    ids = row_ids(ids, len(table[0]))
    check_weights(ids, weights)
    flat = (math.prod(ids.shape[:-1]), ids.shape[-1])
    sums_NW: Any = _bag(kernel, table, ids.reshape(flat), weights.reshape(flat))
    return sums_NW.reshape(*ids.shape[:-1], table[0].shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bag(
    kernel: str, table: bag_kernels.Table, ids_NK: jax.Array, weights_NK: jax.Array
) -> jax.Array:
    return bag_kernels.bag_sums(
        kernel, _plain_sums, table, ids_NK, weights_NK, nan_outside=True
    )


def _bag_forward(
    kernel: str, table: bag_kernels.Table, ids_NK: jax.Array, weights_NK: jax.Array
) -> tuple[jax.Array, Any]:
    like_0 = jnp.zeros(0, weights_NK.dtype)
    return _bag(kernel, table, ids_NK, weights_NK), (table, ids_NK, like_0)


def _bag_backward(
    kernel: str, saved: Any, cotangent_NW: jax.Array
) -> tuple[None, None, jax.Array]:
    table, ids_NK, like_0 = saved
    weights_bar_NK = bag_kernels.bag_weights(
        kernel, _plain_products, table, ids_NK, cotangent_NW, nan_outside=True
    )
    return None, None, weights_bar_NK.astype(like_0.dtype)


_bag.defvjp(_bag_forward, _bag_backward)


def _plain_sums(
    table: bag_kernels.Table, ids_NK: jax.Array, weights_NK: jax.Array
) -> jax.Array:
    return plain_sums(table[0], ids_NK, weights_NK, _reader(table))


def _plain_products(
    table: bag_kernels.Table, ids_NK: jax.Array, cotangent_NW: jax.Array
) -> jax.Array:
    return plain_products(table[0], ids_NK, cotangent_NW, _reader(table))


def _reader(table: bag_kernels.Table) -> Any:
    return lambda codes_RW, ids: _plain_rows((codes_RW, table[1]), ids)


def _checked(codes_RW: Any, scales_RB: Any) -> bag_kernels.Table:
    codes_RW, scales_RB = jnp.asarray(codes_RW), jnp.asarray(scales_RB)
    for name, array in (("codes", codes_RW), ("scales", scales_RB)):
        if array.dtype != jnp.uint8:
            raise DataError(f"{name} have dtype {array.dtype}, allowed: uint8")
    (n_rows, width), n_blocks = codes_RW.shape, scales_RB.shape[-1]
    if scales_RB.shape != (n_rows, n_blocks) or not n_blocks or width % n_blocks:
        raise ShapeError("scales", scales_RB.shape, (n_rows, f"a divisor of {width}"))
    return codes_RW, scales_RB


def _plain_rows(table: bag_kernels.Table, ids: jax.Array) -> jax.Array:
    codes, scales = (
        stored.at[ids].get(
            mode="fill", fill_value=_NAN_CODE, wrap_negative_indices=False
        )
        for stored in table
    )
    block = codes.shape[-1] // scales.shape[-1]
    scales = jnp.repeat(scales, block, axis=-1)
    pairs = codes.astype(jnp.int32) * 256 + scales
    return lax.bitcast_convert_type(jnp.asarray(_products())[pairs], jnp.bfloat16)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent for -126 <= exponent <= 127, exactly, float32."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _e4m3fn_codes(x: jax.Array) -> jax.Array:
    """Codes int32 of float32 values after clipping to +-448, ties to even."""
    size = jnp.minimum(jnp.abs(x), LARGEST)
    bits = lax.bitcast_convert_type(size, jnp.int32)
    exponent = jnp.maximum((bits >> 23) - 127, -6)
    # 8 to 16 units of the last place, fewer below 2^-6; 16 carries into the exponent.
    units = jnp.rint(size * _power_of_two(3 - exponent)).astype(jnp.int32)
    return jnp.where(jnp.signbit(x), 128, 0) + (exponent + 6) * 8 + units
