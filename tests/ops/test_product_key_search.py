"""The product-key search against every slot scored: ties, -inf, NaN, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.errors import ConfigError, ShapeError
from memjax.ops.embedding_bag import embedding_bag
from memjax.ops.product_keys import (
    all_slot_scores,
    dot_scores,
    flat_search,
    product_key_search,
)
from memjax.ops.read_weights import read_weights
from tests.oracles import product_keys as oracle

SIGNED_NAN = np.copysign(np.float32(np.nan), np.float32(-1))


@functools.cache
def compiled(k: int):
    return jax.jit(functools.partial(product_key_search, k=k))


def exhaustive(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    rows = [
        oracle.best_slots(row, k) for row in scores.reshape(-1, 2, scores.shape[-1])
    ]
    shape = (*scores.shape[:-2], k)
    values, slots = (np.array(part).reshape(shape) for part in zip(*rows, strict=True))
    return values, slots


def every_way(scores: np.ndarray, k: int):
    """The selections under eager, jit and vmap over tokens; scores [T, H, 2, N]."""
    s = jnp.asarray(scores)
    yield product_key_search(s, k)
    yield compiled(k)(s)
    yield jax.vmap(compiled(k))(s)


@st.composite
def searches(draw) -> tuple[int, int, int]:
    n = draw(st.integers(1, 6))
    k = draw(st.one_of(st.integers(1, n * n), st.sampled_from([1, n, n * n])))
    return n, k, draw(st.integers(0, 2**31))


@given(searches())
def test_equals_an_exhaustive_search(drawn) -> None:
    """Integers: the same slots, lowest first. Floats: the same scores."""
    n, k, seed = drawn
    rng = np.random.default_rng(seed)
    shape = (4, 3, 2, n)
    integers = rng.integers(-2, 3, shape).astype(np.float32)
    integers[integers == 0] = rng.choice([0.0, -0.0], (integers == 0).sum())
    floats = rng.standard_normal(shape).astype(np.float32)
    floats *= np.float32(10) ** rng.integers(-3, 4, (4, 3, 2, 1)).astype(np.float32)
    for scores in (integers, floats):
        full, full_slots = exhaustive(scores, k)
        got = compiled(k)(scores)
        np.testing.assert_allclose(got.scores, full, rtol=1e-6)
        assert got.slots.dtype == jnp.int32
        first, second = np.asarray(got.slots) // n, np.asarray(got.slots) % n
        again = np.take_along_axis(scores[..., 0, :], first, -1)
        again = again + np.take_along_axis(scores[..., 1, :], second, -1)
        np.testing.assert_array_equal(got.scores, again)
        assert all(len(set(row)) == k for row in np.asarray(got.slots).reshape(-1, k))
        if scores is integers:
            np.testing.assert_array_equal(got.slots, full_slots)
    holes = np.where(rng.random(shape) < 0.4, -np.inf, integers).astype(np.float32)
    full, full_slots = exhaustive(holes, k)
    got = compiled(k)(holes)
    np.testing.assert_array_equal(got.scores, full)
    finite = np.isfinite(full)
    np.testing.assert_array_equal(np.asarray(got.slots)[finite], full_slots[finite])
    assert all(len(set(row)) == k for row in np.asarray(got.slots).reshape(-1, k))


@pytest.mark.parametrize("k", [1, 7, 16])
def test_flat_search_of_all_slot_scores_is_the_same_search(k) -> None:
    rng = np.random.default_rng(k)
    scores = rng.integers(-2, 3, (9, 2, 2, 4)).astype(np.float32)
    scores[0, 0, 1, 2] = np.nan
    scores[1, 0, 0, 2] = SIGNED_NAN
    scores[2, 1, 0, 0], scores[2, 1, 1, 0] = np.inf, -np.inf
    scores[3, 0, :, 1] = 3e38  # finite, but their sum is not
    both = product_key_search(jnp.asarray(scores), k)
    flat = flat_search(all_slot_scores(jnp.asarray(scores)), k)
    np.testing.assert_array_equal(both.scores, flat.scores)
    bad = np.isnan(np.asarray(both.scores))
    want = np.zeros(bad.shape, bool)
    want[0, 0] = want[1, 0] = want[2, 1] = want[3, 0] = True
    np.testing.assert_array_equal(bad, want)
    np.testing.assert_array_equal(
        np.where(bad, 0, both.slots), np.where(bad, 0, flat.slots)
    )
    assert (np.asarray(both.slots) >= 0).all() and (np.asarray(both.slots) < 16).all()


def test_p01_ties_lowest_slot_first_everywhere() -> None:
    tied = np.array([[1, 3], [2, 4]], np.float32)
    equal = np.full((2, 2), 0.5, np.float32)
    other = np.array([[0, 9], [9, 0]], np.float32)
    for place in range(4):
        batch = np.stack([other] * 4)[:, None]
        batch[place] = tied
        batch[(place + 1) % 4] = equal
        for scores, slots in every_way(batch, 2):
            np.testing.assert_array_equal(scores[place, 0], [7, 5])
            np.testing.assert_array_equal(slots[place, 0], [3, 1])
            np.testing.assert_array_equal(slots[(place + 1) % 4, 0], [0, 1])
            weights = read_weights(scores)[place, 0]
            np.testing.assert_allclose(weights, [0.8808, 0.1192], atol=1e-4)


@pytest.mark.parametrize("k", [3, 4])
def test_p02_k_above_the_sub_keys_of_a_half(k) -> None:
    batch = np.zeros((4, 1, 2, 2), np.float32)
    batch[2] = [[5, 1], [4, 3]]
    for scores, slots in every_way(batch, k):
        np.testing.assert_array_equal(scores[2, 0], [9, 8, 5, 4][:k])
        np.testing.assert_array_equal(slots[2, 0], [0, 1, 2, 3][:k])


def test_p02_k_out_of_bounds_is_an_error() -> None:
    scores = jnp.zeros((1, 2, 2))
    for k in (0, 5):
        with pytest.raises(ConfigError, match=f"k = {k} is not allowed: 1 to 4"):
            product_key_search(scores, k)
        with pytest.raises(ConfigError, match=f"k = {k} is not allowed: 1 to 4"):
            flat_search(all_slot_scores(scores), k)


def test_p03_a_choice_of_minus_infinity_weighs_nothing() -> None:
    batch = np.full((4, 1, 2, 2), -np.inf, np.float32)
    batch[0] = [[0, -np.inf], [1, -np.inf]]
    for scores, slots in every_way(batch, 2):
        weights = read_weights(scores)
        np.testing.assert_array_equal(weights[0, 0], [1, 0])
        assert slots[0, 0, 0] == 0
        np.testing.assert_array_equal(weights[1:, 0], 0)


@jax.jit
def read(scores, table):
    """Half scores to rows: [T, H, 2, N] -> [T, H, W]."""
    selected, slots = product_key_search(scores, 3)
    return embedding_bag(table, slots, read_weights(selected))


def test_p03_nothing_to_select_gives_output_and_gradients_of_zero() -> None:
    def loss(scores, table):
        out = read(scores, table)
        return jnp.sum(jnp.sin(out) + out), out

    table = jnp.arange(1.0, 9.0).reshape(4, 2)
    scores = jnp.full((1, 2, 2), -jnp.inf)
    gradients, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(scores, table)
    for array in (out, *gradients):
        np.testing.assert_array_equal(array, 0)


@pytest.mark.parametrize("nan", [np.float32(np.nan), SIGNED_NAN])
def test_p04_a_nan_stays_in_its_query(nan) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 2, 4)).astype(np.float32)
    q[0, 0, 1, 2] = nan
    keys = jnp.asarray(rng.standard_normal((1, 2, 4, 4)), jnp.float32)
    table = jnp.asarray(rng.standard_normal((16, 3)), jnp.float32)
    scores = dot_scores(q, keys)
    both = read(scores, table)
    assert np.isnan(both[0]).all()
    assert np.isfinite(both[1]).all()
    # Bit-equal from the scores on: a matrix product of one row may round otherwise.
    np.testing.assert_array_equal(both[1:], read(scores[1:], table))
    clean = dot_scores(np.nan_to_num(q, nan=1.0), keys)
    np.testing.assert_array_equal(both[1], read(clean, table)[1])


@pytest.mark.parametrize("nan", [np.float32(np.nan), SIGNED_NAN])
def test_p04_one_nan_score_makes_its_head_nan(nan) -> None:
    """[1, NaN, 2, 3] and k = 3: a top-k of the library gives NaN, 3, 2 or 3, 2, 1."""
    batch = np.ones((3, 2, 2, 4), np.float32)
    batch[1, 0, 0] = [1, nan, 2, 3]
    for scores, slots in every_way(batch, 3):
        assert np.isnan(scores[1, 0]).all()
        assert np.isfinite(np.delete(np.asarray(scores).reshape(6, 3), 2, 0)).all()
        np.testing.assert_array_equal(slots[1, 0], [0, 1, 2])
    flat = flat_search(jnp.asarray(batch[:, :, 0]), 3)
    assert np.isnan(flat.scores[1, 0]).all() and np.isfinite(flat.scores[1, 1]).all()
    np.testing.assert_array_equal(flat.slots[1, 0], [0, 1, 2])


def test_gradient_goes_to_the_selected_scores_only() -> None:
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((3, 2, 2, 5)).astype(np.float32)
    upstream = rng.standard_normal((3, 2, 4)).astype(np.float32)

    def loss(scores):
        selection = product_key_search(scores, 4)
        return jnp.sum(selection.scores * upstream), selection.slots

    gradient, slots = jax.jit(jax.grad(loss, has_aux=True))(scores)
    want = np.zeros_like(scores)
    for (t, h, k), up in np.ndenumerate(upstream):
        i, j = divmod(int(slots[t, h, k]), 5)
        want[t, h, 0, i] += up
        want[t, h, 1, j] += up
    np.testing.assert_allclose(gradient, want, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_scores_are_summed_and_ranked_in_float32(dtype) -> None:
    """In bfloat16 256 + 1 is 256, and slot 0 would tie with slot 1."""
    scores = jnp.array([[[256, 0], [0, 1]]], dtype)
    got = product_key_search(scores, 2)
    assert got.scores.dtype == jnp.float32
    np.testing.assert_array_equal(got.scores, [[257, 256]])
    np.testing.assert_array_equal(got.slots, [[1, 0]])
    assert all_slot_scores(scores).dtype == jnp.float32
    assert flat_search(scores[:, 0], 1).scores.dtype == jnp.float32


def test_float64_scores_stay_float64() -> None:
    with jax.enable_x64(True):
        scores = jnp.array([[[0.0, 1e-12], [1.0, 0.0]]], jnp.float64)
        got = product_key_search(scores, 3)
        assert got.scores.dtype == jnp.float64 and got.slots.dtype == jnp.int32
        np.testing.assert_array_equal(got.slots, [[2, 0, 3]])


def test_no_tokens_give_an_empty_selection() -> None:
    got = product_key_search(jnp.zeros((0, 2, 2, 3)), 4)
    assert got.scores.shape == got.slots.shape == (0, 2, 4)


def test_scores_without_two_halves_are_an_error() -> None:
    for search in (lambda s: product_key_search(s, 1), all_slot_scores):
        with pytest.raises(ShapeError, match=r"scores has shape \(4, 3, 5\)"):
            search(jnp.zeros((4, 3, 5)))


def test_each_selection_compiles_to_the_quick_top_k() -> None:
    """A TopK call for each half on the layout of a model, and no sort of float scores:
    in a larger program the pattern is easily lost, and a sort takes eight times as
    long."""
    q = jnp.zeros((2, 128, 4, 2, 32))
    keys = jnp.zeros((4, 2, 256, 32))
    search = jax.jit(lambda q, keys: product_key_search(dot_scores(q, keys), 16))
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        lines = search.lower(q, keys).compile().as_text().splitlines()
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    if jax.default_backend() == "cpu":
        assert sum('custom_call_target="TopK"' in line for line in lines) == 2
    assert not [line for line in lines if " sort(" in line and "f32[" in line]
