"""Optax transforms applied to the rows that were read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.row_gradient import UniqueRows
from memjax.ops.rows import store
from memjax.optim.precision import in_float32
from memjax.optim.rate import rate_schedule, scale_by_rate
from memjax.optim.row_write import RowWriter
from memjax.optim.sinkhorn_momentum import sinkhorn_momentum
from memjax.optim.table_optimizer import rowwise
from tests.optim.row_steps import (
    N_ROWS,
    RATES,
    WIDTH,
    feed_parts,
    feeder,
    first_table,
    run_dense,
    run_rows,
    some_gradients,
    types,
    zipf_reads,
)

INNER = {
    "adam": optax.adam(0.1),
    "adagrad": optax.adagrad(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(lambda step: 0.1 / (1 + step), weight_decay=0.3),
    "in_float32": in_float32(optax.chain(optax.clip(0.5), optax.adam(0.1))),
    "scale_by_rate": optax.chain(
        optax.scale_by_adam(),
        scale_by_rate(rate_schedule("wsd", 0.1, 8, warmup_steps=3)),
    ),
}


@pytest.mark.parametrize(
    "inner, tolerance", [(optax.sgd(0.05), 0.0), (optax.adagrad(0.1), 1e-6)]
)
def test_equals_dense_over_300_steps(inner, tolerance):
    """SGD to the last bit: the reads of a row are added in the same order."""
    reads, table = zipf_reads(300), first_table()
    got = run_rows(rowwise(inner, block_rows=4), table, reads)
    want = run_dense(inner, table, reads)
    np.testing.assert_allclose(got.losses, want.losses, rtol=tolerance)
    np.testing.assert_allclose(got.tables, want.tables, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(
        got.metrics["update_norm"], want.metrics["update_norm"], rtol=1e-5
    )
    assert np.abs(got.table - np.asarray(table)).max() > 0.1


@pytest.mark.parametrize("name", INNER)
def test_rows_read_in_every_step_equal_dense(name):
    table = first_table()[:9]
    gradients = some_gradients(6, 9)[0] + 0.1
    got = feeder(rowwise(INNER[name], block_rows=4))(
        table, gradients, np.ones((6, 9), bool)
    )

    update = jax.jit(INNER[name].update)
    state = INNER[name].init(table)
    for step, gradient in enumerate(gradients):
        updates, state = update(gradient, state, table)
        table = table + updates
        np.testing.assert_allclose(got.tables[step], table, rtol=2e-6, atol=2e-6)


@functools.cache
def adam_run(state_dtype):
    """40 steps of half of 9 rows."""
    optimizer = rowwise(INNER["adam"], state_dtype=state_dtype, block_rows=4)
    return feeder(optimizer)(first_table()[:9], *some_gradients(40, 9))


def test_lazy_adam_is_adam_of_each_row_at_the_steps_that_read_it():
    gradients, read = some_gradients(40, 9)
    table = np.asarray(first_table()[:9], np.float64)
    got = adam_run(None)
    first, second = np.zeros((9, WIDTH)), np.zeros((9, WIDTH))
    for step in range(40):
        rows = read[step]
        first[rows] = 0.9 * first[rows] + 0.1 * gradients[step, rows]
        second[rows] = 0.999 * second[rows] + 0.001 * gradients[step, rows] ** 2
        mean = first / (1 - 0.9 ** (step + 1))
        spread = np.sqrt(second / (1 - 0.999 ** (step + 1)))
        table[rows] -= 0.1 * mean[rows] / (spread[rows] + 1e-8)
        np.testing.assert_allclose(got.tables[step], table, rtol=1e-4, atol=1e-5)


def test_p17_lazy_and_dense_adam():
    """Gradient 1, 0, 0 at rate 0.1: lazy -0.1, 0, 0; dense -0.1, -0.067, -0.052."""
    gradients = np.zeros((3, 2, 1), np.float32)
    gradients[0, 0] = 1
    read = gradients[..., 0] > 0
    got = feeder(rowwise(optax.adam(0.1)))(jnp.zeros((2, 1)), gradients, read)
    moves = np.diff(got.tables[:, 0, 0], prepend=0)
    np.testing.assert_allclose(moves, [-0.1, 0, 0], atol=1e-6)
    assert moves[1] == moves[2] == 0

    transform, moves = optax.adam(0.1), []
    update = jax.jit(transform.update)
    state = transform.init(jnp.zeros((2, 1)))
    for gradient in gradients:
        updates, state = update(jnp.asarray(gradient), state)
        moves.append(float(updates[0, 0]))
    np.testing.assert_allclose(moves, [-0.1, -0.0670, -0.0518], atol=5e-5)


def test_p17_rows_never_read_keep_their_bits():
    """Even under weight decay, which is decoupled and reaches rows of the step."""
    reads, table = zipf_reads(10), first_table()
    got = run_rows(rowwise(INNER["adamw"]), table, reads)
    unread = np.setdiff1d(np.arange(N_ROWS), reads.ids)
    read = np.intersect1d(np.arange(N_ROWS), reads.ids)
    np.testing.assert_array_equal(got.table[unread], np.asarray(table)[unread])
    assert (got.table[read] != np.asarray(table)[read]).all()


REFUSED = {
    "adafactor": optax.adafactor(0.1),
    "global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "loose_global_norm": optax.chain(optax.clip_by_global_norm(1e6), optax.adam(0.1)),
    "block_rms": optax.clip_by_block_rms(1.0),
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "normalize": optax.normalize_by_update_norm(),
    "noise": optax.add_noise(0.1, 0.5, 0),
    "centralize": optax.centralize(),
    "sinkhorn": sinkhorn_momentum(0.1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_transforms_over_more_than_an_entry_are_refused(name):
    with pytest.raises(ConfigError, match=r"rowwise\.inner"):
        rowwise(REFUSED[name])


def test_a_state_of_another_shape_is_refused_at_init():
    """A factored second moment shows only at sizes at which it is factored."""
    optimizer = rowwise(
        optax.adafactor(0.1, multiply_by_parameter_scale=False, clipping_threshold=None)
    )
    with pytest.raises(ConfigError, match=r"leaves like the table \(128, 130\)"):
        optimizer.init(jnp.zeros((128, 130)))


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
def test_stacked_tables_are_refused(shape):
    with pytest.raises(ShapeError, match="table has shape"):
        rowwise(optax.sgd(0.1)).init(jnp.zeros(shape))


def test_narrow_moments_follow_the_wide_ones():
    """A second moment in bfloat16 decays by 0.999 on average; to nearest it stands."""
    n_steps, n_rows = 400, 64
    gradients = np.zeros((n_steps, n_rows, WIDTH), np.float32)
    gradients[0] = 1.0 + np.random.default_rng(0).random((n_rows, WIDTH))
    read = np.ones((n_steps, n_rows), bool)
    inner = optax.scale_by_adam(b1=0.9, b2=0.999)
    optimizer = rowwise(inner, state_dtype="bfloat16", block_rows=16)
    run = feeder(optimizer)
    got = run(jnp.zeros((n_rows, WIDTH)), gradients, read)
    assert got.state.inner.nu.dtype == got.state.inner.mu.dtype == jnp.uint16
    assert int(got.state.inner.count) == n_steps
    second = np.asarray(got.state.inner.nu).view(jnp.bfloat16).astype(np.float64)
    want = 0.001 * gradients[0] ** 2 * 0.999 ** (n_steps - 1)
    assert abs(second.sum() / want.sum() - 1) < 0.01
    np.testing.assert_allclose(second, want, rtol=0.25)
    # To nearest, one step of the decay changes nothing.
    start = jnp.asarray(0.001 * gradients[0] ** 2, jnp.bfloat16)
    after = (0.999 * start.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(after, start)

    again = run(jnp.zeros((n_rows, WIDTH)), gradients, read)
    np.testing.assert_array_equal(got.state.inner.nu, again.state.inner.nu)


def test_narrow_adam_is_near_wide_adam():
    near, wide = adam_run("bfloat16").table, adam_run(None).table
    difference = np.abs(near - wide).max()
    assert 1e-4 < difference < 0.05 * np.abs(wide - np.asarray(first_table()[:9])).max()


def test_state_dtype_is_checked():
    with pytest.raises(ConfigError, match=r"rowwise\.state_dtype"):
        rowwise(optax.adam(0.1), state_dtype="float16")


@pytest.mark.parametrize("by", ["rows", "columns"])
def test_parts_of_a_table_round_as_the_whole(by):
    """13 rows on 4 devices, bfloat16 table and moments: the same bits as on one."""
    writer = RowWriter(stochastic_rounding=True, seed=5)
    optimizer = rowwise(
        optax.adam(0.01), writer=writer, state_dtype="bfloat16", block_rows=4
    )
    table = store(first_table()[:13].astype(jnp.bfloat16))
    gradients, read = some_gradients(4, 13)
    whole = feeder(optimizer)(table, gradients, read)
    got, metrics = feed_parts(optimizer, table, gradients, read, by)
    np.testing.assert_array_equal(got, whole.table)
    np.testing.assert_allclose(
        metrics["update_norm"], whole.metrics["update_norm"], rtol=1e-5
    )


@pytest.mark.parametrize("kind", sorted(RATES))
def test_p18_bfloat16_tables_keep_their_types_and_compile_once(kind):
    optimizer = rowwise(optax.adam(RATES[kind]), writer=RowWriter(ema_decay=0.9))
    table = store(jnp.ones((6, 2), jnp.bfloat16))
    state = optimizer.init(table)
    rows = jnp.array([1, 4, 6], jnp.int32)

    @jax.jit
    def step(table, state):
        sums = jnp.ones((3, 2)) * (rows < 6)[:, None]
        unique = UniqueRows(rows, sums, jnp.int32(2))
        return optimizer.apply(unique, state, table)[:2]

    assert types(jax.eval_shape(step, table, state)) == types((table, state))
    if kind == "numpy":
        for _ in range(2):
            table, state = step(table, state)
        assert step._cache_size() == 1
