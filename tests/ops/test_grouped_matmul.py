"""Products of rows with the matrix of their group, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.grouped_matmul import grouped_matmul

P, G, D, F = 13, 4, 3, 2
SIZES = ([4, 0, 7, 2], [0, 0, 13, 0], [1, 2, 1, 3], [0, 0, 0, 0], [5, 8, 0, 0])


def oracle(x, kernel, sizes):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    out = np.zeros((len(x), kernel.shape[2]))
    for p, g in enumerate(groups):
        out[p] = x[p] @ kernel[g]
    return out


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return [rng.normal(size=s).astype(np.float32) for s in ((P, D), (G, D, F), (P, F))]


@pytest.fixture(scope="module", params=[1, 3, 64])
def graded(request):
    def loss(x, kernel, cotangent, sizes):
        out = grouped_matmul(x, kernel, sizes, block_rows=request.param)
        return jnp.sum(out * cotangent), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def test_values_and_gradients_for_all_sizes_without_a_second_compile(arrays, graded):
    x, kernel, cotangent = arrays
    for sizes in SIZES:
        (_, out), (x_bar, kernel_bar) = graded(*arrays, np.array(sizes))
        np.testing.assert_allclose(out, oracle(x, kernel, sizes), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            x_bar,
            oracle(cotangent, kernel.swapaxes(1, 2), sizes),
            rtol=1e-5,
            atol=1e-6,
        )
        ends = np.cumsum(sizes)
        for g, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            rows = slice(end - size, end)
            want = x[rows].T @ cotangent[rows]
            np.testing.assert_allclose(kernel_bar[g], want, rtol=1e-5, atol=1e-6)
    assert graded._cache_size() == 1


def test_a_row_with_nan_spoils_only_itself_and_its_kernel(arrays, graded):
    x, kernel, cotangent = arrays
    sizes = np.array(SIZES[0])
    spoiled = x.copy()
    spoiled[4] = np.nan
    (_, out), (_, kernel_bar) = graded(spoiled, kernel, cotangent, sizes)
    assert np.isnan(out[4]).all() and np.isfinite(np.delete(out, 4, 0)).all()
    assert [bool(np.isnan(k).any()) for k in kernel_bar] == [False, False, True, False]


def test_bfloat16_rows_give_bfloat16_and_no_rows_give_none(arrays):
    x, kernel, _ = (jnp.asarray(a, jnp.bfloat16) for a in arrays)
    sizes = jnp.array(SIZES[0])
    out = grouped_matmul(x, kernel, sizes)
    assert out.dtype == jnp.bfloat16
    wide = [np.asarray(a, np.float64) for a in (x, kernel)]
    want = oracle(*wide, SIZES[0])
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=1e-2, atol=1e-2)
    assert grouped_matmul(x[:0], kernel, jnp.zeros(G, int)).shape == (0, F)


def test_kernel_gradients_of_bfloat16_are_summed_wide():
    x = jnp.ones((1000, 1), jnp.bfloat16)
    kernel = jnp.ones((2, 1, 1), jnp.bfloat16)
    grad = jax.grad(
        lambda k: jnp.sum(
            grouped_matmul(x, k, jnp.array([1000, 0]), block_rows=1).astype(jnp.float32)
        )
    )(kernel)
    assert grad[0, 0, 0] == 1000 and grad.dtype == jnp.bfloat16


def test_one_group_is_a_plain_product(arrays):
    x, kernel, _ = arrays
    got = grouped_matmul(jnp.asarray(x), jnp.asarray(kernel[:1]), jnp.array([9]))
    np.testing.assert_allclose(got, oracle(x, kernel[:1], [9]), rtol=1e-5, atol=1e-6)


def test_errors_name_the_array(arrays):
    x, kernel, _ = arrays
    with pytest.raises(ShapeError, match="kernel"):
        grouped_matmul(x, kernel[:, :2], np.zeros(G, int))
    with pytest.raises(ShapeError, match="sizes"):
        grouped_matmul(x, kernel, np.zeros(3, int))
    with pytest.raises(ConfigError, match="block_rows = 0"):
        grouped_matmul(x, kernel, np.zeros(G, int), block_rows=0)
