"""Multipliers, primes and offsets of n-gram tables."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.ops.ngram_hash import NgramLayout, ngram_layouts
from memjax.ops.ngram_layout import is_prime

_SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "pad_id": 256,
    "orders": (2, 3),
    "n_heads": 2,
    "rows_per_head": 11,
    "layer_ids": (0, 2),
}


def _layouts(**changes: Any) -> tuple[NgramLayout, ...]:
    return ngram_layouts(**(_SIZES | changes))


def test_v41_layouts_are_the_shipped_ones() -> None:
    """engram_num_embeddings of the shipped DeepSeek-V4.1-Flash configuration."""
    first, second = ngram_layouts(
        vocab_size=99092,
        pad_id=2,
        orders=(2, 3, 4),
        n_heads=8,
        rows_per_head=16_000_000,
        layer_ids=(1, 14),
    )
    assert (first.n_rows, second.n_rows) == (384006168, 384016682)
    assert first.multipliers == (
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    )
    assert second.multipliers == (
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    )
    assert first.primes[0][0] == 16000057
    assert second.primes[0][0] == 16000477
    assert second.primes[-1][-1] == 16000889


def test_primes_are_exact() -> None:
    sieve = np.ones(5000, bool)
    sieve[:2] = False
    for n in range(2, 71):
        sieve[n * n :: n] = False
    assert [n for n in range(5000) if is_prime(n)] == list(np.flatnonzero(sieve))
    # Strong pseudoprimes to the bases 2; 2 and 3; 2, 3 and 5; and Mersenne's prime.
    assert not any(is_prime(n) for n in (2047, 1373653, 25326001, 2**31 - 3))
    assert is_prime(2**31 - 1)


def test_no_prime_is_used_twice_in_a_model() -> None:
    layouts = _layouts(rows_per_head=(50, 40), orders=(2, 5), n_heads=3)
    assert layouts[0].primes == ((53, 59, 61), (41, 43, 47))
    assert layouts[1].primes == ((67, 71, 73), (79, 83, 89))
    assert layouts[0].offsets == (0, 53, 112, 173, 214, 257)
    assert layouts[0].n_rows == 304


def test_only_listed_orders_have_columns() -> None:
    (all_orders,) = _layouts(orders=(1, 2, 3, 4, 5, 6), layer_ids=(3,))
    (some,) = _layouts(orders=(3, 4, 5, 6), layer_ids=(3,))
    assert some.n_columns == 8 and len(some.primes) == 4
    assert some.max_order == 6
    assert some.multipliers == all_orders.multipliers


def test_multipliers_are_odd_and_products_fit_63_bits() -> None:
    for vocab_size in (1, 2, 257, 99092, 2**31 - 1):
        (layout,) = _layouts(vocab_size=vocab_size, pad_id=0, layer_ids=(7,))
        for multiplier in layout.multipliers:
            assert multiplier % 2 == 1
            assert (vocab_size - 1) * multiplier < 2**63


def test_seed_and_layer_change_the_multipliers() -> None:
    base = _layouts(layer_ids=(1,))[0].multipliers
    assert _layouts(layer_ids=(1,), seed=1)[0].multipliers != base
    assert _layouts(layer_ids=(2,))[0].multipliers != base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"vocab_size": 2**31}, "vocab_size = 2147483648"),
        ({"pad_id": 257}, "pad_id = 257.*256"),
        ({"pad_id": -1}, "pad_id = -1"),
        ({"orders": ()}, "orders"),
        ({"orders": (0, 2)}, "orders"),
        ({"orders": (3, 2)}, "orders"),
        ({"orders": (2, 2)}, "orders"),
        ({"n_heads": 0}, "n_heads = 0"),
        ({"rows_per_head": 0}, "rows_per_head"),
        ({"rows_per_head": (11,)}, "rows_per_head.*2 of them"),
        ({"rows_per_head": 2**31 - 2}, "rows_per_head.*2147483647"),
        ({"layer_ids": ()}, "layer_ids"),
        ({"layer_ids": (1, 1)}, "layer_ids"),
        ({"layer_ids": (-1,)}, "layer_ids"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _layouts(**changes)


def test_p07_tables_beyond_32_bit_rows_are_refused_before_they_exist() -> None:
    """46341 squared rows, 2147488281, is more than 2^31 - 1."""
    with pytest.raises(ConfigError, match="2147483647"):
        _layouts(rows_per_head=46341**2 // 4, layer_ids=(0,))
    (layout,) = _layouts(rows_per_head=46340**2 // 4 - 100, layer_ids=(0,))
    assert layout.n_rows < 2**31


@pytest.mark.parametrize(
    "changes",
    [
        {"multipliers": (1, 3)},
        {"multipliers": (1, 3, 2**62)},
        {"primes": ((11, 13),)},
        {"offsets": (0, 11, 24, 42)},
        {"n_rows": 1},
    ],
)
def test_numbers_that_do_not_belong_together_are_refused(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError):
        replace(_layouts()[0], **changes)


def test_the_fingerprint_tells_every_field_apart() -> None:
    layout = _layouts()[0]
    same = NgramLayout(**asdict(layout))
    assert same.fingerprint() == layout.fingerprint()
    others = [
        *_layouts(seed=1),
        *_layouts(pad_id=0),
        *_layouts(rows_per_head=100),
        *_layouts(orders=(1, 3)),
        *_layouts(vocab_size=300),
        _layouts(layer_ids=(9,))[0],
        replace(layout, multipliers=(1, 3, 5)),
    ]
    prints = {other.fingerprint() for other in others}
    assert len(prints | {layout.fingerprint()}) == len(others) + 1
