"""Sorted reads and their sums: the forms for each platform against slow loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.ops.row_sums import (
    add_blocks,
    add_by_product,
    add_in_turn,
    sort_packed,
    sort_pairs,
    sort_reads,
)

WIDTH = 3


def by_product(size, *args):
    """The blocks of other platforms."""
    return add_blocks(size, add_by_product, *args)


@pytest.mark.parametrize("form", [sort_pairs, sort_packed, sort_reads])
@pytest.mark.parametrize("n", [1, 2, 64, 257])
def test_equal_rows_keep_their_order(form, n):
    """Rows up to the largest, 2^31 - 1, which stands for those outside."""
    ids = np.random.default_rng(n).integers(0, 2**31, n // 2 + 1).astype(np.int32)
    ids = np.concatenate([ids, ids, [2**31 - 1]])[:n].astype(np.int32)
    rows, order = jax.jit(form)(ids)
    want = np.argsort(ids, kind="stable")
    assert rows.dtype == order.dtype == jnp.int32
    np.testing.assert_array_equal(order, want)
    np.testing.assert_array_equal(rows, ids[want])


@pytest.mark.parametrize(
    ("form", "width"), [(by_product, 3), (add_in_turn, 3), (add_in_turn, 33)]
)
@pytest.mark.parametrize("size", [1, 8, 40])
@pytest.mark.parametrize("weighted", [True, False])
def test_sums_equal_a_slow_loop(form, width, size, weighted):
    """A slot of many reads, slots of none, and reads that are added nowhere."""
    rng = np.random.default_rng(size)
    slots = np.sort(np.concatenate([rng.integers(0, 9, 20), np.full(13, 4)]))
    n_inside = int(np.sum(slots < 8))
    tokens = rng.integers(0, 5, 33).astype(np.int32)
    weights = rng.standard_normal(33).astype(np.float32) if weighted else None
    bars = rng.standard_normal((5, width)).astype(np.float32)
    start = rng.standard_normal((8, width)).astype(np.float32)
    add = jax.jit(functools.partial(form, size))
    args = (start, slots.astype(np.int32), tokens, weights, bars)
    got = add(*args, jnp.int32(n_inside))
    want = start.astype(np.float64)
    for p in range(n_inside):
        factor = 1.0 if weights is None else np.float64(weights[p])
        want[slots[p]] += factor * bars[tokens[p]]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(add(*args, jnp.int32(0)), start)


def test_product_with_zeros_and_ones_equals_the_scatter():
    rng = np.random.default_rng(4)
    slot = np.sort(rng.integers(0, 9, 16)).astype(np.int32)
    slot[-3:] = 9  # beyond the end
    part = rng.standard_normal((16, WIDTH)).astype(np.float32)
    sums = rng.standard_normal((9, WIDTH)).astype(np.float32)
    got = add_by_product(jnp.asarray(sums), jnp.asarray(slot), jnp.asarray(part))
    want = sums.astype(np.float64)
    np.add.at(want, slot[:-3], part[:-3].astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [3, 33])
def test_reads_are_added_from_left_to_right_on_a_cpu(width):
    """To the last bit: what a loop in float32 gives, for 1 to 40 reads of a slot."""
    rng = np.random.default_rng(0)
    slots = np.repeat(np.arange(40), np.arange(1, 41)).astype(np.int32)
    bars = rng.standard_normal((len(slots), width)).astype(np.float32)
    tokens = np.arange(len(slots), dtype=np.int32)
    want = np.zeros((40, width), np.float32)
    for slot, bar in zip(slots, bars, strict=True):
        want[slot] += bar
    add = jax.jit(functools.partial(add_in_turn, 8))
    args = (np.zeros_like(want), slots, tokens, None, bars, jnp.int32(len(slots)))
    np.testing.assert_array_equal(add(*args), want)
