"""The overlay of a shared table equals a copy of the table that was written."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.overlay import (
    add_rows,
    clear_overlay,
    empty_overlay,
    read_overlay,
    scale_overlay,
)

S, W = 12, 3
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.normal(size=(S, W)), jnp.float32)
WRITES = [
    (np.array([3, 5, 3, 0]), RNG.normal(size=(4, W)).astype(np.float32)),
    (np.array([5, 11]), RNG.normal(size=(2, W)).astype(np.float32)),
    (np.array([3, 3, 7]), RNG.normal(size=(3, W)).astype(np.float32)),
]
N_WRITES = sum(len(slots) for slots, _ in WRITES)


@partial(jax.jit, static_argnums=(0, 1))
def written(factor: float, n_writes: int, table):
    """All slots after each of WRITES, the table scaled in between."""
    overlay, seen = empty_overlay(S, W, n_writes), []
    for slots, rows in WRITES:
        overlay = scale_overlay(add_rows(overlay, jnp.asarray(slots), rows), factor)
        seen.append(read_overlay(overlay, table, jnp.arange(S)))
    return overlay, jnp.stack(seen)


def oracle(factor: float) -> np.ndarray:
    copy, seen = np.array(TABLE, np.float64), []
    for slots, rows in WRITES:
        for slot, row in zip(slots, rows, strict=True):
            copy[slot] += row
        copy = copy * factor
        seen.append(copy.copy())
    return np.stack(seen)


@pytest.mark.parametrize("n_writes", [N_WRITES, N_WRITES + 2, S, 5 * S])
def test_reads_equal_a_written_copy(n_writes):
    overlay, seen = written(0.9, n_writes, TABLE)
    np.testing.assert_allclose(seen, oracle(0.9), atol=1e-6)
    assert overlay.rows_PW.shape == (min(n_writes, S), W)
    assert (overlay.slots_P is None) == (n_writes >= S)


def test_no_row_moves_and_slots_have_one_place():
    overlay, _ = written(1.0, N_WRITES, TABLE)
    np.testing.assert_array_equal(overlay.slots_P, [0, 3, 3, 3, 3, 5, 5, 7, 11])
    np.testing.assert_array_equal(overlay.places_P, [3, 0, 2, 6, 7, 1, 4, 8, 5])
    used = np.any(np.asarray(overlay.rows_PW) != 0, axis=-1)
    np.testing.assert_array_equal(np.flatnonzero(used), [0, 1, 3, 5, 8])


def test_one_write_too_many_makes_every_read_nan():
    overlay, seen = written(1.0, N_WRITES - 1, TABLE)
    np.testing.assert_allclose(seen[1], oracle(1.0)[1], atol=1e-6)
    assert np.isnan(seen[2]).all()
    assert np.isnan(written(1.0, 1, TABLE)[1]).all()
    cleared = clear_overlay(overlay, S, True)
    np.testing.assert_array_equal(read_overlay(cleared, TABLE, jnp.arange(S)), TABLE)


@pytest.mark.parametrize("n_writes", [0, N_WRITES, S])
def test_an_empty_overlay_is_the_table(n_writes):
    overlay = empty_overlay(S, W, n_writes)
    slots = jnp.array([[0, 11], [4, 4]])
    np.testing.assert_array_equal(read_overlay(overlay, TABLE, slots), TABLE[slots])


@pytest.mark.parametrize("n_writes", [N_WRITES, S])
def test_inactive_calls_change_nothing_and_clear_forgets(n_writes):
    overlay = add_rows(
        empty_overlay(S, W, n_writes), jnp.asarray(WRITES[0][0]), 2.0 + WRITES[0][1]
    )
    same = add_rows(
        overlay, jnp.asarray(WRITES[1][0]), WRITES[1][1], jnp.asarray(False)
    )
    same = scale_overlay(same, 0.5, jnp.asarray(False))
    same = clear_overlay(same, S, jnp.asarray(False))
    jax.tree.map(np.testing.assert_array_equal, same, overlay)
    jax.tree.map(
        np.testing.assert_array_equal,
        clear_overlay(overlay, S, jnp.asarray(True)),
        empty_overlay(S, W, n_writes),
    )


def test_inactive_calls_of_a_full_overlay_are_not_too_many():
    overlay, _ = written(1.0, N_WRITES, TABLE)
    same = add_rows(overlay, jnp.array([1]), jnp.ones((1, W)), jnp.asarray(False))
    jax.tree.map(np.testing.assert_array_equal, same, overlay)


@pytest.mark.parametrize("n_writes", [N_WRITES, S])
def test_gradients_equal_those_of_a_written_copy(n_writes):
    cotangent = RNG.normal(size=(len(WRITES), S, W)).astype(np.float32)

    def seen(table, added, overlaid):
        overlay, copy, out = empty_overlay(S, W, n_writes), table, []
        for (slots, _), rows in zip(WRITES, added, strict=True):
            slots = jnp.asarray(slots)
            overlay = scale_overlay(add_rows(overlay, slots, rows), 0.8)
            copy = copy.at[slots].add(rows) * 0.8
            read = read_overlay(overlay, table, jnp.arange(S)) if overlaid else copy
            out.append(read)
        return jnp.sum(jnp.stack(out) * cotangent)

    grads = jax.jit(jax.grad(seen, argnums=(0, 1)), static_argnums=2)
    added = [rows for _, rows in WRITES]
    got, want = (grads(TABLE, added, overlaid) for overlaid in (True, False))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), got, want)


def test_sequences_share_the_table_under_vmap():
    slots = jnp.array([[1, 2], [2, 9]])
    rows = jnp.asarray(RNG.normal(size=(2, 2, W)), jnp.float32)
    empty = empty_overlay(S, W, 3)

    @jax.jit
    def one(slots, rows):
        return read_overlay(add_rows(empty, slots, rows), TABLE, jnp.arange(S))

    both = jax.jit(jax.vmap(one))(slots, rows)
    for row in range(2):
        np.testing.assert_array_equal(both[row], one(slots[row], rows[row]))


def test_a_bfloat16_table_is_read_in_the_dtype_of_the_overlay():
    table = jnp.asarray(TABLE, jnp.bfloat16)
    read = read_overlay(empty_overlay(S, W, 4), table, jnp.arange(S))
    assert read.dtype == jnp.float32
    np.testing.assert_array_equal(read, table.astype(jnp.float32))
    assert np.isnan(read_overlay(empty_overlay(S, W, 4), table, jnp.array([S]))).all()


def test_errors_say_what_is_allowed():
    with pytest.raises(ConfigError, match="n_writes = -1"):
        empty_overlay(S, W, -1)
    with pytest.raises(ShapeError, match=r"rows_NW has shape \(2, 4\)"):
        add_rows(empty_overlay(S, W, 4), jnp.array([1, 2]), jnp.ones((2, 4)))
