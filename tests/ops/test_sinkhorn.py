"""Sinkhorn balancing against the slow loop, and its laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax.errors import ConfigError, ShapeError
from memjax.ops.sinkhorn import (
    balance_factors,
    default_block_rows,
    sinkhorn_balance,
)
from tests.oracles import sinkhorn_momentum as oracle

ROWS, WIDTH = 24, 5


def matrix(seed: int = 0) -> np.ndarray:
    """Rows of very different size, one of them zero."""
    rng = np.random.default_rng(seed)
    u = rng.standard_normal((ROWS, WIDTH)) * 10.0 ** rng.uniform(-2, 1, (ROWS, 1))
    u[3] = 0.0
    return u.astype(np.float32)


@functools.cache
def compiled(n_iterations: int, norm: str, block_rows: int):
    return jax.jit(
        functools.partial(
            sinkhorn_balance,
            n_iterations=n_iterations,
            norm=norm,
            block_rows=block_rows,
        )
    )


def balance(
    u, *, n_iterations=5, norm="l2", block_rows=0, tau=1e-3, eps=1e-20
) -> np.ndarray:
    return np.asarray(
        compiled(n_iterations, norm, block_rows)(jnp.asarray(u), tau=tau, eps=eps)
    )


@pytest.mark.parametrize("block_rows", [0, 7])
@pytest.mark.parametrize("n_iterations, norm", [(1, "l2"), (3, "l1"), (11, "l2")])
def test_equals_the_slow_loop(n_iterations, norm, block_rows):
    u = matrix()
    for tau in (0.0, 1e-3, 0.5):
        want = oracle.balance(u, n_iterations, tau, 1e-20, norm)
        got = balance(
            u, n_iterations=n_iterations, norm=norm, block_rows=block_rows, tau=tau
        )
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-7)
        np.testing.assert_array_equal(got.any(1), want.any(1))


def test_large_eps_is_added_to_every_norm():
    u = matrix()
    want = oracle.balance(u, 5, 1e-3, 0.3)
    np.testing.assert_allclose(balance(u, eps=0.3), want, rtol=3e-6, atol=1e-7)
    assert np.abs(want - oracle.balance(u, 5, 1e-3, 1e-20)).max() > 1e-2


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_kept_rows_end_with_norm_one_and_the_rest_are_zero(norm):
    got = balance(matrix(), norm=norm, tau=0.2)
    length = np.abs(got).sum(1) if norm == "l1" else np.sqrt((got**2).sum(1))
    kept = got.any(1)
    assert 0 < kept.sum() < ROWS - 1
    np.testing.assert_allclose(length[kept], 1.0, rtol=1e-6)
    np.testing.assert_array_equal(length[~kept], 0.0)


def test_many_iterations_even_out_the_columns():
    rng = np.random.default_rng(1)
    u = rng.uniform(0.5, 1.5, (ROWS, WIDTH)) * 4.0 ** np.arange(WIDTH)
    got = balance(u.astype(np.float32), n_iterations=11)
    columns = np.sqrt((got**2).sum(0))
    np.testing.assert_allclose(columns, np.sqrt(ROWS / WIDTH), rtol=2e-3)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("block_rows", [0, 7])
def test_scale_of_the_update_does_not_matter(scale, block_rows):
    u = matrix()
    got = balance(u * np.float32(scale), block_rows=block_rows, eps=0.0, n_iterations=5)
    np.testing.assert_allclose(
        got, balance(u, eps=0.0, block_rows=block_rows), rtol=2e-5, atol=1e-7
    )


def test_scale_matters_only_through_eps():
    """At scale 1e-20 the literal eps of 1e-20 is no longer negligible."""
    u = matrix() * np.float32(1e-20)
    want = oracle.balance(u, 1, 1e-3, 1e-20)
    got = balance(u, n_iterations=1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-8)
    assert np.sqrt((got**2).sum(1)).max() < 0.99


def test_permuting_rows_or_columns_permutes_the_result():
    u, rng = matrix(), np.random.default_rng(2)
    rows, columns = rng.permutation(ROWS), rng.permutation(WIDTH)
    got = balance(u)
    np.testing.assert_allclose(balance(u[rows]), got[rows], rtol=2e-6, atol=1e-8)
    np.testing.assert_allclose(
        balance(u[:, columns]), got[:, columns], rtol=2e-6, atol=1e-8
    )


@pytest.mark.parametrize("block_rows", [0, 7])
def test_zero_rows_and_columns_stay_zero(block_rows):
    u = matrix()
    u[:, 2] = 0.0
    got = balance(u, block_rows=block_rows)
    np.testing.assert_array_equal(got[3], 0.0)
    np.testing.assert_array_equal(got[:, 2], 0.0)
    np.testing.assert_allclose(got, oracle.balance(u, 5, 1e-3, 1e-20), atol=1e-6)
    np.testing.assert_array_equal(balance(u * 0, block_rows=block_rows), u * 0)


def test_zero_rows_count_in_the_mean_but_not_elsewhere():
    u = matrix()
    u[3] = u[4]
    padded = np.concatenate([u, np.zeros((40, WIDTH), np.float32)])
    np.testing.assert_allclose(
        balance(padded, tau=0.0)[:ROWS], balance(u, tau=0.0), rtol=2e-6, atol=1e-8
    )
    with_tau = balance(padded, tau=0.5)[:ROWS].any(1)
    assert with_tau.sum() > balance(u, tau=0.5).any(1).sum()


def test_a_row_at_the_threshold_is_masked():
    u = np.array([[1.0, 0.0], [0.0, 1.0], [4.0, 0.0], [0.0, 2.0]], np.float32)
    kept = balance_factors(jnp.asarray(u), tau=0.5).kept_R  # the mean is 2
    np.testing.assert_array_equal(kept, [False, False, True, True])


def test_factors_rebuild_the_result_and_leave_the_update_alone():
    u = jnp.asarray(matrix())
    rows_R, columns_W, kept_R = balance_factors(u, n_iterations=5)
    np.testing.assert_allclose(
        u * rows_R[:, None] * columns_W, balance(u), rtol=1e-6, atol=1e-9
    )
    np.testing.assert_array_equal(rows_R != 0, kept_R)
    np.testing.assert_array_equal(kept_R[3], False)


def test_jit_equals_no_jit():
    u = jnp.asarray(matrix())
    for block_rows in (0, 7):
        np.testing.assert_allclose(
            sinkhorn_balance(u, n_iterations=5, block_rows=block_rows),
            balance(u, block_rows=block_rows),
            rtol=1e-6,
            atol=1e-9,
        )


def test_bfloat16_is_balanced_in_float32():
    u = jnp.asarray(matrix(), jnp.bfloat16)
    got = compiled(5, "l2", 0)(u, tau=1e-3, eps=1e-20)
    assert got.dtype == jnp.float32
    want = oracle.balance(np.asarray(u, np.float64), 5, 1e-3, 1e-20)
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-7)


def test_second_call_does_not_compile_again():
    function = compiled(5, "l2", 7)
    balance(matrix(0), block_rows=7)
    n_before = function._cache_size()
    balance(matrix(1), block_rows=7, tau=0.25, eps=1e-8)
    assert function._cache_size() == n_before


def test_empty_tables():
    assert sinkhorn_balance(jnp.zeros((0, 4))).shape == (0, 4)
    assert sinkhorn_balance(jnp.zeros((4, 0))).shape == (4, 0)


@pytest.mark.multidevice
def test_rows_sharded_over_eight_devices_equal_one_device():
    mesh = jax.make_mesh((8,), ("table",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("table", None))
    u = matrix()
    step = jax.jit(
        functools.partial(sinkhorn_balance, n_iterations=5),
        in_shardings=sharding,
        out_shardings=sharding,
    )
    placed = jax.device_put(u, sharding)
    got = step(placed)
    assert got.sharding == sharding
    np.testing.assert_allclose(got, balance(u), rtol=2e-6, atol=1e-8)
    assert "all-gather" not in step.lower(placed).compile().as_text()


def test_blocks_only_on_a_single_cpu_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert default_block_rows(800_000, 32) == 0
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert default_block_rows(800_000, 32) == 2048
    assert default_block_rows(4096, 32) == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert default_block_rows(800_000, 32) == 0


@pytest.mark.parametrize("n_iterations", [0, 2, -1, 3.0, True])
def test_number_of_iterations_must_be_odd(n_iterations):
    with pytest.raises(ConfigError, match="n_iterations"):
        sinkhorn_balance(jnp.ones((4, 4)), n_iterations=n_iterations)


def test_unknown_norm_and_wrong_rank_are_refused():
    with pytest.raises(ConfigError, match="sinkhorn.norm = 'l3'"):
        sinkhorn_balance(jnp.ones((4, 4)), norm="l3")
    with pytest.raises(ShapeError, match=r"\(4,\)"):
        sinkhorn_balance(jnp.ones(4))
