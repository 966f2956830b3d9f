"""Writing rows: rounding at random, and the lazy running mean."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.row_gradient import RowGradient, unique_rows
from memjax.ops.rows import load, store
from memjax.optim.ema import update_ema
from memjax.optim.row_write import RowWriter
from memjax.optim.sinkhorn_rows import sinkhorn_rows
from memjax.optim.table_optimizer import rowwise
from tests.optim.row_steps import WIDTH, feeder, first_table, some_gradients

N = 16


def dense_mean(table: np.ndarray, tables: np.ndarray, decay: float) -> np.ndarray:
    """The running mean of all rows, updated at every step."""
    mean = np.asarray(table, np.float32)
    for step, new in enumerate(np.asarray(tables, np.float32)):
        mean = update_ema(mean, new, decay, step)
    return np.asarray(mean)


@pytest.mark.parametrize("kind", ["sgd", "bfloat16", "sinkhorn"])
def test_lazy_mean_equals_the_dense_mean(kind):
    """Rows are written now and then, some never; Sinkhorn has dense steps as well."""
    writer = RowWriter(ema_decay=0.9, stochastic_rounding=kind == "bfloat16")
    gradients, read = some_gradients(40, N)
    read[:, -3:] = False
    read[12:, ::2] = False
    table = first_table()[:N]
    if kind == "sinkhorn":
        # 13 rows are read, 9 have a place.
        optimizer = sinkhorn_rows(0.1, capacity=9, n_iterations=3, writer=writer)
    else:
        optimizer = rowwise(optax.sgd(0.3), writer=writer, block_rows=4)
    if kind == "bfloat16":
        table = store(table.astype(jnp.bfloat16))
    got = feeder(optimizer)(table, gradients, read)
    mean = optimizer.mean(jnp.asarray(got.table), got.state)
    want = dense_mean(load(table), got.tables, 0.9)
    assert mean.dtype == table.dtype
    tolerance = 1e-2 if kind == "bfloat16" else 1e-5
    np.testing.assert_allclose(
        load(mean).astype(jnp.float32), want, rtol=tolerance, atol=tolerance
    )
    np.testing.assert_array_equal(mean[-3:], table[-3:])
    moving = np.abs(want - np.asarray(load(jnp.asarray(got.table)), np.float32))
    assert moving.max() > 20 * tolerance
    if kind == "sinkhorn":
        assert int(got.metrics["overflow_steps"][-1]) > 0
        assert int(got.metrics["overflow_steps"][-1]) < 40


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.9999])
def test_decays_of_a_long_pause_are_made_up_for(decay):
    """A row that is written at step 3 and again 200000 steps later."""
    writer, last = RowWriter(ema_decay=decay), 200_003
    t = np.arange(last)
    decays = np.minimum(np.float64(np.float32(decay)), (1 + t) / (10 + t))
    table = jnp.zeros((1, 2))
    state = writer.init(table)._replace(step=jnp.int32(2))
    state = writer.begin(state)
    one, row = jnp.ones((1, 2)), jnp.zeros(1, jnp.int32)
    add, mean = jax.jit(writer.add), jax.jit(writer.mean)
    table, state = add(table, state, row, one)
    np.testing.assert_allclose(mean(table, state), 1 - decays[2], rtol=1e-5)
    late = state._replace(step=jnp.int32(last - 1))
    gap = np.prod(decays[2 : last - 1])
    np.testing.assert_allclose(
        np.asarray(table - mean(table, late))[0, 0], gap, rtol=1e-4, atol=1e-7
    )
    table, late = add(table, writer.begin(late), row, one)
    gap = decays[last - 1] * (gap + 1)
    np.testing.assert_allclose(table - mean(table, late), gap, rtol=1e-5)


def test_one_write_of_all_rows_equals_writes_of_each():
    writer = RowWriter(ema_decay=0.9, stochastic_rounding=True, seed=2)
    table = store(first_table()[:N].astype(jnp.bfloat16))
    delta = 0.01 * first_table(3)[:N]
    state = writer.begin(writer.init(table)._replace(step=jnp.int32(7)))
    whole = jax.jit(writer.add_all)(table, state, delta)
    ids = jnp.arange(N + 2, dtype=jnp.int32)[::-1]
    padded = jnp.concatenate([delta, jnp.ones((2, WIDTH))])
    by_row = jax.jit(writer.add)(table, state, ids, padded[::-1])
    for got, want in zip(jax.tree.leaves(by_row), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(got, want)
    assert (np.asarray(whole[0]) != np.asarray(table)).any()


@functools.cache
def small_steps(stochastic_rounding: bool):
    """A bfloat16 table of ones after 200 updates of -0.001."""
    writer = RowWriter(stochastic_rounding=stochastic_rounding)
    optimizer = rowwise(optax.sgd(0.001), writer=writer)
    table = store(jnp.ones((N, WIDTH), jnp.bfloat16))
    gradients = np.ones((200, N, WIDTH), np.float32)
    got = feeder(optimizer)(table, gradients, np.ones((200, N), bool))
    return np.asarray(got.tables, np.float32)


def test_bfloat16_tables_move_under_small_updates_only_when_rounded_at_random():
    np.testing.assert_array_equal(small_steps(False), 1.0)
    at_random = small_steps(True)
    assert abs(at_random[-1].mean() - 0.8) < 0.01
    # Entries do not all move at once.
    assert 1 < len(np.unique(at_random[0])) and at_random[0].mean() > 0.99


def test_a_step_with_a_running_mean_copies_nothing_of_the_tables_length():
    """Donated arrays of R rows are written in place, the steps of the rows as well."""
    n_rows = 10007
    optimizer = rowwise(optax.sgd(0.1), writer=RowWriter(ema_decay=0.9))
    table = jax.ShapeDtypeStruct((n_rows, WIDTH), jnp.float32)
    state = jax.eval_shape(optimizer.init, table)
    ids_BK = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    cotangent_BW = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)

    def step(table, state, ids_BK, cotangent_BW):
        gradient = RowGradient(ids_BK, None, cotangent_BW)
        rows = unique_rows([gradient], *table.shape)
        table, rows = jax.lax.optimization_barrier((table, rows))
        return optimizer.apply(rows, state, table)

    step = jax.jit(step, donate_argnums=(0, 1))
    compiled = step.lower(table, state, ids_BK, cotangent_BW).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n_rows
    copies = re.compile(rf"\[{n_rows}\b.* copy\(")
    assert not copies.findall(compiled.as_text())


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_decay_is_checked(decay):
    with pytest.raises(ConfigError, match="ema_decay"):
        RowWriter(ema_decay=decay)


def test_tables_are_checked():
    with pytest.raises(ShapeError, match="table"):
        RowWriter().init(jnp.zeros((2, 3, 4)))
    with pytest.raises(ConfigError, match=r"table\.dtype"):
        RowWriter().init(jnp.zeros((2, 3), jnp.bfloat16))


def test_rounding_a_float32_table_is_refused():
    """It would change nothing; bfloat16 tables are what it is for."""
    with pytest.raises(ConfigError, match="stochastic_rounding = True.*float32"):
        RowWriter(stochastic_rounding=True).init(jnp.zeros((3, 2)))
