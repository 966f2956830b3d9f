"""The naive sparse form: what it does, and that it is not the published one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.optim.sinkhorn_momentum import sinkhorn_momentum
from memjax.optim.sinkhorn_touched_rows import sinkhorn_touched_rows
from tests.optim.row_steps import WIDTH, feed_parts, feeder, some_gradients
from tests.oracles.sinkhorn_momentum import balance

N = 13
QUICK = {"beta": 0.8, "n_iterations": 3, "tau": 0.3, "gamma": 0.5}


@functools.cache
def feed(norm):
    return feeder(sinkhorn_touched_rows(-0.1, norm=norm, **QUICK))


def gradients_and_reads():
    gradients, read = some_gradients(8, N)
    gradients *= 10.0 ** np.random.default_rng(1).uniform(-1, 1, (N, 1))
    read[:, -2:] = False
    read[5] = False  # nothing is read
    return gradients.astype(np.float32), read


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_equals_the_loop_over_the_rows_of_each_step(norm):
    gradients, read = gradients_and_reads()
    got = feed(norm)(jnp.zeros((N, WIDTH)), gradients, read)
    momentum, table = np.zeros((N, WIDTH)), np.zeros((N, WIDTH))
    factor = 0.5 * 0.1 * (WIDTH if norm == "l1" else WIDTH**0.5)
    n_masked = 0
    for step, rows in enumerate(read):
        gradient = gradients[step, rows].astype(np.float64)
        momentum[rows] = 0.8 * momentum[rows] + 0.2 * gradient
        if rows.any():
            ahead = 0.8 * momentum[rows] + 0.2 * gradient
            update = balance(ahead, 3, 0.3, 1e-20, norm)
            table[rows] += factor * update
            n_masked += (~update.any(1)).sum()
        np.testing.assert_allclose(got.tables[step], table, rtol=1e-4, atol=1e-5)
    assert n_masked > 0
    np.testing.assert_array_equal(got.table[-2:], 0.0)
    np.testing.assert_array_equal(got.metrics["active_rows"], read.sum(1))
    assert float(got.metrics["update_norm"][5]) == 0.0
    np.testing.assert_allclose(got.state.momentum_RW, momentum, rtol=1e-5, atol=1e-6)


def test_it_is_not_the_published_optimizer():
    """In the published form a row moves on after it was read; here it stands still."""
    gradients, read = some_gradients(2, N)
    read[0], read[1] = np.arange(N) < 5, np.arange(N) >= 5
    gradients = np.ones_like(gradients) * (1 + np.arange(WIDTH)) * read[..., None]
    table = jnp.zeros((N, WIDTH))
    naive = feed("l2")(table, gradients, read)
    np.testing.assert_array_equal(naive.tables[1][:5], naive.tables[0][:5])
    transform = sinkhorn_momentum(-0.1, **QUICK)
    first, state = jax.jit(transform.update)(gradients[0], transform.init(table))
    np.testing.assert_allclose(first, naive.tables[0], rtol=1e-5)
    second, _ = jax.jit(transform.update)(gradients[1], state)
    assert np.abs(second[:5]).min() > 1e-3


@pytest.mark.parametrize("by", ["rows", "columns"])
def test_parts_of_a_table_are_as_the_whole(by):
    """13 rows padded to 16 on 4 devices, or 4 columns on 4 devices."""
    gradients, read = gradients_and_reads()
    table = jnp.zeros((N, WIDTH))
    whole = feed("l2")(table, gradients, read)
    optimizer = sinkhorn_touched_rows(-0.1, **QUICK)
    got, metrics = feed_parts(optimizer, table, gradients, read, by)
    np.testing.assert_allclose(got, whole.table, rtol=1e-5, atol=1e-6)
    for name, value in whole.metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5)


def test_p15_zero_rows_and_gradients():
    """A row with gradient 0 is 0; a gradient of 0 everywhere moves nothing."""
    gradients = np.zeros((2, N, WIDTH), np.float32)
    gradients[0, [0, 2]] = [[3, 4, 0, 1], [0, 5, 0, 2]]
    read = np.zeros((2, N), bool)
    read[:, :3] = True
    got = feed("l2")(jnp.zeros((N, WIDTH)), gradients, read)
    np.testing.assert_array_equal(got.tables[:, 1], 0.0)
    np.testing.assert_array_equal(got.tables[:, :, 2], 0.0)
    assert got.tables[0, [0, 2]][:, [0, 1, 3]].any()
    none = feed("l2")(jnp.zeros((N, WIDTH)), 0 * gradients, read)
    for leaf in jax.tree.leaves((none.table, none.state.momentum_RW)):
        np.testing.assert_array_equal(leaf, 0.0)


@pytest.mark.parametrize(
    "bad", [{"beta": 1.0}, {"tau": -1.0}, {"n_iterations": 2}, {"norm": "max"}]
)
def test_arguments_out_of_range(bad):
    name = next(iter(bad))
    with pytest.raises(ConfigError, match=rf"sinkhorn_touched_rows\.{name}"):
        sinkhorn_touched_rows(1.0, **bad)


def test_stacked_tables_are_refused():
    with pytest.raises(ShapeError, match="table has shape"):
        sinkhorn_touched_rows(1.0).init(jnp.zeros((2, 3, 4)))
