"""One table's step: what is timed is the training step it claims to be."""

import numpy as np
import pytest

from memjax.benchmarks.table_step import (
    TableCase,
    TableStep,
    load_batches,
    save_batches,
)
from memjax.ops.rows import load

N_ROWS, N_STEPS = 2048, 6


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """(tokens, segments) of six batches of text-like tokens."""
    draw = np.random.default_rng(0).integers(97, 103, (N_STEPS, 2, 12))
    made = [{"tokens": x, "segments": np.ones_like(x)} for x in draw.astype(np.int32)]
    file = tmp_path_factory.mktemp("batches") / "batches.npz"
    save_batches(file, made)
    return load_batches(file)


def started(batches, optimizer, dtype="float32"):
    case = TableCase(
        optimizer=optimizer, n_rows=N_ROWS, width=8, dtype=dtype, capacity=512
    )
    step = TableStep(case, *batches)
    step.start()
    return step


def table_of(step):
    return np.asarray(load(step._state[0]), np.float32)


def test_dense_and_sparse_sinkhorn_time_the_same_training(batches):
    """Parts and whole steps continue one run, and the dense form ends where it does."""
    sparse, dense = started(batches, "sinkhorn"), started(batches, "sinkhorn_dense")
    assert len(sparse.steps(3)) == 3
    parts = sparse.parts(3)
    assert np.shape(parts) == (3, 3) and np.min(parts) > 0
    assert len(dense.steps(N_STEPS)) == N_STEPS and np.ptp(table_of(dense)) > 0
    np.testing.assert_allclose(table_of(sparse), table_of(dense), rtol=1e-4, atol=1e-7)
    counts = sparse.counts()
    assert counts["dense_steps"] == counts["overflow_steps"] == 0
    assert 0 < counts["unique_rows"] < counts["active_rows"] <= 512
    assert dense.counts() == {}
    with pytest.raises(ValueError, match="no parts"):
        dense.parts(1)


def test_adam_in_bfloat16_moves_the_rows_it_counts(batches):
    step = started(batches, "adam", "bfloat16")
    step.steps(1)
    moved = np.any(table_of(step) != 0, axis=1).sum()
    assert moved == step.counts()["unique_rows"] > 0
    table_bytes = step._state[0].nbytes
    assert table_bytes == 2 * 8 * len(step._state[0])
    assert 3 * table_bytes <= step.need_bytes < 4 * table_bytes


def test_unknown_optimizer_is_an_error(batches):
    with pytest.raises(ValueError, match="no optimizer 'lion'"):
        started(batches, "lion")
