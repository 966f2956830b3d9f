"""Dot products with chosen rows: values, gradients, ids outside, dtypes, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from memjax.errors import DataError, ShapeError
from memjax.ops.row_dots import row_dots

R, W, K = 7, 4, 3


def case(*lead):
    rng = np.random.default_rng(0)
    table_RW = rng.standard_normal((R, W)).astype(np.float32)
    ids = rng.integers(0, R, (*lead, K)).astype(np.int32)
    x = rng.standard_normal((*lead, W)).astype(np.float32)
    return jnp.asarray(table_RW), ids, jnp.asarray(x)


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_each_product_is_that_of_its_row(lead):
    table_RW, ids, x = case(*lead)
    got = jax.jit(row_dots)(table_RW, ids, x)
    assert got.shape == ids.shape
    for at in np.ndindex(ids.shape):
        want = sum(np.float64(table_RW[ids[at]]) * np.float64(x[at[:-1]]))
        np.testing.assert_allclose(got[at], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(row_dots(table_RW, ids, x), got, rtol=1e-6)


def test_gradients_against_finite_differences_and_the_plain_form():
    table_RW, ids, x = case(5)
    ids[0] = 2  # one row, three times
    check_grads(lambda *given: row_dots(given[0], ids, given[1]), (table_RW, x), 1,
                modes=("rev",), atol=1e-2, rtol=1e-2)  # fmt: skip

    def plain(table_RW, x):
        return jnp.einsum("nkw,nw->nk", table_RW[ids], x)

    bar = np.random.default_rng(1).standard_normal((5, K)).astype(np.float32)
    _, pull = jax.vjp(lambda *given: row_dots(given[0], ids, given[1]), table_RW, x)
    _, plain_pull = jax.vjp(plain, table_RW, x)
    for got, want in zip(pull(bar), plain_pull(bar), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_row_outside_the_table_gives_nan_and_leaves_the_others_alone():
    table_RW, ids, x = case(4)
    ids = jnp.asarray(ids).at[1, 0].set(R)
    got = row_dots(table_RW, ids, x)
    assert np.argwhere(np.isnan(got)).tolist() == [[1, 0]]
    with pytest.raises(DataError, match="row id 7 .* 0 <= id < 7"):
        row_dots(table_RW, np.asarray(ids), x)


@pytest.mark.parametrize("shape", [(0, K), (2, 0)])
def test_nothing_to_multiply(shape):
    table_RW, *_ = case(1)
    ids = jnp.zeros(shape, jnp.int32)
    x = jnp.ones((shape[0], W))
    assert row_dots(table_RW, ids, x).shape == shape
    grad = jax.grad(lambda table_RW: row_dots(table_RW, ids, x).sum())(table_RW)
    assert not grad.any()


def test_bfloat16_is_multiplied_in_float32():
    table_RW, ids, x = case(5)
    narrow = jnp.asarray(table_RW, jnp.bfloat16), jnp.asarray(x, jnp.bfloat16)
    got, pull = jax.vjp(lambda *given: row_dots(given[0], ids, given[1]), *narrow)
    wide = (given.astype(jnp.float32) for given in narrow)
    np.testing.assert_allclose(got, row_dots(next(wide), ids, next(wide)), rtol=1e-6)
    bars = pull(jnp.ones_like(got))
    assert got.dtype == jnp.float32 and {bar.dtype.name for bar in bars} == {"bfloat16"}


def test_rows_of_all_vectors_are_never_formed():
    n, k, width = 2048, 64, 32
    given = (
        jax.ShapeDtypeStruct((64, width), jnp.float32),
        jax.ShapeDtypeStruct((n, k), jnp.int32),
        jax.ShapeDtypeStruct((n, width), jnp.float32),
    )

    def loss(table_RW, ids, x):
        return jnp.sum(row_dots(table_RW, ids, x) ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 2))).lower(*given).compile()
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < n * k * width * 4 / 2, f"{used} bytes of temporary memory"


@pytest.mark.parametrize("shape", [(3, W + 1), (2, W), (W,)])
def test_shapes_that_do_not_fit(shape):
    table_RW, ids, _ = case(3)
    with pytest.raises(ShapeError, match=r"x has shape .* expected \(3, 4\)"):
        row_dots(table_RW, ids, jnp.zeros(shape))
