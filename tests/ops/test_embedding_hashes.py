"""Polynomial and modular hash: slow oracles, jit against host, pieces, errors."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from memjax.errors import ConfigError, DataError
from memjax.ops.hashed_rows import hashed_rows, host_hashed_rows
from memjax.ops.look_back import BAD_ROW, DEAD, next_history
from memjax.ops.modular_hash import ModularLayout, modular_layout
from memjax.ops.polynomial_hash import FIRST_PRIME, PolynomialLayout
from tests.oracles.ngram_embedding_ids import modular_rows, polynomial_rows

T, VOCAB = 9, 129280
POLYNOMIAL = PolynomialLayout(
    vocab_size=VOCAB,
    orders=(1, 3, 8),
    column_rows=((30000, 7), (2**30 - 1, 97), (64, 5_000_011)),
    primes=(FIRST_PRIME, 2**62 - 57),
)
MODULAR = ModularLayout(
    vocab_size=VOCAB,
    orders=(2, 4),
    column_rows=((78 * VOCAB + 1, 2**30 - 1), (5, 2 * VOCAB)),
)
LAYOUTS = {"polynomial": POLYNOMIAL, "modular": MODULAR}
IDS = arrays(np.int32, (2, T), elements=st.integers(DEAD, VOCAB - 1))
SEGMENTS = arrays(np.int32, (2, T), elements=st.integers(0, 2))


@cache
def jitted(kind):
    return jax.jit(
        lambda ids, segments, history: hashed_rows(
            LAYOUTS[kind], ids, segments_BT=segments, history_BN=history
        )
    )


def slow(layout, ids, segments):
    own = layout.orders, layout.column_rows
    if isinstance(layout, PolynomialLayout):
        return [
            polynomial_rows(*row, *own, layout.primes)
            for row in zip(ids.tolist(), segments.tolist(), strict=True)
        ]
    return [
        modular_rows(*row, *own, layout.vocab_size)
        for row in zip(ids.tolist(), segments.tolist(), strict=True)
    ]


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(ids=IDS, segments=SEGMENTS)
def test_host_and_jit_equal_the_definition(kind, ids, segments):
    layout = LAYOUTS[kind]
    host = host_hashed_rows(layout, ids, segments_BT=segments)
    np.testing.assert_array_equal(host, slow(layout, ids, segments))
    np.testing.assert_array_equal(jitted(kind)(ids, segments, None), host)
    assert host.dtype == np.int32
    offsets = np.array([*layout.offsets, layout.n_rows])
    assert ((host >= offsets[:-1]) & (host < offsets[1:])).all()


def test_negative_hashes_take_the_floor_modulo():
    """(2^62 - 57)^2 * 3 and the like leave the positive half of 64 bits."""
    ids = np.full((1, T), VOCAB - 1, np.int32)
    got = POLYNOMIAL.host_rows(ids)[0, -1, 5]
    value = sum((VOCAB - 1) * (2**62 - 57) ** i for i in range(8))
    signed = (value + 2**63) % 2**64 - 2**63
    assert signed < 0
    assert got == signed % 5_000_011 + POLYNOMIAL.offsets[5]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_any_pieces_give_the_same_rows(kind):
    layout = LAYOUTS[kind]
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, T)).astype(np.int32)
    whole = layout.host_rows(ids)
    history = np.full((2, layout.max_order - 1), DEAD, np.int32)
    at = 0
    for size in (4, 4, 1):
        piece = ids[:, at : at + size]
        want = whole[:, at : at + size]
        got = layout.host_rows(piece, history_BN=history)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(
            jitted(kind)(piece, None, jnp.asarray(history)), want
        )
        history = next_history(piece, history, layout.max_order)
        at += size


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_id_outside_is_a_bad_row_in_the_windows_that_see_it(kind):
    layout = LAYOUTS[kind]
    ids = np.zeros((1, T), np.int32)
    ids[0, 2] = VOCAB
    with pytest.raises(DataError, match=r"ids\[0, 2\] = 129280"):
        layout.host_rows(ids)
    bad = np.asarray(jitted(kind)(jnp.asarray(ids), None, None))[0] == BAD_ROW
    orders = np.repeat(layout.orders, layout.n_heads)
    places = np.arange(T)[:, None]
    np.testing.assert_array_equal(bad, (places >= 2) & (places < 2 + orders))


def test_sizes_of_the_modular_tables_are_the_published_ones():
    layout = modular_layout(VOCAB, (2, 3, 4), 4, 78 * VOCAB)
    want = [78 * VOCAB + 2 * i + 1 for i in range(12)]
    assert list(layout.flat_rows) == want
    assert layout.n_rows == sum(want) and layout.n_columns == 12
    some = modular_layout(VOCAB, (2, 4), 4, 78 * VOCAB)
    assert list(some.flat_rows) == want[:4] + want[8:]


def test_fingerprints_tell_hashes_apart():
    layouts = [
        POLYNOMIAL,
        MODULAR,
        dataclasses.replace(POLYNOMIAL, primes=POLYNOMIAL.primes[::-1]),
        dataclasses.replace(MODULAR, vocab_size=VOCAB + 1),
        dataclasses.replace(MODULAR, column_rows=((5, 7), (5, 7))),
    ]
    assert len({layout.fingerprint() for layout in layouts}) == 5
    assert MODULAR.fingerprint() == dataclasses.replace(MODULAR).fingerprint()


@pytest.mark.parametrize(
    ("layout", "change", "text"),
    [
        (POLYNOMIAL, {"primes": (3,)}, "2 distinct primes"),
        (POLYNOMIAL, {"primes": (3, 4)}, "odd numbers"),
        (POLYNOMIAL, {"orders": (3, 1, 8)}, "ascending"),
        (POLYNOMIAL, {"orders": (1, 3)}, "2 orders of equally many heads"),
        (MODULAR, {"column_rows": ((1, 2), (3,))}, "equally many heads"),
        (MODULAR, {"column_rows": ((1, 2), (3, 0))}, "1 or more each"),
        (MODULAR, {"column_rows": ((2**30, 2**30), (3, 4))}, "together"),
        (MODULAR, {"vocab_size": 0}, "vocab_size = 0"),
    ],
    ids=str,
)
def test_errors(layout, change, text):
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(layout, **change)


def test_orders_below_two_have_no_modular_table():
    with pytest.raises(ConfigError, match=r"orders = \(1, 2\)"):
        modular_layout(10, (1, 2), 1, 5)
