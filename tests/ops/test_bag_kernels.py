"""The numbers of the kernels of the embedding bag, which are interpreted here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from memjax.errors import ConfigError
from memjax.ops.bag_kernels import ITEM_READS
from memjax.ops.embedding_bag import embedding_bag, gather_rows
from memjax.ops.fp8 import dequantize_rows, fp8_bag, quantize_rows
from memjax.ops.row_gradient import RowGradient, dense_gradient, unique_rows
from memjax.ops.rows import load, store

TRITON, MOSAIC = "triton_interpreted", "mosaic_interpreted"
interprets_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 cannot interpret Mosaic GPU"
)


def zipf_ids(rng: Any, n_rows: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.minimum(rng.zipf(1.3, shape) - 1, n_rows - 1).astype(np.int32)


def bag_and_gradients(kernel: str, table: Any, ids: Any, weights: Any, g: Any) -> Any:
    """Value, and the gradients to a floating table and to the weights."""

    def program(table: Any, ids: Any, weights: Any, g: Any) -> Any:
        if jnp.issubdtype(table.dtype, jnp.floating):
            value, pull = jax.vjp(
                lambda t, w: embedding_bag(t, ids, w, kernel), table, weights
            )
            return value, *pull(g)
        value, pull = jax.vjp(lambda w: embedding_bag(table, ids, w, kernel), weights)
        return value, None, *pull(g)

    return jax.jit(program)(table, ids, weights, g)


@pytest.mark.parametrize(
    "kernel, n_rows, width, n_tokens, n_read, dtype",
    [
        (TRITON, 7, 3, 5, 4, "float32"),
        (TRITON, 40, 600, 3, 33, "uint16"),
        (TRITON, 13, 80, 30, 9, "bfloat16"),
        (TRITON, 5, 1, 1, 1, "float16"),
        pytest.param(MOSAIC, 13, 256, 3, 5, "float32", marks=interprets_mosaic),
        pytest.param(MOSAIC, 9, 128, 2, 4, "uint16", marks=interprets_mosaic),
    ],
)
def test_bags_and_gradients_equal_float64_loops(
    kernel: str, n_rows: int, width: int, n_tokens: int, n_read: int, dtype: str
) -> None:
    rng = np.random.default_rng(width)
    values = rng.standard_normal((n_rows, width)).astype(np.float32)
    table = jnp.asarray(values)
    table = (
        store(table.astype("bfloat16")) if dtype == "uint16" else table.astype(dtype)
    )
    values = np.asarray(load(table), np.float64)
    ids = zipf_ids(rng, n_rows, (n_tokens, n_read))
    weights = rng.standard_normal((n_tokens, n_read)).astype(np.float32)
    g = rng.standard_normal((n_tokens, width)).astype(np.float32)
    value, table_bar, weights_bar = bag_and_gradients(
        kernel, table, jnp.asarray(ids), weights, g
    )
    want = [np.zeros(value.shape), np.zeros(values.shape), np.zeros(weights.shape)]
    for n in range(n_tokens):
        for k in range(n_read):
            row = ids[n, k]
            want[0][n] += np.float64(weights[n, k]) * values[row]
            want[1][row] += np.float64(weights[n, k]) * g[n]
            want[2][n, k] = values[row] @ g[n]
    assert value.dtype == weights_bar.dtype == jnp.float32
    np.testing.assert_allclose(value, want[0], atol=2e-5)
    np.testing.assert_allclose(weights_bar, want[2], atol=1e-4)
    if table_bar is not None:
        assert table_bar.dtype == table.dtype
        rounding = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
        np.testing.assert_allclose(
            np.asarray(table_bar, np.float64), want[1], rtol=rounding, atol=2e-5
        )
    others = bag_and_gradients("xla", table, jnp.asarray(ids), weights, g)
    np.testing.assert_allclose(value, others[0], atol=2e-5)
    np.testing.assert_allclose(weights_bar, others[2], atol=1e-4)


def call_sites(width: int, n_rows: int) -> list[RowGradient]:
    """Reads of three places: with weights, without, and some outside the table."""
    rng = np.random.default_rng(3)
    ids = zipf_ids(rng, n_rows, (150, 4))
    ids[7] = [n_rows, -1, 2**31 - 1, 0]
    return [
        RowGradient(
            jnp.asarray(ids),
            jnp.asarray(rng.standard_normal(ids.shape), jnp.float32),
            jnp.asarray(rng.standard_normal((150, width)), jnp.float32),
        ),
        RowGradient(
            jnp.asarray(zipf_ids(rng, n_rows, (60, 1))),
            None,
            jnp.asarray(rng.standard_normal((60, width)), jnp.bfloat16),
        ),
    ]


@pytest.mark.parametrize(
    "kernel, width, n_rows, weighted",
    [
        (TRITON, 5, 30, True),
        (TRITON, 70, 3000, False),
        pytest.param(MOSAIC, 128, 30, True, marks=interprets_mosaic),
    ],
)
def test_sums_by_row_have_one_order(
    kernel: str, width: int, n_rows: int, weighted: bool
) -> None:
    """A row read far more often than an item holds; the same bits in two programs."""
    sites = call_sites(width, n_rows)
    if not weighted:
        sites = [site._replace(weights=None) for site in sites]

    def sums(sites: Any, kernel: str) -> Any:
        return unique_rows(sites, n_rows, width, kernel=kernel)

    got = jax.jit(sums, static_argnums=1)(sites, kernel)
    again = jax.jit(lambda sites: sums(sites, kernel))(sites)
    want = jax.jit(sums, static_argnums=1)(sites, "xla")
    counts = np.bincount(np.ravel(sites[0].ids[:7]), minlength=n_rows)
    assert counts.max() and np.sum(np.asarray(sites[0].ids) == 0) > 2 * ITEM_READS
    np.testing.assert_array_equal(got.ids_U, want.ids_U)
    np.testing.assert_array_equal(got.sums_UW, again.sums_UW)
    assert int(got.count) == int(want.count) < n_rows
    assert not np.any(np.asarray(got.sums_UW)[int(got.count) :])
    dense = np.zeros((n_rows, width))
    for ids, weights, cotangent in sites:
        for n, k in np.ndindex(*ids.shape):
            if 0 <= ids[n, k] < n_rows:
                weight = 1.0 if weights is None else np.float64(weights[n, k])
                dense[ids[n, k]] += weight * np.asarray(cotangent[n], np.float64)
    np.testing.assert_allclose(dense_gradient(got, n_rows), dense, atol=1e-4)
    np.testing.assert_allclose(got.sums_UW, want.sums_UW, atol=1e-4)


@pytest.mark.parametrize(
    "kernel", [TRITON, pytest.param(MOSAIC, marks=interprets_mosaic)]
)
def test_ids_outside_and_rows_that_nobody_reads(kernel: str) -> None:
    """An id outside: NaN to its sum and its weight, nothing to the table. A NaN in row
    0, which nobody reads, stays there, though masked reads are led to row 0."""
    width = 128
    table = jnp.ones((4, width)).at[0].set(jnp.nan)
    ids = jnp.array([[1, 2, 3], [4, 1, 2], [2, -1, 3], [2**31 - 1, 3, 3]])
    weights = jnp.ones((4, 3)).at[1:, :2].set(0.0)
    value, table_bar, weights_bar = bag_and_gradients(
        kernel, table, ids, weights, jnp.ones((4, width))
    )
    np.testing.assert_array_equal(value[:, 0], [3.0, np.nan, np.nan, np.nan])
    inside = (np.asarray(ids) >= 0) & (np.asarray(ids) < 4)
    np.testing.assert_array_equal(weights_bar, np.where(inside, width, np.nan))
    np.testing.assert_array_equal(table_bar[:, 0], [0.0, 1.0, 2.0, 3.0])


def test_gradient_of_single_rows() -> None:
    table, ids = jnp.ones((5, 3)), jnp.array([[4, 0, 4], [5, -1, 4]])
    factors = jnp.arange(1.0, 19.0).reshape(2, 3, 3)

    def loss(table: Any, kernel: str) -> Any:
        return jnp.nansum(gather_rows(table, ids, kernel) * factors)

    got, want = (
        jax.jit(jax.grad(loss), static_argnums=1)(table, k) for k in (TRITON, "xla")
    )
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(want[:, 0], [4.0, 0.0, 0.0, 0.0, 1 + 7 + 16])


def test_fp8_rows_are_those_of_the_definition() -> None:
    """Every code with every scale, in rows of no even width; ids outside are NaN."""
    codes = jnp.tile(jnp.arange(256, dtype=jnp.uint8), (256, 1))
    scales = jnp.arange(256, dtype=jnp.uint8)[:, None]
    ids = jnp.arange(-2, 259)
    read = jax.jit(dequantize_rows, static_argnums=3)
    got, want = (
        np.asarray(read(codes, scales, ids, kernel), np.float64)
        for kernel in (TRITON, "xla")
    )
    # What is subnormal in float32 may be 0 in a kernel.
    flushed = (got == 0) & (np.abs(want) < 2.0**-126)
    np.testing.assert_array_equal(np.where(flushed, want, got), want)


def test_fp8_bags_and_the_gradient_of_their_weights() -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((20, 24)).astype(np.float32)
    codes, scales = quantize_rows(table, 8)
    ids = jnp.asarray(zipf_ids(rng, 20, (2, 3, 11)))
    weights = jnp.asarray(rng.standard_normal(ids.shape), jnp.bfloat16)
    g = jnp.asarray(rng.standard_normal((2, 3, 24)), jnp.float32)
    rows = np.asarray(dequantize_rows(codes, scales, ids), np.float64)
    for kernel in (TRITON, "xla"):

        def program(codes: Any, scales: Any, weights: Any, kernel: str = kernel) -> Any:
            value, pull = jax.vjp(
                lambda w: fp8_bag(codes, scales, ids, w, kernel), weights
            )
            return value, *pull(g)

        value, weights_bar = jax.jit(program)(codes, scales, weights)
        want = np.einsum("abkw,abk->abw", rows, np.float64(weights))
        np.testing.assert_allclose(value, want, atol=2e-5)
        assert weights_bar.dtype == jnp.bfloat16
        want = np.einsum("abkw,abw->abk", rows, g)
        np.testing.assert_allclose(np.float64(weights_bar), want, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kernel", [TRITON, "triton", "auto"])
def test_nothing_to_read(kernel: str) -> None:
    """No launch of no programs, and no kernel that a CPU has not."""
    table = jnp.ones((3, 2))
    for shape in ((0, 4), (4, 0)):
        bag = embedding_bag(table, jnp.zeros(shape, int), jnp.ones(shape), kernel)
        np.testing.assert_array_equal(bag, np.zeros((shape[0], 2)))
    none = jnp.zeros((0, 1), jnp.int32)
    rows = unique_rows(RowGradient(none, None, jnp.ones((0, 2))), 3, 2, kernel=kernel)
    assert rows.sums_UW.shape == (0, 2)
    codes, scales = quantize_rows(jnp.ones((3, 8)), 8)
    assert dequantize_rows(codes, scales, none, kernel).shape == (0, 1, 8)


def test_under_vmap_and_in_parts_of_a_mesh() -> None:
    rng = np.random.default_rng(1)
    table = jnp.asarray(rng.standard_normal((9, 12)), jnp.float32)
    ids = jnp.asarray(zipf_ids(rng, 9, (8, 3)))
    weights = jnp.asarray(rng.standard_normal((2, 8, 3)), jnp.float32)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def gradient(table: Any, ids: Any, weights: Any, kernel: str) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.sum(embedding_bag(table, ids, weights, kernel) ** 2)

        return jax.grad(loss)(weights)

    want = jnp.stack([gradient(table, ids, each, "xla") for each in weights])
    for kernel in (TRITON, "auto"):
        got = jax.jit(
            jax.vmap(lambda w, kernel=kernel: gradient(table, ids, w, kernel))
        )(weights)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        parts = jax.shard_map(
            lambda t, i, w, kernel=kernel: gradient(t, i, w, kernel),
            mesh=mesh,
            in_specs=(jax.P(), jax.P("data"), jax.P("data")),
            out_specs=jax.P("data"),
            check_vma=False,
        )
        np.testing.assert_allclose(
            jax.jit(parts)(table, ids, weights[0]), want[0], rtol=1e-4, atol=1e-5
        )


def test_what_no_kernel_reads_is_an_error_or_left_to_xla() -> None:
    table, ids, ones = jnp.ones((3, 2)), jnp.zeros((1, 1), int), jnp.ones((1, 1))
    with pytest.raises(ConfigError, match=r"kernel = 'cuda' .* \('auto', 'xla', "):
        embedding_bag(table, ids, ones, "cuda")
    with pytest.raises(ConfigError, match="kernel = 'triton' .*NVIDIA"):
        embedding_bag(table, ids, ones, "triton")
    with pytest.raises(ConfigError, match="kernel = 'mosaic' .*multiples of 128"):
        embedding_bag(table, ids, ones, "mosaic")
    with pytest.raises(ConfigError, match="kernel = 'triton' .*int32"):
        embedding_bag(table.astype(int), ids, ones, "triton")
    assert embedding_bag(table.astype(int), ids, ones).dtype == jnp.float32
    with jax.enable_x64(True):
        with pytest.raises(ConfigError, match="kernel = 'triton' .*float64"):
            embedding_bag(table, ids, jnp.ones((1, 1), "double"), "triton")
        assert embedding_bag(table, ids, jnp.ones((1, 1), "double")).dtype == "float64"
    codes, scales = quantize_rows(jnp.ones((3, 128)), 32)
    with pytest.raises(ConfigError, match="kernel = 'mosaic' .*FP8"):
        dequantize_rows(codes, scales, ids, "mosaic")


@pytest.mark.parametrize("n_rows, fits", [(2**23, True), (2**23 + 1, False)])
def test_bytes_that_triton_cannot_address(n_rows: int, fits: bool) -> None:
    """Above 2^31 one-byte entries, until 64-bit offsets begin above 2^32."""

    def read(kernel: str, n_rows: int = n_rows) -> Any:
        return jax.eval_shape(
            lambda c, s, i: dequantize_rows(c, s, i, kernel),
            jax.ShapeDtypeStruct((n_rows, 256), jnp.uint8),
            jax.ShapeDtypeStruct((n_rows, 8), jnp.uint8),
            jax.ShapeDtypeStruct((4,), jnp.int32),
        )

    assert read("auto").shape == read("triton", 2**24 + 1).shape == (4, 256)
    if fits:
        assert read("triton").dtype == jnp.bfloat16
    else:
        with pytest.raises(
            ConfigError, match=f"tables of {n_rows * 256} bytes.*divide"
        ):
            read("triton")
