"""64-bit unsigned arithmetic on pairs of uint32, for hashes inside jit.

What: products, sums, and remainders by moduli below 2^31, of (high, low) uint32 pairs.
Why: jax without 64-bit mode turns int64 into int32 silently, and TPUs have no 64-bit
    integers at all; a hash must be exact.
When not: on the host, where numpy has int64 and uint64.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError

Pair = tuple[jax.Array, jax.Array]
MAX_MODULUS = 2**31 - 1
_LOW16 = np.uint32(0xFFFF)
_SHIFT16 = np.uint32(16)


def split64(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """(high, low) uint32 halves of host integers in [0, 2^64), any shape."""
    values = np.asarray(values, np.uint64)
    return (values >> np.uint64(32)).astype(np.uint32), values.astype(np.uint32)


def multiply32(a: jax.Array, b: Any) -> Pair:
    """The 64-bit product of two uint32 arrays, as (high, low). Exact."""
    a0, a1 = a & _LOW16, a >> _SHIFT16
    b0, b1 = b & _LOW16, b >> _SHIFT16
    a0b0, a0b1, a1b0 = a0 * b0, a0 * b1, a1 * b0
    middle = (a0b0 >> _SHIFT16) + (a0b1 & _LOW16) + (a1b0 & _LOW16)
    low = (a0b0 & _LOW16) | (middle << _SHIFT16)
    high = a1 * b1 + (a0b1 >> _SHIFT16) + (a1b0 >> _SHIFT16) + (middle >> _SHIFT16)
    return high, low


def multiply_by(a: jax.Array, constants: Any) -> Pair:
    """`a * constants` modulo 2^64 for uint32 `a` and host integers in [0, 2^64)."""
    constant_high, constant_low = split64(constants)
    high, low = multiply32(a, constant_low)
    return high + a * constant_high, low


def piece_bits(moduli: Sequence[int]) -> int:
    """How many bits of the low half one remainder step may take.

    The largest k in {16, 8, 4, 2, 1} with every modulus below 2^(32 - k), so that
    `(remainder << k) | piece` never leaves 32 bits.

    Raises:
        ConfigError: a modulus is below 1 or above 2^31 - 1.
    """
    for modulus in moduli:
        if not 1 <= modulus <= MAX_MODULUS:
            raise ConfigError("modulus", modulus, f"1 to {MAX_MODULUS}")
    return next(k for k in (16, 8, 4, 2, 1) if max(moduli) < 2 ** (32 - k))


def add(a: Pair, b: Pair) -> Pair:
    """The sum of two pairs modulo 2^64; their shapes broadcast."""
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low


def remainder(pair: Pair, moduli: np.ndarray) -> jax.Array:
    """The pair as one 64-bit unsigned number, modulo each of `moduli`.

    Args:
        pair: (high, low), uint32, any shape that broadcasts against `moduli`.
        moduli: host array of integers, each 1 to 2^31 - 1.

    Returns:
        uint32, the broadcast shape. Exact.

    Cost: 1 + 32 / k remainders per entry, k from `piece_bits`; each is a product with a
    stored reciprocal, two to three times faster on CPUs than an integer division, which
    has no vector form there.
    """
    n_bits = piece_bits([int(m) for m in moduli.ravel()])
    divisor = jnp.asarray(moduli.astype(np.uint32))
    reciprocal = np.minimum(2**32 // moduli.astype(np.uint64), np.uint64(2**32 - 1))
    reciprocal = jnp.asarray(reciprocal.astype(np.uint32))

    def reduce(value: jax.Array) -> jax.Array:
        # The estimated quotient is exact or one too small, for every 32-bit value.
        rest = value - multiply32(value, reciprocal)[0] * divisor
        return jnp.where(rest >= divisor, rest - divisor, rest)

    def take_piece(i: Any, result: jax.Array) -> jax.Array:
        taken = jnp.asarray(i, jnp.uint32) * np.uint32(n_bits)
        shift = np.uint32(32 - n_bits) - taken
        piece = (low >> shift) & np.uint32(2**n_bits - 1)
        return reduce((result << np.uint32(n_bits)) | piece)

    high, low = pair
    # A loop, not unrolled: it compiles once, and keeps the compiler from fusing the
    # arithmetic into a later transpose, where it is not vectorised.
    n_pieces = np.int32(32 // n_bits)
    return jax.lax.fori_loop(np.int32(0), n_pieces, take_piece, reduce(high))
