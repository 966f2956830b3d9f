"""kNN probabilities, their mixture with a model, and the exact search.

What: equal to the oracle, the laws of a distribution, infinities and NaN by literal
    inputs, blocks of any size, gradients.
Why: a mixture of logarithms is NaN at its edges unless somebody looked.
When not: the recorded numbers of the release; tests/golden.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.knn import (
    Neighbours,
    interpolate,
    knn_log_probs,
    knn_probs,
    knn_weights,
    nearer,
    nearest,
    no_neighbours,
    squared_distances,
    target_log_probs,
)
from tests.oracles import knn as oracle

V = 5
INF = np.inf
weights_of = jax.jit(knn_weights, static_argnums=1)
log_probs = jax.jit(knn_log_probs, static_argnums=(2, 3))
of_targets = jax.jit(target_log_probs, static_argnums=3)
search = jax.jit(nearest, static_argnums=2, static_argnames="block")


@pytest.fixture(scope="module")
def neighbours():
    rng = np.random.default_rng(0)
    distances = rng.uniform(0, 4, (6, 4)).astype(np.float32)
    values = rng.integers(0, V, (6, 4)).astype(np.int32)
    lm = np.log(rng.dirichlet(np.ones(V), 6)).astype(np.float32)
    return distances, values, lm


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_equal_to_the_oracle_and_jit_to_no_jit(neighbours, temperature):
    distances, values, lm = neighbours
    weights = knn_weights(distances, temperature)
    np.testing.assert_allclose(
        weights, oracle.weights(distances, temperature), rtol=1e-5
    )
    want = oracle.probs(distances, values, V, temperature)
    np.testing.assert_allclose(
        knn_probs(distances, values, V, temperature), want, rtol=1e-5
    )
    found = log_probs(distances, values, V, temperature)
    plain = knn_log_probs(distances, values, V, temperature)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)
    for lam in (0.25, 0.9):
        mixed = jnp.exp(interpolate(lm, found, lam))
        np.testing.assert_allclose(mixed, oracle.mixture(lm, want, lam), rtol=1e-5)
        np.testing.assert_allclose(mixed.sum(-1), 1, rtol=1e-5)


def test_the_target_alone_is_the_entry_of_the_vector(neighbours):
    distances, values, _ = neighbours
    whole = log_probs(distances, values, V, 2.0)
    absent = 0
    for target in range(V):
        targets = np.full(len(values), target)
        got = of_targets(distances, values, targets, 2.0)
        np.testing.assert_allclose(got, whole[:, target], rtol=1e-5, atol=1e-6)
        absent += int(np.sum(~np.isfinite(got)))
    assert absent > 0
    stacked = of_targets(
        distances.reshape(2, 3, 4), values.reshape(2, 3, 4), np.zeros((2, 3)), 2.0
    )
    np.testing.assert_allclose(stacked.reshape(-1), whole[:, 0], rtol=1e-5, atol=1e-6)
    more = log_probs(distances.reshape(2, 3, 4), values.reshape(2, 3, 4), V, 2.0)
    np.testing.assert_allclose(more.reshape(6, V), whole, rtol=1e-5, atol=1e-6)


def test_neighbours_may_come_in_any_order_and_be_missing(neighbours):
    distances, values, _ = neighbours
    want = log_probs(distances, values, V, 1.0)
    order = [2, 0, 3, 1]
    got = log_probs(distances[:, order], values[:, order], V, 1.0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    # Missing ones may hold any value, one outside the vocabulary among them.
    far = np.concatenate([np.full((6, 1), INF, np.float32), distances], axis=1)
    held = np.concatenate([np.full((6, 1), -1, np.int32), values], axis=1)
    np.testing.assert_allclose(log_probs(far, held, V, 1.0), want, rtol=1e-5, atol=1e-6)
    assert not np.any(weights_of(far, 1.0)[:, 0])


def test_temperature_has_the_right_limits(neighbours):
    distances, _, _ = neighbours
    np.testing.assert_allclose(weights_of(distances, 1e6), 0.25, atol=1e-5)
    nearest_first = np.argmin(distances, axis=-1)
    # Far beyond what exp can hold, and still one neighbour takes all.
    sharp = weights_of(distances * 1e30, 1e-8)
    np.testing.assert_array_equal(sharp, np.eye(4)[nearest_first])


def test_p03_all_missing_gives_zero_weights_and_gradients_and_no_nan():
    distances = jnp.full((1, 3), INF)
    values = jnp.array([[0, 1, 1]])

    def total(distances):
        return jnp.sum(knn_weights(distances)) + jnp.sum(
            knn_probs(distances, values, V)
        )

    found, grad = jax.jit(jax.value_and_grad(total))(distances)
    assert found == 0 and not np.any(grad)
    np.testing.assert_array_equal(log_probs(distances, values, V, 1.0), -INF)
    some = jnp.array([[1.0, INF, INF]])
    one = jax.jit(jax.value_and_grad(lambda d: knn_weights(d)[0, 0]))
    found, grad = one(some)
    assert found == 1
    assert not np.any(grad)
    assert weights_of(jnp.zeros((2, 0)), 1.0).shape == (2, 0)
    np.testing.assert_array_equal(
        log_probs(jnp.zeros((1, 0)), jnp.zeros((1, 0), int), 2, 1.0), [[-INF, -INF]]
    )


def test_p04_nan_stays_nan_in_its_row_alone():
    distances = jnp.array([[1.0, jnp.nan], [1.0, 2.0]])
    values = jnp.array([[0, 1], [0, 1]])
    found = log_probs(distances, values, 3, 1.0)
    clean = log_probs(distances.at[0, 1].set(5.0), values, 3, 1.0)
    assert np.isnan(found[0, :2]).all()
    np.testing.assert_array_equal(found[1], clean[1])
    target = of_targets(distances, values, jnp.array([2, 0]), 1.0)
    assert np.isnan(target[0]) and np.isfinite(target[1])


def test_p06_a_value_outside_the_vocabulary_shows():
    distances = jnp.array([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    values = jnp.array([[0, 3], [0, -1], [0, 2]])
    found = log_probs(distances, values, 3, 1.0)
    assert np.isnan(found[:2]).all() and not np.isnan(found[2]).any()


def test_lambda_zero_and_one_are_exact_also_at_infinities(neighbours):
    distances, values, lm = neighbours
    found = log_probs(distances, values, V, 1.0)
    assert np.isinf(found).any()
    np.testing.assert_array_equal(interpolate(lm, found, 0.0), lm)
    np.testing.assert_array_equal(interpolate(lm, found, 1.0), found)
    # A token that neither gives: no NaN, no gradient.
    both = jnp.array([-INF, -0.5, -INF, -1.0])
    other = jnp.array([-INF, -INF, -2.0, -0.25])
    mass = jax.jit(
        jax.grad(lambda a, b, lam: jnp.sum(jnp.exp(interpolate(a, b, lam))), (0, 1))
    )
    for lam in (0.0, 0.25, 1.0):
        grads = mass(both, other, lam)
        for grad, logs, share in zip(grads, (both, other), (1 - lam, lam), strict=True):
            np.testing.assert_allclose(grad, share * np.exp(logs), rtol=1e-6)
    many = interpolate(both, other, jnp.array([[0.0], [0.25], [1.0]]))
    np.testing.assert_array_equal(many[1], interpolate(both, other, 0.25))


def test_a_small_probability_does_not_underflow():
    """exp(-200) is 0 in float32; its logarithm is known all the same."""
    distances = jnp.array([[0.0, 200.0, 200.0]])
    found = log_probs(distances, jnp.array([[0, 1, 1]]), 2, 1.0)
    np.testing.assert_allclose(found[0, 1], -200 + np.log(2), rtol=1e-6)


def test_gradients_are_finite_differences(neighbours):
    distances, values, lm = neighbours
    targets = values[:, 0]

    def ours(distances, lm):
        mixed = interpolate(lm, knn_log_probs(distances, values, V, 2.0), 0.6)
        return -jnp.mean(mixed[jnp.arange(6), targets])

    def slow(distances, lm):
        mixed = oracle.mixture(lm, oracle.probs(distances, values, V, 2.0), 0.6)
        return -np.mean(np.log(mixed[np.arange(6), targets]))

    grads = jax.jit(jax.grad(ours, (0, 1)))(distances, lm)
    inputs = [distances.astype(np.float64), lm.astype(np.float64)]
    for which, grad in enumerate(grads):
        for place in [(0, 0), (2, 1), (5, 3)]:
            sides = []
            for step in (1e-5, -1e-5):
                moved = [x.copy() for x in inputs]
                moved[which][place] += step
                sides.append(slow(*moved))
            slope = (sides[0] - sides[1]) / 2e-5
            np.testing.assert_allclose(grad[place], slope, rtol=1e-3, atol=1e-6)


def test_low_precision_comes_out_wide(neighbours):
    distances, values, lm = neighbours
    low = jnp.asarray(distances, jnp.bfloat16)
    found = log_probs(low, values, V, 1.0)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(
        found, log_probs(low.astype(jnp.float32), values, V, 1.0)
    )
    assert interpolate(jnp.asarray(lm, jnp.bfloat16), found, 0.5).dtype == jnp.float32


@pytest.mark.parametrize("block", [1, 3, 7, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_search_equals_sorting_all_pairs_whatever_the_block(block, dtype):
    """Small integers: distances are exact and full of ties."""
    rng = np.random.default_rng(1)
    queries = rng.integers(-1, 2, (5, 3)).astype(np.float32)
    keys = jnp.asarray(rng.integers(-1, 2, (20, 3)), dtype)
    want, entries = oracle.nearest(queries, np.asarray(keys, np.float32), 6)
    assert len(np.unique(want)) < want.size / 2
    found = search(queries, keys, 6, block=block)
    assert found.distances.dtype == jnp.float32
    np.testing.assert_array_equal(found.distances, want)
    np.testing.assert_array_equal(found.entries, entries)


def test_search_is_accurate_where_a_product_form_cancels():
    """Keys far from 0 and close to each other: the order is still right."""
    rng = np.random.default_rng(2)
    keys = (1000 + rng.normal(size=(30, 8))).astype(np.float32)
    queries = (1000 + rng.normal(size=(4, 8))).astype(np.float32)
    found = search(queries, keys, 5, block=7)
    want, entries = oracle.nearest(queries, keys, 5)
    np.testing.assert_array_equal(found.entries, entries)
    np.testing.assert_allclose(found.distances, want, rtol=1e-6)


def test_fewer_keys_than_neighbours_leave_some_missing():
    queries, keys = jnp.zeros((2, 2)), jnp.ones((3, 2))
    found = nearest(queries, keys, 5, block=2)
    np.testing.assert_array_equal(found.distances[0], [2, 2, 2, INF, INF])
    np.testing.assert_array_equal(found.entries[0], [0, 1, 2, -1, -1])
    np.testing.assert_array_equal(
        nearest(queries, keys[:0], 2).entries, -np.ones((2, 2))
    )


def test_p04_a_nan_query_spoils_its_own_row_and_a_nan_key_shows():
    queries = jnp.array([[0.0, -jnp.nan], [0.0, 0.0]])
    keys = jnp.array([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]])
    found = nearest(queries, keys, 2, block=2)
    assert np.isnan(found.distances[0]).all()
    alone = nearest(queries[1:], keys, 2, block=2)
    np.testing.assert_array_equal(found.distances[1:], alone.distances)
    np.testing.assert_array_equal(found.entries[1:], alone.entries)
    spoilt = nearest(queries[1:], keys.at[0, 0].set(jnp.nan), 2, block=1)
    assert np.isnan(weights_of(spoilt.distances, 1.0)).all()


def test_blocks_by_hand_are_the_whole_search():
    rng = np.random.default_rng(3)
    queries, keys = rng.normal(size=(3, 2)), rng.normal(size=(7, 2))
    queries, keys = jnp.asarray(queries), jnp.asarray(keys)
    found = no_neighbours(queries, 4)
    for first, stop in ((0, 4), (4, 7)):
        # Padding in a block is left out.
        block = jnp.zeros((5, 2)).at[: stop - first].set(keys[first:stop])
        entries = jnp.full(5, -1).at[: stop - first].set(jnp.arange(first, stop))
        found = nearer(found, queries, block, entries)
    assert isinstance(found, Neighbours)
    whole = nearest(queries, keys, 4)
    np.testing.assert_array_equal(found.entries, whole.entries)


def test_never_all_pairs_at_once():
    """The compiled search of 4096 keys needs much less than N x S distances."""
    shapes = (jax.ShapeDtypeStruct((64, 4), jnp.float32),) + (
        jax.ShapeDtypeStruct((4096, 4), jnp.float32),
    )
    compiled = jax.jit(functools.partial(nearest, k=4, block=64)).lower(*shapes)
    memory = compiled.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 64 * 4096 * 4 / 4


def test_errors_name_what_is_wrong():
    one = jnp.ones((1, 1))
    for bad in (0.0, -1.0, INF, np.nan):
        with pytest.raises(ConfigError, match="temperature = .* a finite number > 0"):
            knn_weights(one, bad)
    for bad in (-0.1, 1.1, np.nan):
        with pytest.raises(ConfigError, match="lam = .* 0 <= lam <= 1"):
            interpolate(one, one, bad)
    with pytest.raises(ConfigError, match="k = 0"):
        nearest(one, one, 0)
    with pytest.raises(ConfigError, match="block = 0"):
        nearest(one, one, 1, block=0)
    with pytest.raises(ShapeError, match="keys"):
        nearest(one, jnp.ones((3, 2)), 1)
    with pytest.raises(ShapeError, match="values"):
        knn_log_probs(one, jnp.ones((1, 2), int), 3)
    with pytest.raises(ShapeError, match="targets"):
        target_log_probs(one, jnp.ones((1, 1), int), jnp.ones((2,), int))
    assert squared_distances(one, one).shape == (1,)
