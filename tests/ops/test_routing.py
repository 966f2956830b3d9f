"""Routing: choices, weights, loads, the balance loss, and the way there and back.

What: equal to the oracle, literal ties, NaN and padding, gradients.
Why: a wrong weight or a load that counts padding shows in no loss curve.
When not: whole mixtures; tests/layers/test_experts.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.routing import (
    SCORES,
    balance_loss,
    choose_experts,
    combine_experts,
    dispatch,
    expert_load,
    given_experts,
    routing_scores,
)
from tests.oracles import routing as oracle

E, K = 5, 2
choose = jax.jit(choose_experts, static_argnums=1, static_argnames="normalize")


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(0).normal(size=(7, E)).astype(np.float32)


@pytest.mark.parametrize("kind", SCORES)
def test_scores_and_choices_equal_the_oracle(logits, kind):
    scores = routing_scores(jnp.asarray(logits), kind)
    want = np.stack([oracle.scores(row.astype(float), kind) for row in logits])
    np.testing.assert_allclose(scores, want, rtol=1e-5)
    for normalize in (True, False):
        got = choose(scores, K, normalize=normalize, scale=1.5)
        for n, row in enumerate(want):
            experts, weights = oracle.choose(row, K, normalize, 1.5)
            assert got.experts[n].tolist() == experts
            np.testing.assert_allclose(got.weights[n], weights, rtol=1e-5)
        given = given_experts(got.experts, E, scores, normalize=normalize, scale=1.5)
        np.testing.assert_allclose(given.weights, got.weights, rtol=1e-6)
    assert got.experts.dtype == jnp.int32


def test_very_negative_logits_have_a_score_and_a_gradient():
    def root(x):
        return routing_scores(x, "sqrt_softplus")

    logits = jnp.array([-150.0, -80.0, -41.0, -39.0, 0.0, 50.0])
    scores, grads = root(logits), jax.vmap(jax.grad(root))(logits)
    want = np.sqrt(np.logaddexp(0, np.asarray(logits, np.float64)))
    np.testing.assert_allclose(scores, want, rtol=1e-5)
    slope = 1 / (1 + np.exp(-np.asarray(logits, np.float64))) / (2 * want)
    np.testing.assert_allclose(grads, slope, rtol=1e-5)
    nothing = choose_experts(root(jnp.full((1, 3), -jnp.inf)), 2)
    np.testing.assert_array_equal(nothing.weights, 0)


def test_equal_scores_go_to_the_lowest_index_in_every_place():
    scores = jnp.array([[0.2, 0.3, 0.2, 0.3], [0.25] * 4, [0.0, 0.0, 1.0, 0.0]])
    want = [[1, 3, 0], [0, 1, 2], [2, 0, 1]]
    assert choose(scores, 3).experts.tolist() == want
    assert jax.vmap(lambda s: choose(s, 3).experts)(scores).tolist() == want
    assert choose_experts(scores[::-1], 3).experts.tolist() == want[::-1]


def test_a_nan_spoils_its_own_token_only(logits):
    scores = np.exp(logits)
    spoiled = scores.copy()
    spoiled[2, 1] = -np.nan
    got, want = choose(spoiled, K), choose(scores, K)
    assert np.isnan(got.weights[2]).all()
    others = np.arange(7) != 2
    np.testing.assert_array_equal(got.weights[others], want.weights[others])


def test_given_experts_are_checked_and_can_be_weighted_equally():
    scores = jnp.array([[0.1, 0.3, 0.6], [0.1, 0.3, 0.6]])
    experts = np.array([[2, 0], [1, 3]])
    got = given_experts(experts, 3, scores)
    np.testing.assert_allclose(got.weights[0], [6 / 7, 1 / 7], rtol=1e-6)
    assert np.isnan(got.weights[1]).all()
    uniform = given_experts(experts, 3, scale=4.0)
    np.testing.assert_array_equal(uniform.weights, [[2.0, 2.0], [2.0, np.nan]])
    assert ((uniform.experts >= 0) & (uniform.experts < 3)).all()


def test_padding_and_unknown_experts_are_no_load():
    experts = jnp.array([[0, 1], [1, 2], [1, 0], [2**31 - 1, -1]])
    assert expert_load(experts, 4).tolist() == [2, 3, 1, 0]
    mask = jnp.array([True, False, True, True])
    load = jax.jit(expert_load, static_argnums=1)(experts, 4, mask)
    assert load.tolist() == [2, 2, 0, 0] and load.dtype == jnp.int32


def test_balance_loss_equals_the_oracle_and_ignores_padding(logits):
    scores = np.exp(logits)
    experts = choose(scores, K).experts
    want = oracle.balance_loss(scores.astype(float), experts)
    got = balance_loss(jnp.asarray(scores), expert_load(experts, E))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    padded = np.concatenate([scores, np.full((3, E), np.nan, np.float32)])
    mask = np.arange(10) < 7
    all_experts = np.concatenate([experts, np.zeros((3, K), np.int32)])

    def loss(scores):
        return balance_loss(scores, expert_load(all_experts, E, mask), mask)

    found, grad = jax.value_and_grad(loss)(jnp.asarray(padded))
    np.testing.assert_allclose(found, want, rtol=1e-5)
    step = 1e-5 * np.random.default_rng(1).normal(size=scores.shape)
    ends = [
        oracle.balance_loss(scores.astype(float) + s * step, experts) for s in (1, -1)
    ]
    np.testing.assert_allclose(
        np.sum(grad[:7] * step), (ends[0] - ends[1]) / 2, rtol=1e-2
    )
    nobody = balance_loss(jnp.asarray(scores), jnp.zeros(E, int), np.zeros(7, bool))
    assert nobody == 0


def test_balance_loss_is_one_for_a_uniform_choice_and_e_for_a_collapse():
    uniform = balance_loss(jnp.full((8, 4), 0.25), jnp.full(4, 2))
    np.testing.assert_allclose(uniform, 1.0)
    one = jax.nn.one_hot(jnp.zeros(8, int), 4)
    np.testing.assert_allclose(balance_loss(one, jnp.array([8, 0, 0, 0])), 4.0)


def test_dispatch_sorts_by_expert_and_combine_undoes_it():
    x = jnp.arange(8.0).reshape(4, 2)
    experts = jnp.array([[2, 0], [0, 2], [1, 2], [0, 1]])
    sent = dispatch(x, experts, 4)
    assert sent.sizes_E.tolist() == [3, 2, 3, 0]
    tokens = [0, 1, 3, 2, 3, 0, 1, 2]
    np.testing.assert_array_equal(sent.x_PD, x[jnp.array(tokens)])
    weights = jnp.array([[1.0, 2.0], [0.5, 0.5], [3.0, 0.0], [0.0, 0.0]])

    def back(x, weights):
        sent = dispatch(x, experts, 4)
        return combine_experts(sent.x_PD, sent, weights)

    want = x * weights.sum(1, keepdims=True)
    np.testing.assert_allclose(back(x, weights), want)
    grads = jax.grad(lambda *a: jnp.sum(back(*a) * x), argnums=(0, 1))(x, weights)
    np.testing.assert_allclose(grads[0], want)
    np.testing.assert_allclose(grads[1], np.tile(np.sum(x * x, 1, keepdims=True), 2))


def test_errors_name_the_field():
    scores = jnp.ones((2, 3))
    for k in (0, 4):
        with pytest.raises(ConfigError, match=f"k = {k} is not allowed: 1 to the num"):
            choose_experts(scores, k)
    with pytest.raises(ConfigError, match="scores = 'relu'"):
        routing_scores(scores, "relu")
    with pytest.raises(ShapeError, match="scores"):
        given_experts(jnp.zeros((2, 1), int), 4, scores)
    with pytest.raises(ShapeError, match="mask"):
        expert_load(jnp.zeros((2, 1), int), 3, jnp.ones(3, bool))
    with pytest.raises(ShapeError, match="load"):
        balance_loss(scores, jnp.ones(4))
    with pytest.raises(ShapeError, match="x has shape"):
        dispatch(scores, jnp.zeros((3, 1), int), 3)
