"""Scores and search in one, against the two by themselves."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from memjax.errors import ConfigError, ShapeError
from memjax.ops.dot_search import best_by_counting, best_by_top_k, dot_search
from memjax.ops.embedding_bag import embedding_bag
from memjax.ops.lane_top_k import QUICK
from memjax.ops.product_keys import dot_scores, product_key_search
from memjax.ops.read_weights import read_weights

H, N, C, K = 2, 6, 3, 7


def case(*lead: int, seed: int = 0, whole: bool = False) -> tuple[jax.Array, jax.Array]:
    """Queries and keys; whole numbers, so that sums are exact and many are equal."""
    rng = np.random.default_rng(seed)
    shapes = (*lead, H, 2, C), (H, 2, N, C)
    if whole:
        q, keys = (rng.integers(-1, 2, shape) for shape in shapes)
    else:
        q, keys = (rng.standard_normal(shape) for shape in shapes)
    return jnp.asarray(q, jnp.float32), jnp.asarray(keys, jnp.float32)


def apart(q, keys, k, half_k=None):
    return product_key_search(dot_scores(q, keys), k, half_k)


@pytest.mark.parametrize("half_k", [None, 3])
def test_exact_sums_give_the_same_slots_lowest_first(half_k) -> None:
    q, keys = case(2, 9, whole=True)
    both = jax.jit(lambda q, keys: [f(q, keys, K, half_k) for f in (dot_search, apart)])
    got, want = both(q, keys)
    assert got.slots.dtype == jnp.int32
    np.testing.assert_array_equal(got.scores, want.scores)
    np.testing.assert_array_equal(got.slots, want.slots)
    np.testing.assert_array_equal(dot_search(q, keys, K, half_k).slots, want.slots)


@pytest.mark.parametrize("tokens", [1, 130, 600])
def test_both_forms_keep_the_same_sub_keys(tokens) -> None:
    """130 tokens are two blocks of lanes, 600 five, of which two are taken at a time.
    Among 70 whole numbers many are equal; NaN, -inf and +inf have places of their own.
    """
    rng = np.random.default_rng(tokens)
    q = rng.integers(-1, 2, (tokens, H, 2, C)).astype(np.float32)
    keys = rng.integers(-1, 2, (H, 2, 70, C)).astype(np.float32)
    for place, bad in enumerate([np.nan, -np.nan, np.inf, -np.inf]):
        q[(place * 7) % tokens, place % H, 0] = bad
    counted = jax.jit(best_by_counting, static_argnums=(2, 3))
    sorted_ = jax.jit(best_by_top_k, static_argnums=2)
    at_a_time = 2 * 128 * 2 * H * 70
    kept = counted(q, keys, 30, at_a_time), sorted_(q, keys, 30)
    for got, want in zip(*kept, strict=True):
        assert got.scores.shape == (tokens, H, 30)
        np.testing.assert_array_equal(got.scores, want.scores)
        np.testing.assert_array_equal(got.index, want.index)


@pytest.mark.parametrize("k, half_k", [(30, None), (9, 24), (40, None)])
def test_the_search_is_the_same_where_a_cpu_counts(k, half_k) -> None:
    rng = np.random.default_rng(k)
    q = jnp.asarray(rng.integers(-1, 2, (5, H, 2, C)), jnp.float32)
    keys = jnp.asarray(rng.integers(-1, 2, (H, 2, 32, C)), jnp.float32)
    both = jax.jit(lambda q, keys: [f(q, keys, k, half_k) for f in (dot_search, apart)])
    got, want = both(q, keys)
    np.testing.assert_array_equal(got.scores, want.scores)
    np.testing.assert_array_equal(got.slots, want.slots)


def test_gradients_are_those_of_autodiff() -> None:
    q, keys = case(4)
    upstream = jax.random.normal(jax.random.key(0), (4, H, K))

    @jax.jit
    def both(q, keys):
        def gradient(search):
            return jax.grad(
                lambda *args: jnp.sum(jnp.sin(search(*args, K).scores) * upstream),
                argnums=(0, 1),
            )(q, keys)

        return gradient(dot_search), gradient(apart)

    for got, want in zip(*both(q, keys), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert np.abs(want).max() > 0.1


def test_gradients_equal_finite_differences_in_float64() -> None:
    with jax.enable_x64(True):
        q, keys = (jnp.asarray(x, jnp.float64) for x in case(2, seed=3))
        assert dot_search(q, keys, K).scores.dtype == jnp.float64
        total = jax.jit(lambda q, keys: jnp.sum(jnp.sin(dot_search(q, keys, K).scores)))
        check_grads(total, (q, keys), order=1, modes=["rev"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_head_and_token(bad) -> None:
    q, keys = case(3, whole=True)
    q = np.array(q)
    q[1, 1, 0, 2] = bad
    keys = keys.at[..., 2].set(1.0)
    got = jax.jit(lambda q, keys: dot_search(q, keys, K))(q, keys)
    want = apart(np.nan_to_num(q, nan=1.0, posinf=1.0), keys, K)
    clean = np.ones((3, H), bool)
    clean[1, 1] = False
    assert np.isnan(got.scores[1, 1]).all()
    np.testing.assert_array_equal(got.slots[1, 1], range(K))
    for array, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(array[clean], expected[clean])


def test_bfloat16_is_multiplied_in_float32() -> None:
    q, keys = (x.astype(jnp.bfloat16) for x in case(5))
    wide = q.astype(jnp.float32), keys.astype(jnp.float32)
    got, pull = jax.vjp(lambda q, keys: dot_search(q, keys, K).scores, q, keys)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, dot_search(wide[0], wide[1], K).scores)
    assert {bar.dtype.name for bar in pull(jnp.ones_like(got))} == {"bfloat16"}


def test_axes_before_the_heads_are_free() -> None:
    q, keys = case(6)
    flat = dot_search(q, keys, K)
    shaped = dot_search(q.reshape(2, 3, H, 2, C), keys, K)
    for got, want in zip(shaped, flat, strict=True):
        np.testing.assert_array_equal(got.reshape(6, H, K), want)
    np.testing.assert_array_equal(dot_search(q[0], keys, K).slots, flat.slots[0])
    none = dot_search(q[:0], keys, K)
    assert none.scores.shape == none.slots.shape == (0, H, K)


def test_errors() -> None:
    q, keys = case(2)
    with pytest.raises(ShapeError, match=r"keys has shape .* \[H, 2, N, C\]"):
        dot_search(q[:, :, :1], keys[:, :1], K)
    with pytest.raises(ShapeError, match="queries has shape"):
        dot_search(q[..., :2], keys, K)
    with pytest.raises(ConfigError, match="k = 37 is not allowed: 1 to 36"):
        dot_search(q, keys, 37)
    with pytest.raises(ConfigError, match="half_k = 2"):
        dot_search(q, keys, K, 2)


@pytest.mark.parametrize("k", [16, 32])
def test_a_read_and_its_gradient_have_quick_selections_and_no_grid(k) -> None:
    """A TopK call for every head and half, or none where a CPU counts; no sort of
    scores, and no array of tokens by k * k: with the scores of all heads in one array
    XLA sorts some of them whole."""
    tokens, heads, n = 256, 2, 128
    q, keys = jnp.zeros((2, 128, heads, 2, 8)), jnp.zeros((heads, 2, n, 8))
    table = jnp.zeros((n * n, 4))

    def loss(q, keys, table):
        scores, slots = dot_search(q, keys, k)
        return jnp.sum(embedding_bag(table, slots, read_weights(scores)) ** 2)

    step = jax.jit(jax.grad(loss, (0, 1)))
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        text = step.lower(q, keys, table).compile().as_text() or ""
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    if jax.default_backend() == "cpu":
        calls = text.count('custom_call_target="TopK"')
        assert calls == (0 if k in QUICK else 2 * heads)
    assert not [line for line in text.splitlines() if re.search(r"f32.* sort\(", line)]
    sizes = [
        math.prod(int(size) for size in shape.split(","))
        for shape in re.findall(r"\[([0-9,]+)\]", text)
    ]
    assert tokens * n in sizes
    assert max(s for s in sizes if s != table.size) < tokens * heads * k * k
