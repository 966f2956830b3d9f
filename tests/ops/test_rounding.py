"""Stochastic rounding: right on average, exact where it can be, repeatable."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.ops.rounding import stochastic_round


@functools.cache
def rounded(seed):
    def of(wide, step, rows, columns):
        return stochastic_round(wide, "bfloat16", seed, step, rows, columns)

    return jax.jit(of)


def rounds(values, step=0, first_row=0, seed=3) -> np.ndarray:
    wide = jnp.asarray(values, jnp.float32)
    rows = first_row + jnp.arange(wide.shape[0], dtype=jnp.int32)
    columns = jnp.arange(wide.shape[1], dtype=jnp.int32)
    got = rounded(seed)(wide, jnp.asarray(step, jnp.int32), rows, columns)
    assert got.dtype == jnp.bfloat16
    return np.asarray(got.astype(jnp.float32))


@pytest.mark.parametrize("fraction", [1 / 16, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_up_with_the_probability_of_the_distance(fraction, sign):
    """Between 1 and its neighbour 1 + 1/128."""
    n = 256
    got = sign * rounds(np.full((n, n), sign * (1 + fraction / 128)))
    assert set(np.unique(got)) == {1.0, 1 + 1 / 128}
    spread = np.sqrt(fraction * (1 - fraction)) / n
    assert abs((got > 1).mean() - fraction) < 4 * spread
    # Neither rows nor columns are alike.
    line = 5 * np.sqrt(fraction * (1 - fraction) / n)
    for axis in (0, 1):
        assert np.abs((got > 1).mean(axis) - fraction).max() < line


def test_exact_values_infinities_and_nan_are_kept():
    exact = np.array(
        [[0.0, -0.0, 1.0, -2.5], [3e38, 1e-30, np.inf, -np.inf]], np.float32
    )
    exact = np.asarray(jnp.asarray(exact, jnp.bfloat16).astype(jnp.float32))
    for step in range(20):
        got = rounds(exact, step)
        np.testing.assert_array_equal(got, exact)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(exact))
    # A NaN whose only set bits are those that are cut off.
    nan = np.array([[np.nan], [0]], np.float32)
    nan.view(np.uint32)[1] = 0x7F800001
    assert np.isnan(rounds(nan)).all()


def test_depends_on_seed_step_row_and_column_alone():
    values = np.full((6, 5), 1 + 0.5 / 128, np.float32)
    whole = rounds(values, step=4)
    np.testing.assert_array_equal(rounds(values, step=4), whole)
    np.testing.assert_array_equal(rounds(values[2:4], step=4, first_row=2), whole[2:4])
    assert (rounds(values, step=5) != whole).any()
    assert (rounds(values, step=4, seed=4) != whole).any()


def test_a_sum_of_small_steps_arrives():
    """1000 steps of 1e-4 from 1: to nearest none is made, at random 0.1 on average."""

    def walk(step, tables):
        nearest, random = tables
        nearest = (nearest.astype(jnp.float32) + 1e-4).astype(jnp.bfloat16)
        wide = random.astype(jnp.float32) + 1e-4
        at = jnp.arange(32, dtype=jnp.int32)
        return nearest, stochastic_round(wide, jnp.bfloat16, 0, step, at, at)

    start = jnp.ones((32, 32), jnp.bfloat16)
    nearest, random = jax.lax.fori_loop(0, 1000, walk, (start, start))
    np.testing.assert_array_equal(nearest.astype(np.float32), 1.0)
    assert abs(float(random.astype(jnp.float32).mean()) - 1.1) < 0.005


def test_other_dtypes_are_refused():
    at = jnp.arange(2, dtype=jnp.int32)
    for wide, narrow in ((jnp.float32, "float16"), (jnp.bfloat16, "bfloat16")):
        with pytest.raises(ConfigError, match="stochastic_rounding"):
            stochastic_round(jnp.ones((2, 2), wide), narrow, 0, jnp.int32(0), at, at)
