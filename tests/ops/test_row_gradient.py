"""Sums of row gradients against a slow loop, autodiff, and their laws."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ShapeError
from memjax.ops.row_gradient import (
    RowGradient,
    dense_gradient,
    table_gradient,
    unique_rows,
)
from tests.oracles import row_gradient as oracle

WIDTH = 3


def reads(shape, low, high, *, weights=True, seed=0) -> RowGradient:
    rng = np.random.default_rng(seed)
    return RowGradient(
        jnp.asarray(rng.integers(low, high, shape), jnp.int32),
        jnp.asarray(rng.standard_normal(shape), jnp.float32) if weights else None,
        jnp.asarray(rng.standard_normal((*shape[:-1], WIDTH)), jnp.float32),
    )


CASES = {
    "duplicates": ([reads((2, 9, 4), 0, 7)], 20),
    "several_call_sites": (
        [
            reads((5, 2), 0, 9, seed=1),
            reads((3, 2, 1), 0, 9, weights=False, seed=2),
            reads((7,), 4, 9, seed=3)._replace(cotangent=jnp.ones(WIDTH)),
        ],
        9,
    ),
    "without_weights": ([reads((11, 2), 0, 6, weights=False)], 8),
    "out_of_range": ([reads((12, 3), -4, 12)], 8),
    "all_outside": ([reads((4, 2), 8, 12), reads((3, 1), -9, 0)], 8),
    "no_reads": ([reads((0, 2), 0, 8)], 8),
    "more_reads_than_rows": ([reads((30, 2), 0, 5)], 5),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_slow_loop(case):
    gradients, n_rows = CASES[case]
    want, read = oracle.table_gradient(gradients, n_rows, WIDTH)
    summed = jax.jit(
        lambda gradients: unique_rows(gradients, n_rows, WIDTH, block_reads=8)
    )
    got = summed(gradients)
    n_reads = sum(gradient.n_reads for gradient in gradients)
    assert got.ids_U.shape == (min(n_reads, n_rows),)
    assert got.sums_UW.dtype == jnp.float32 and got.ids_U.dtype == jnp.int32
    assert int(got.count) == len(read)
    np.testing.assert_array_equal(got.ids_U[: len(read)], read)
    np.testing.assert_array_equal(got.ids_U[len(read) :], n_rows)
    np.testing.assert_array_equal(got.sums_UW[len(read) :], 0.0)
    np.testing.assert_allclose(dense_gradient(got, n_rows), want, rtol=1e-5, atol=1e-6)


def test_same_bits_again_whole_and_in_blocks():
    gradients, n_rows = CASES["several_call_sites"]
    first = None
    for block_reads in (1024, 4):
        summed = jax.jit(
            functools.partial(
                unique_rows, n_rows=n_rows, width=WIDTH, block_reads=block_reads
            )
        )
        for _ in range(2):
            rows = summed(gradients)
            first = rows if first is None else first
            for got, want in zip(rows, first, strict=True):
                np.testing.assert_array_equal(got, want)


def test_no_call_sites():
    got = unique_rows([], 5, WIDTH)
    assert got.ids_U.shape == (0,) and got.sums_UW.shape == (0, WIDTH)
    assert int(got.count) == 0
    np.testing.assert_array_equal(dense_gradient(got, 5), np.zeros((5, WIDTH)))


def test_joining_micro_batches_is_the_large_batch():
    whole = reads((8, 3), 0, 9)
    halves = [jax.tree.map(lambda x, s=s: x[s], whole) for s in (slice(4), slice(4, 8))]
    summed = jax.jit(lambda gradients: unique_rows(gradients, 9, WIDTH))
    for got, want in zip(summed(halves), summed([whole]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_p08_bfloat16_reads_of_one_row_add_up():
    """1000 reads of row 0 with gradient 1 in bfloat16: the row's gradient is 1000."""
    gradient = RowGradient(
        jnp.zeros((1000, 1), jnp.int32), None, jnp.ones((1000, 2), jnp.bfloat16)
    )
    got = jax.jit(lambda gradient: unique_rows([gradient], 4, 2))(gradient)
    np.testing.assert_array_equal(
        dense_gradient(got, 4), [[1000, 1000], [0, 0], [0, 0], [0, 0]]
    )


def test_gradient_of_a_weighted_sum_is_that_of_autodiff():
    rng = np.random.default_rng(5)
    table = jnp.asarray(rng.standard_normal((7, WIDTH)), jnp.float32)
    ids, weights, target = reads((6, 4), 0, 7, seed=6)

    def loss_of_read(value):
        return jnp.sum(jnp.sin(value) * target)

    def read(table):
        return jnp.sum(table[ids] * weights[..., None], -2)

    @jax.jit
    def both(table):
        cotangent = jax.grad(loss_of_read)(read(table))
        rows = unique_rows([RowGradient(ids, weights, cotangent)], 7, WIDTH)
        return rows, jax.grad(lambda table: loss_of_read(read(table)))(table)

    got, want = both(table)
    np.testing.assert_allclose(dense_gradient(got, 7), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"cotangent": jnp.ones((5, WIDTH))}, "cotangent"),
        ({"cotangent": jnp.ones((6, WIDTH + 1))}, "cotangent"),
        ({"weights": jnp.ones((6, 3))}, "weights"),
    ],
)
def test_shapes_that_do_not_fit(change, name):
    with pytest.raises(ShapeError, match=name):
        unique_rows([reads((6, 2), 0, 4)._replace(**change)], 4, WIDTH)


def test_no_float64_and_no_matrix_of_all_reads():
    """The expanded reads x width never exist; 64 bits have the keys of the sort only,
    on a CPU."""
    gradient = reads((64, 32), 0, 50)

    def sums(gradient):
        return unique_rows([gradient], 50, WIDTH, block_reads=128, kernel="xla")

    text = str(jax.make_jaxpr(sums)(gradient))
    assert "f64" not in text
    assert f"[{64 * 32},{WIDTH}]" not in text
    assert f"[128,{WIDTH}]" in text
    assert set(re.findall(r"i64\[([0-9,]*)\]", text)) <= {"2048", ""}


def test_the_whole_table_has_the_bits_of_the_unique_rows():
    gradient, n_rows = reads((9, 5), -2, 9, seed=8), 8
    dense = jax.jit(lambda gradient: table_gradient(gradient, n_rows, WIDTH))(gradient)
    rows = jax.jit(lambda gradient: unique_rows(gradient, n_rows, WIDTH))(gradient)
    np.testing.assert_array_equal(dense, dense_gradient(rows, n_rows))
    none = reads((0, 5), 0, 8)
    assert table_gradient(none, n_rows, WIDTH).shape == (n_rows, WIDTH)
    assert table_gradient(gradient, 0, WIDTH).shape == (0, WIDTH)


def test_a_cotangent_that_is_not_finite_stays_in_its_rows_on_a_cpu():
    ids = jnp.array([[0, 1], [1, 2], [3, 3]], jnp.int32)
    bar = jnp.array([[1.0], [jnp.inf], [2.0]])
    rows = unique_rows(RowGradient(ids, None, bar), 4, 1)
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(rows.sums_UW, [[1], [np.inf], [np.inf], [4]])


@pytest.mark.parametrize("transform", ["vmap", "scan"])
def test_sums_under_transforms(transform):
    """Keys of 64 bits inside, where the rest of the program has 32."""
    whole = reads((3, 6, 4), 0, 7, seed=9)

    def one(gradient):
        return unique_rows(gradient, 7, WIDTH), table_gradient(gradient, 7, WIDTH)

    def scanned(gradient):
        return jax.lax.scan(lambda _, g: (None, one(g)), None, gradient)[1]

    run = jax.jit(jax.vmap(one) if transform == "vmap" else scanned)
    for n, got in enumerate(zip(*jax.tree.leaves(run(whole)), strict=True)):
        want = jax.tree.leaves(jax.jit(one)(jax.tree.map(lambda x, n=n: x[n], whole)))
        for got_array, want_array in zip(got, want, strict=True):
            np.testing.assert_array_equal(got_array, want_array)
