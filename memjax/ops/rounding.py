"""Stochastic rounding to a narrower float.

What: `stochastic_round`, up or down at random, right on average.
Why: small updates of a bfloat16 table are lost under round-to-nearest.
When not: float32 tables, which need none.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax.errors import ConfigError


def stochastic_round(
    wide_BW: jax.Array,
    dtype: Any,
    seed: int,
    step: jax.Array,
    rows_B: jax.Array,
    columns_W: jax.Array,
) -> jax.Array:
    """Round float32 to bfloat16, up with probability equal to the distance from below.

    The random bits are a mix of (seed, step, row, column) alone, so an entry is rounded
    alike on any number of devices and whatever else is rounded with it. Values that
    bfloat16 holds exactly, infinities and NaN are kept; a finite value may round up to
    infinity only from above the largest bfloat16.

    Args:
        wide_BW: float32.
        dtype: bfloat16.
        seed: of the mix, a python int.
        step: int32 scalar.
        rows_B, columns_W: int32 numbers of the entries.

    Raises:
        ConfigError: another pair of dtypes.
    """
    if wide_BW.dtype != jnp.float32 or jnp.dtype(dtype) != jnp.bfloat16:
        raise ConfigError(
            "stochastic_rounding", f"{wide_BW.dtype} to {dtype}", "float32 to bfloat16"
        )
    word = _mix(jnp.uint32(seed & 0xFFFFFFFF) ^ _mix(step.astype(jnp.uint32)))
    row_B = _mix(word ^ rows_B.astype(jnp.uint32))
    random_BW = _mix(row_B[:, None] + columns_W.astype(jnp.uint32) * jnp.uint32(_STEP))
    bits_BW = lax.bitcast_convert_type(wide_BW, jnp.uint32)
    # A NaN keeps a set bit among those that stay, else it would become infinite.
    kept_BW = jnp.where(jnp.isnan(wide_BW), bits_BW | jnp.uint32(1 << 22), bits_BW)
    rounded_BW = bits_BW + (random_BW >> 16)
    rounded_BW = jnp.where(jnp.isfinite(wide_BW), rounded_BW, kept_BW)
    upper_BW = (rounded_BW >> 16).astype(jnp.uint16)
    return lax.bitcast_convert_type(upper_BW, jnp.bfloat16)


# An odd number far from small fractions of 2**32: columns get distinct words.
_STEP = 0x9E3779B9


def _mix(x: jax.Array) -> jax.Array:
    """A bijective 32-bit mix in which every input bit reaches every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
