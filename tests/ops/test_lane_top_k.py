"""The best of lists side by side against a stable sort, with ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.ops.lane_top_k import best_in_lanes, halvings, key_scores, rank_keys


@jax.jit
def there_and_back(scores: jax.Array) -> jax.Array:
    return key_scores(rank_keys(scores))


def best(scores_BNL: np.ndarray, k: int) -> tuple[jax.Array, jax.Array]:
    levels = jax.jit(lambda x: halvings(rank_keys(x), k))(scores_BNL)
    keys, index = jax.jit(best_in_lanes, static_argnums=1)(levels, k)
    return key_scores(keys), index


# Lists of one entry, of fewer than a step takes, odd ones, and ones that are halved 1,
# 2 and 6 times; k = n; up to 34 entries are ranked in two steps, 66 in four.
SIZES = [(1, 1), (6, 6), (7, 3), (17, 8), (18, 18), (37, 5), (131, 33), (600, 9)]


@pytest.mark.parametrize("n, k", SIZES)
def test_equals_a_stable_sort(n, k) -> None:
    rng = np.random.default_rng(n)
    for most in (0, 2, 1000):
        scores = rng.integers(-most, most + 1, (2, n, 3)).astype(np.float32)
        scores[rng.random(scores.shape) < 0.3] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        got, index = best(scores, k)
        assert got.dtype == jnp.float32 and index.dtype == jnp.int32
        np.testing.assert_array_equal(index, order)
        np.testing.assert_array_equal(got, np.take_along_axis(scores, order, 1))


def test_halvings_end_before_there_are_fewer_entries_than_asked_for() -> None:
    for n, k in SIZES:
        shapes = jax.eval_shape(
            lambda x, k=k: halvings(x, k), jax.ShapeDtypeStruct((2, n, 3), jnp.int32)
        )
        lengths = [level.shape[1] for level in shapes]
        assert lengths[0] == n and lengths[-1] >= k
        for longer, shorter in zip(lengths[:-1], lengths[1:], strict=True):
            assert shorter == -(-longer // 2)


def test_keys_are_ordered_as_scores_and_come_back_as_them() -> None:
    large, small = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    scores = np.array(
        [-np.inf, -large, -1.5, -small, 0.0, small, 1.5, large, np.inf], np.float32
    )
    keys = np.asarray(jax.jit(rank_keys)(scores)).astype(np.int64)
    assert np.all(np.diff(keys) > 0) and keys.min() > np.iinfo(np.int32).min + 1
    np.testing.assert_array_equal(there_and_back(scores), scores)


@pytest.mark.parametrize("score, stands_for", [(-0.0, 0.0), (np.nan, np.inf)])
def test_minus_zero_is_zero_and_nan_of_either_sign_the_largest(score, stands_for):
    for sign in (1, -1):
        got = np.asarray(there_and_back(jnp.full(1, np.copysign(score, sign))))
        assert got == stands_for and not np.signbit(got)
