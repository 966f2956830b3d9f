"""Sinkhorn momentum by rows against its dense form and a float64 active set."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.row_gradient import RowGradient, unique_rows
from memjax.ops.rows import store
from memjax.optim.row_write import RowWriter
from memjax.optim.sinkhorn_momentum import sinkhorn_momentum
from memjax.optim.sinkhorn_rows import sinkhorn_rows
from tests.optim.row_steps import (
    N_ROWS,
    RATES,
    WIDTH,
    feeder,
    first_table,
    moved,
    run_dense,
    run_rows,
    types,
    zipf_reads,
)
from tests.oracles.sinkhorn_rows import ActiveSet

# A row leaves log(0.25 * 0.05) / log(0.8) = 20 steps after its last read, or so.
QUICK = {"beta": 0.8, "n_iterations": 3, "tau": 0.05, "eps": 1e-20}


@functools.cache
def long_runs(norm):
    """(by rows, dense) over the same 300 steps."""
    reads, table = zipf_reads(300), first_table()
    settings = {**QUICK, "gamma": 0.5, "norm": norm}
    return (
        run_rows(sinkhorn_rows(falling_rate, capacity=70, **settings), table, reads),
        run_dense(sinkhorn_momentum(falling_rate, **settings), table, reads),
    )


def falling_rate(step):
    return 0.05 / (1 + 0.01 * step)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_equals_dense_over_300_steps(norm):
    reads, table = zipf_reads(300), first_table()
    got, want = long_runs(norm)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    np.testing.assert_allclose(got.tables, want.tables, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(moved(got, table), moved(want, table))
    np.testing.assert_allclose(
        got.metrics["update_norm"], want.metrics["update_norm"], rtol=1e-5
    )
    assert int(got.metrics["dense_steps"][-1]) == 0
    assert int(got.metrics["overflow_steps"][-1]) == 0
    # Rows came and went, and a row that is not read does move.
    active = np.asarray(got.metrics["active_rows"])
    assert active[50:].max() < N_ROWS - 15 and np.diff(active).min() < 0
    assert moved(got, table)[100:].sum() > 2 * 200 * len(np.unique(reads.ids[0]))


def test_p17_rows_never_read_keep_their_bits():
    """After 10 steps, whatever the rows that were read do."""
    reads, table, got = zipf_reads(300), first_table(), long_runs("l2")[0]
    unread = np.setdiff1d(np.arange(N_ROWS), reads.ids[:10])
    assert len(unread) > 5
    np.testing.assert_array_equal(got.tables[9][unread], np.asarray(table)[unread])
    assert moved(got, table)[9].sum() == N_ROWS - len(unread)


def given_gradients(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(gradients [S, R, W], read [S, R]) that force dense steps, or none."""
    reads = zipf_reads(90, n_reads=12, seed=3)
    rng = np.random.default_rng(4)
    gradients = np.zeros((90, N_ROWS, WIDTH))
    read = np.zeros((90, N_ROWS), bool)
    for step, ids in enumerate(np.asarray(reads.ids)):
        rows = np.unique(ids[ids < N_ROWS])
        read[step, rows] = True
        gradients[step, rows] = rng.standard_normal((len(rows), WIDTH))
    if kind == "scaled":
        gradients[40:60] *= 1e-3
    elif kind == "plain":
        # Nothing is read: momentum decays and rows move all the same.
        gradients[60:70], read[60:70] = 0, False
    elif kind == "cancelled":
        # Three rows carry nearly all of the mean; then their momentum is taken away.
        gradients[:40, :3] += 300.0
        gradients[40:, :3], read[40:, :3] = 0, False
        read[:41, :3] = True
        momentum = np.zeros((3, WIDTH))
        for step in range(40):
            momentum = 0.8 * momentum + 0.2 * gradients[step, :3]
        gradients[40, :3] = -0.8 / 0.2 * momentum
    return gradients.astype(np.float32), read


@functools.cache
def feed(capacity, slack, norm):
    return feeder(
        sinkhorn_rows(
            1.0, capacity=capacity, slack=slack, gamma=1.0, **QUICK, norm=norm
        )
    )


@pytest.mark.parametrize(
    "kind, capacity, slack, norm",
    [
        ("plain", 70, 0.25, "l2"),
        ("plain", 30, 0.25, "l1"),
        ("cancelled", 70, 0.9, "l2"),
        ("scaled", 70, 0.9, "l2"),
    ],
)
def test_steps_equal_dense_and_are_counted_as_by_the_oracle(
    kind, capacity, slack, norm
):
    gradients, read = given_gradients(kind)
    settings = {**QUICK, "norm": norm}
    oracle = ActiveSet(N_ROWS, WIDTH, capacity=capacity, slack=slack, **settings)
    directions, ratios, active, dense, overflow = [], [], [], [], []
    for step in range(len(read)):
        direction, ratio = oracle.step(
            {
                int(row): gradients[step, row].astype(np.float64)
                for row in np.flatnonzero(read[step])
            }
        )
        directions.append(direction)
        ratios.append(ratio)
        active.append(len(oracle.active))
        dense.append(oracle.dense_steps)
        overflow.append(oracle.overflow_steps)

    table = jnp.zeros((N_ROWS, WIDTH))
    got = feed(capacity, slack, norm)(table, gradients, read)
    np.testing.assert_array_equal(got.metrics["dense_steps"], dense)
    np.testing.assert_array_equal(got.metrics["overflow_steps"], overflow)
    np.testing.assert_array_equal(got.metrics["active_rows"], active)
    ratios = np.array(ratios)
    certain = np.abs(ratios - 1) > 1e-4
    np.testing.assert_array_equal(moved(got, table)[certain], (ratios > 1)[certain])
    want = -np.cumsum(directions, 0)
    np.testing.assert_allclose(got.tables, want, rtol=1e-5, atol=1e-4)
    if kind == "plain" and capacity == 70:
        assert dense[-1] == overflow[-1] == 0
        assert moved(got, table)[60:70].any(1).all()
    elif kind == "plain":
        assert overflow[-1] > 0
    else:
        assert dense[-1] > 0 and overflow[-1] == 0

    # The oracle itself is the dense form.
    if norm == "l2":
        np.testing.assert_allclose(directions, dense_directions(gradients), atol=2e-4)


@functools.cache
def dense_transform(tau):
    transform = sinkhorn_momentum(-1.0, gamma=1.0, **{**QUICK, "tau": tau})

    @jax.jit
    def run(gradients):
        def step(state, gradient):
            updates, state = transform.update(gradient, state)
            return state, updates

        return jax.lax.scan(step, transform.init(gradients[0]), gradients)[1]

    return run


def dense_directions(gradients: np.ndarray, tau: float = 0.05) -> np.ndarray:
    return np.asarray(dense_transform(tau)(jnp.asarray(gradients)))


def balance(update):
    """Rows and columns of norm 1 in turn, 11 times."""
    update = np.asarray(update, np.float64)
    for k in range(1, 12):
        update = update / np.sqrt(np.square(update).sum(k % 2, keepdims=True))
    return update


def test_p15_zero_rows_columns_and_gradients():
    """Gradient [[3, 4], [0, 0], [0, 5]]: row 1 is 0, the others as without it.

    A factor on the whole gradient, as clipping puts there, does not matter; 0 may come
    of it as well.
    """
    form = sinkhorn_rows(-1.0, capacity=4)

    @jax.jit
    def update(gradient, read):
        ids = jnp.where(read, jnp.arange(3), 3)
        rows = unique_rows([RowGradient(ids[:, None], None, gradient)], 3, 2)
        table = jnp.zeros((3, 2))
        return form.apply(rows, form.init(table), table)[:2]

    def updated(gradient, read=(True, True, True)):
        table, state = update(jnp.asarray(gradient, jnp.float32), jnp.asarray(read))
        for leaf in jax.tree.leaves(state):
            assert np.isfinite(leaf).all()
        return np.asarray(table)

    gradient = np.array([[3, 4], [0, 0], [0, 5]])
    got = updated(gradient)
    np.testing.assert_array_equal(got[1], 0.0)
    unit = 0.18 * np.sqrt(2)
    # Three rows of which one is never read are two rows but for the mean.
    want = updated([[3, 4], [9, 9], [0, 5]], (True, False, True))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(got[[0, 2]] / unit, balance([[3, 4], [0, 5]]), rtol=1e-5)
    np.testing.assert_allclose(updated(gradient * 1e-3), got, rtol=1e-5)
    np.testing.assert_array_equal(updated([[3, 0], [4, 0], [1, 0]])[:, 1], 0.0)
    np.testing.assert_array_equal(updated(gradient * 0.0), 0.0)
    assert got.any()


def test_a_state_has_the_same_shapes_on_every_backend(monkeypatch):
    """Else a checkpoint of a CPU could not go on on an accelerator."""
    table = jax.ShapeDtypeStruct((200, 1024), jnp.float32)

    def slots(backend):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        state = jax.eval_shape(
            lambda x: sinkhorn_rows(1.0, capacity=130).init(x), table
        )
        return state.ids_A.shape

    assert slots("cpu") == slots("gpu") == (192,)


def test_blocks_of_the_buffer():
    """A width at which the buffer is worked on in blocks of 64 slots."""
    width, n_rows, n_steps = 1024, 200, 24
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 190, (n_steps, 12)).astype(np.int32)
    cotangents = rng.standard_normal((n_steps, 12, width)).astype(np.float32)
    settings = {**QUICK, "tau": 0.2}
    form = sinkhorn_rows(-1.0, capacity=130, gamma=1.0, **settings)

    def step(carry, inputs):
        table, state = carry
        ids, cotangent = inputs
        rows = unique_rows([RowGradient(ids[:, None], None, cotangent)], n_rows, width)
        table, state, metrics = form.apply(rows, state, table)
        return (table, state), metrics

    @jax.jit
    def run(ids, cotangents):
        table = jnp.zeros((n_rows, width))
        return jax.lax.scan(step, (table, form.init(table)), (ids, cotangents))

    (table, state), metrics = run(ids, cotangents)
    gradients = np.zeros((n_steps, n_rows, width), np.float32)
    for t in range(n_steps):
        np.add.at(gradients[t], ids[t], cotangents[t])
    want = dense_directions(gradients, 0.2).sum(0)
    assert state.ids_A.shape == (192,) and int(metrics["dense_steps"][-1]) == 0
    assert 64 < int(state.counts_3[1]) <= 192
    np.testing.assert_allclose(table, want, rtol=1e-4, atol=1e-4)


def test_bfloat16_momentum_of_rows_outside_is_near():
    gradients, read = given_gradients("plain")
    form = sinkhorn_rows(
        1.0, capacity=70, momentum_dtype="bfloat16", gamma=1.0, **QUICK
    )
    near = feeder(form)(jnp.zeros((N_ROWS, WIDTH)), gradients, read)
    exact = -dense_directions(gradients).sum(0)
    assert near.state.momentum_RW.dtype == jnp.uint16
    difference = np.abs(near.table - exact)
    assert 1e-4 < difference.max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("kind", sorted(RATES))
def test_p18_bfloat16_tables_keep_their_types_and_compile_once(kind):
    writer = RowWriter(stochastic_rounding=True, ema_decay=0.9)
    form = sinkhorn_rows(RATES[kind], capacity=4, n_iterations=3, writer=writer)
    table = store(jnp.ones((6, 2), jnp.bfloat16))
    state = form.init(table)
    gradient = RowGradient(
        jnp.array([[1], [4], [6]]), None, jnp.ones((3, 2), jnp.bfloat16)
    )

    @jax.jit
    def step(table, state):
        rows = unique_rows([gradient], 6, 2)
        return form.apply(rows, state, table)[:2]

    assert types(jax.eval_shape(step, table, state)) == types((table, state))
    if kind == "schedule":
        for _ in range(2):
            table, state = step(table, state)
        assert step._cache_size() == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"beta": 1.0},
        {"beta": 0.0},
        {"tau": -1.0},
        {"slack": 1.0},
        {"eps": float("nan")},
        {"gamma": -0.1},
        {"n_iterations": 4},
        {"norm": "max"},
        {"capacity": 0},
        {"capacity": 1.5},
        {"capacity": None},
        {"momentum_dtype": "int8"},
    ],
    ids=lambda bad: "_".join(map(str, next(iter(bad.items())))),
)
def test_arguments_out_of_range(bad):
    with pytest.raises(ConfigError, match=rf"sinkhorn_rows\.{next(iter(bad))}"):
        sinkhorn_rows(1.0, **{"capacity": 8, **bad})


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
def test_stacked_tables_are_refused(shape):
    with pytest.raises(ShapeError, match="table has shape"):
        sinkhorn_rows(1.0, capacity=8).init(jnp.zeros(shape))
