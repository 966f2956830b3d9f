"""Single rows and weighted sums of rows, against a float64 oracle."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import DataError, ShapeError
from memjax.ops.embedding_bag import (
    embedding_bag,
    gather_rows,
    row_ids,
    weighted_sums,
)
from memjax.ops.rows import load, store

N_ROWS, WIDTH = 7, 3


def reads(n_tokens: int, n_read: int, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """table, ids, weights, cotangent of a bag."""
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((N_ROWS, WIDTH)).astype(np.float32)
    ids = rng.integers(0, N_ROWS, (n_tokens, n_read)).astype(np.int32)
    weights = rng.standard_normal((n_tokens, n_read)).astype(np.float32)
    cotangent = rng.standard_normal((n_tokens, WIDTH)).astype(np.float32)
    return table, ids, weights, cotangent


def oracle(table: Any, ids: Any, weights: Any) -> np.ndarray:
    """A slow loop in float64."""
    out = np.zeros((len(ids), table.shape[1]))
    for n in range(len(ids)):
        for k in range(ids.shape[1]):
            out[n] += np.float64(weights[n, k]) * np.float64(table[ids[n, k]])
    return out


@jax.jit
def value_and_gradients(
    table: Any, ids: Any, weights: Any, cotangent: Any
) -> tuple[Any, Any]:
    value, pull = jax.vjp(lambda t, w: embedding_bag(t, ids, w), table, weights)
    return value, pull(cotangent)


# 70 reads are two groups of 32 and six.
@pytest.mark.parametrize("n_tokens, n_read", [(5, 4), (3, 70), (5, 0), (0, 4)])
def test_bag_and_gradients_equal_float64_loops(n_tokens: int, n_read: int) -> None:
    table, ids, weights, cotangent = reads(n_tokens, n_read)
    value, (table_bar, weights_bar) = value_and_gradients(
        table, ids, weights, cotangent
    )
    np.testing.assert_allclose(value, oracle(table, ids, weights), atol=2e-5)
    want_table = np.zeros((N_ROWS, WIDTH))
    want_weights = np.zeros((n_tokens, n_read))
    for n in range(n_tokens):
        for k in range(n_read):
            want_table[ids[n, k]] += np.float64(weights[n, k]) * cotangent[n]
            want_weights[n, k] = np.float64(table[ids[n, k]]) @ cotangent[n]
    np.testing.assert_allclose(table_bar, want_table, atol=2e-5)
    np.testing.assert_allclose(weights_bar, want_weights, atol=2e-5)


def test_gradients_equal_finite_differences() -> None:
    table, ids, weights, cotangent = reads(4, 3, seed=1)
    _, gradients = value_and_gradients(table, ids, weights, cotangent)

    def loss(table: Any, weights: Any) -> float:
        return float(np.sum(oracle(table, ids, weights) * cotangent))

    for which, gradient in enumerate(gradients):
        args = [np.float64(table), np.float64(weights)]
        want = np.zeros(args[which].shape)
        for at in np.ndindex(want.shape):
            for sign in (1, -1):
                moved = [arg.copy() for arg in args]
                moved[which][at] += sign * 1e-4
                want[at] += sign * loss(*moved) / 2e-4
        np.testing.assert_allclose(gradient, want, atol=1e-5)


def test_axes_before_the_reads_are_free() -> None:
    table, ids, weights, _ = reads(6, 4)
    flat = embedding_bag(jnp.asarray(table), ids, jnp.asarray(weights))
    shaped = embedding_bag(
        jnp.asarray(table), ids.reshape(2, 3, 4), jnp.asarray(weights.reshape(2, 3, 4))
    )
    np.testing.assert_array_equal(shaped.reshape(6, WIDTH), flat)
    one = embedding_bag(jnp.asarray(table), ids[0], jnp.asarray(weights[0]))
    np.testing.assert_array_equal(one, flat[0])
    with pytest.raises(ShapeError, match=r"weights has shape \(6, 3\)"):
        embedding_bag(jnp.asarray(table), ids, jnp.asarray(weights[:, :3]))
    with pytest.raises(ShapeError, match="ids has shape"):
        embedding_bag(jnp.asarray(table), 1, jnp.asarray(1.0))


def test_bfloat16_stored_as_integers_gives_the_same_numbers() -> None:
    table, ids, weights, cotangent = reads(5, 4, seed=2)
    narrow = jnp.asarray(table, jnp.bfloat16)
    stored = store(narrow)
    assert stored.dtype == jnp.uint16
    rows = gather_rows(stored, ids)
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows, np.asarray(narrow)[ids])
    value, pull = jax.vjp(lambda w: embedding_bag(stored, ids, w), jnp.asarray(weights))
    assert value.dtype == jnp.float32
    wide = np.asarray(load(stored), np.float32)
    np.testing.assert_allclose(value, oracle(wide, ids, weights), atol=2e-5)
    (weights_bar,) = pull(jnp.asarray(cotangent))
    want = np.einsum("nkw,nw->nk", np.float64(wide[ids]), cotangent)
    np.testing.assert_allclose(weights_bar, want, atol=2e-5)


@pytest.mark.parametrize("form", ["gather", "bag"])
def test_p08_a_row_read_often_sums_in_float32(form: str) -> None:
    """A bfloat16 table of which 1000 tokens all read row 0, with gradient 1 each: the
    row's gradient is 1000. Sums in bfloat16 stop at 256."""
    ids = jnp.zeros((1000, 1), jnp.int32)

    def loss(table: jax.Array) -> jax.Array:
        if form == "gather":
            return gather_rows(table, ids).astype(jnp.float32).sum()
        return embedding_bag(table, ids, jnp.ones((1000, 1))).sum()

    gradient = jax.jit(jax.grad(loss))(jnp.zeros((2, 4), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient, [[1000.0] * 4, [0.0] * 4])


def test_p06_ids_outside_the_table() -> None:
    """A table of 4 rows; ids 10, -1 and -9. On the host they are an error that names
    the id and 4; inside jit they are NaN. -1 is never the last row."""
    table = jnp.arange(8.0).reshape(4, 2)
    for wrong in (10, -1, -9):
        with pytest.raises(DataError, match=rf"id {wrong} .* < 4"):
            gather_rows(table, np.array([0, wrong]))
        with pytest.raises(DataError, match=rf"id {wrong} .* < 4"):
            embedding_bag(table, [[0, wrong]], jnp.ones((1, 2)))
    ids = jnp.array([10, -1, -9, 3])
    rows = jax.jit(gather_rows)(table, ids)
    np.testing.assert_array_equal(rows, [[np.nan] * 2] * 3 + [[6.0, 7.0]])
    # Not even with weight 0.
    bags = jax.jit(embedding_bag)(
        table, ids[:, None], jnp.array([[1.0], [0], [1], [1]])
    )
    np.testing.assert_array_equal(bags, [[np.nan] * 2] * 3 + [[6.0, 7.0]])
    narrow = gather_rows(store(table.astype(jnp.bfloat16)), ids)
    np.testing.assert_array_equal(np.isnan(narrow)[:, 0], [True, True, True, False])
    # Nobody learns from what is not there.
    gradient = jax.grad(lambda t: gather_rows(t, ids).sum())(table)
    np.testing.assert_array_equal(gradient, [[0.0, 0], [0, 0], [0, 0], [1, 1]])


@pytest.mark.parametrize("at", [1, 18])
def test_one_read_outside_is_seen_by_its_token_alone(at: int) -> None:
    """Among 19 reads, in a group of the loop or after it. Row 0, which stands in for
    it, is NaN: it reaches nobody who did not read it."""
    table = jnp.arange(8.0).reshape(4, 2).at[0].set(jnp.nan)
    ids = jnp.ones((2, 19), jnp.int32).at[0, at].set(4)
    weights = jnp.ones(ids.shape)
    bags = jax.jit(embedding_bag)(table, ids, weights)
    np.testing.assert_array_equal(bags, [[np.nan] * 2, [38.0, 57.0]])
    left_out = weighted_sums(table, ids, weights, nan_outside=False)
    np.testing.assert_array_equal(left_out, [[36.0, 54.0], [38.0, 57.0]])


def test_p07_integers_that_do_not_fit_32_bits() -> None:
    """A 64-bit id array [2**32, 2**31, 2**40 + 5] would reach the device as
    [0, -2147483648, 5]; it is an error."""
    ids = np.array([2**32, 2**31, 2**40 + 5], np.int64)
    with pytest.raises(DataError, match=rf"{2**32} .*2 more"):
        row_ids(ids, 1000)
    with pytest.raises(DataError, match=f"{2**31} "):
        gather_rows(jnp.ones((4, 2)), ids[1:])
    assert row_ids(ids % 7, 7).dtype == jnp.int32
    with jax.enable_x64(True):
        wide = jnp.asarray(ids)
        assert wide.dtype == jnp.int64
        np.testing.assert_array_equal(row_ids(wide, 1000), [1000] * 3)


def test_ids_are_integers() -> None:
    for ids in ([0.0], np.array([True]), jnp.array([1.0])):
        with pytest.raises(DataError, match="dtype"):
            row_ids(ids, 4)


def shapes_in(text: str) -> set[tuple[int, ...]]:
    return {
        tuple(int(n) for n in found.split(","))
        for found in re.findall(r"\[([0-9]+(?:,[0-9]+)+)\]", text)
    }


def test_no_array_of_tokens_by_reads_by_width() -> None:
    """Neither in the program as written nor as compiled, forward or backward."""
    n_tokens, n_read, width = 4096, 40, 8  # a block of row sums has 2^20 entries
    ids = jnp.zeros((n_tokens, n_read), jnp.int32)

    def loss(table: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(embedding_bag(table, ids, weights, "xla") ** 2)

    args = (jnp.ones((11, width)), jnp.ones((n_tokens, n_read)))
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*args)
    texts = [str(traced.jaxpr), traced.lower().compile().as_text()]
    for text in texts:
        shapes = shapes_in(text)
        assert (n_tokens, width) in shapes
        assert max(np.prod(shape) for shape in shapes) < n_tokens * n_read * width


def test_a_gradient_that_stops_at_the_table_is_not_formed() -> None:
    ids, weights, table = (
        jnp.zeros((4, 2), jnp.int32),
        jnp.ones((4, 2)),
        jnp.ones((999, 3)),
    )

    def made(table_of: Any) -> list[str]:
        """Lines of the gradient's program that make something like the table."""

        def loss(weights: jax.Array, table: jax.Array) -> jax.Array:
            return embedding_bag(table_of(table), ids, weights, "xla").sum()

        gradient = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(weights, table)
        lines = str(gradient).splitlines()
        return [line for line in lines if re.search(r":f32\[999,3\] = ", line)]

    stopped = made(jax.lax.stop_gradient)
    assert not [line for line in stopped if "scatter" in line]
    assert [line for line in made(lambda table: table) if "scatter" in line]


def test_a_dense_step_does_not_copy_the_table() -> None:
    """The backward pass reads the table for the weights, and the step writes it: the
    compiler copies the table unless the reads come before."""
    n_rows, width = 999, 8
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((n_rows, width), jnp.float32),
            ((16, 40), jnp.float32),
            ((16, 40), jnp.int32),
        )
    ]

    def loss(table: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(embedding_bag(table, ids, weights, "xla") ** 2)

    def step(table: jax.Array, weights: jax.Array, ids: jax.Array) -> Any:
        bars = jax.grad(loss, (0, 1))(table, weights, ids)
        return table - 0.1 * bars[0], weights - 0.1 * bars[1]

    jax.config.update("jax_disable_most_optimizations", False)
    try:
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes)
        text = lowered.compile().as_text() or ""
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    assert f"f32[{n_rows},{width}]" in text
    assert not re.findall(rf"f32\[{n_rows},{width}\]\S* copy\(", text)
