"""64-bit arithmetic in 32-bit halves, against python integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.ops import uint32_pairs

_EDGES = [0, 1, 2, 0xFFFF, 0x10000, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]


def _values(n: int) -> np.ndarray:
    random = np.random.default_rng(0).integers(0, 2**32, n - len(_EDGES))
    return np.array([*_EDGES, *random], np.uint32)


def _joined(pair: uint32_pairs.Pair) -> list[int]:
    high, low = (np.asarray(half).ravel().tolist() for half in pair)
    return [(h << 32) | low_half for h, low_half in zip(high, low, strict=True)]


def test_products_are_exact() -> None:
    a, b = _values(60)[:, None], _values(50)[None, :]
    got = _joined(jax.jit(uint32_pairs.multiply32)(a, b))
    assert got == [int(x) * int(y) for x in a.ravel() for y in b.ravel()]


def test_products_with_a_constant_wrap_at_64_bits() -> None:
    a = _values(60)
    for constant in (0, 3, 2**40 + 0x1B3, 2**63 - 1, 2**64 - 1):
        got = _joined(uint32_pairs.multiply_by(jnp.asarray(a), constant))
        assert got == [int(x) * constant % 2**64 for x in a]


@pytest.mark.parametrize(
    "moduli",
    [
        [1, 2, 3, 251, 65521, 65535],
        [65536, 16000057, 2**24 - 3],
        [2**28 - 57],
        [2**31 - 19, 2**31 - 1],
    ],
)
def test_remainders_are_exact_for_every_step_width(moduli: list[int]) -> None:
    high, low = _values(40), _values(40)[::-1].copy()
    pair = jnp.asarray(high)[:, None], jnp.asarray(low)[:, None]
    got = jax.jit(lambda pair: uint32_pairs.remainder(pair, np.array(moduli)))(pair)
    want = [
        [((int(h) << 32) | int(v)) % m for m in moduli]
        for h, v in zip(high, low, strict=True)
    ]
    assert got.dtype == jnp.uint32
    np.testing.assert_array_equal(got, np.array(want))


def test_step_width_follows_the_largest_modulus() -> None:
    widths = [
        uint32_pairs.piece_bits([3, m])
        for m in (2**16 - 1, 2**16, 2**24 - 1, 2**24, 2**28, 2**30, 2**31 - 1)
    ]
    assert widths == [16, 8, 8, 4, 2, 1, 1]


@pytest.mark.parametrize("modulus", [0, 2**31])
def test_moduli_outside_31_bits_are_refused(modulus: int) -> None:
    with pytest.raises(ConfigError, match=f"modulus = {modulus}.*2147483647"):
        uint32_pairs.piece_bits([modulus])
