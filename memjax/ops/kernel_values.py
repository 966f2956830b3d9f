"""Stored numbers as float32, inside a kernel.

What: `wide`, of a table's entry; `decoded`, of an FP8 code and its scale.
Why: by integer arithmetic and float16, which all kernel compilers and GPUs have; 8-bit
    types are missing in some.
When not: outside kernels; see `rows.load` and `fp8.dequantize_rows`.
"""

import jax
import jax.numpy as jnp
from jax import lax


def wide(stored: jax.Array) -> jax.Array:
    """Numbers of a table as float32; uint16 holds the bits of bfloat16."""
    if stored.dtype == jnp.uint16:
        return lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    return stored.astype(jnp.float32)


def decoded(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """code * scale as float32, exact; below 2^-126 a GPU may give 0.

    A code of float8_e4m3fn, moved 7 bits up, is the float16 of its value / 2^8: their
    exponents differ in width by one and in bias by 8. The scale 2^(s - 127) and 2^8
    are two factors, so that neither is subnormal.
    """
    codes, scales = codes.astype(jnp.int32), scales.astype(jnp.int32)
    half = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    value = lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16)
    low = scales >> 1
    values = value.astype(jnp.float32) * _power(low - 60) * _power(scales - low - 59)
    nan = ((codes & 0x7F) == 0x7F) | (scales == 255)
    return jnp.where(nan, jnp.nan, values)


def _power(exponent: jax.Array) -> jax.Array:
    """2^exponent for -126 <= exponent <= 127, float32."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
