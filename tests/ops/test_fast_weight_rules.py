"""The two write rules: where the published one diverges, and what ours promises."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.ops.fast_weight_chunk import FastWeightOptions, FastWeights
from memjax.ops.fast_weights import fast_weight_shared

N, C, W, K = 12, 4, 3, 8
RNG = np.random.default_rng(6)
KEYS = jnp.asarray(RNG.normal(size=(1, 2, N, C)), jnp.float32)
VALUES = jnp.asarray(RNG.normal(size=(N * N, W)), jnp.float32)
MEMORY = FastWeights(KEYS, VALUES)
# Writes do not move the keys here, and a token's own value is its target.
OPTIONS = FastWeightOptions(k=K, chunk=1, lookahead=0, address_weight=0)
TARGET = jnp.asarray(RNG.normal(size=(1, 1, W)), jnp.float32)

run = jax.jit(fast_weight_shared, static_argnames="options")


def query(near: float):
    """A query [1, 1, 2 * C] at this distance from a sub-key of each half."""
    way = np.full(C, near / C**0.5)
    return jnp.asarray(np.concatenate([KEYS[0, 0, 3] + way, KEYS[0, 1, 5] + way]))[
        None, None
    ].astype(jnp.float32)


def errors(rule: str, q, n_writes: int = 6):
    """Length of the error of one token that is written again and again; sum w^2."""
    memory, lengths = MEMORY, []
    for _ in range(n_writes):
        out, memory, trace = run(memory, q, TARGET, None, replace(OPTIONS, rule=rule))
        lengths.append(float(jnp.linalg.norm(out - TARGET)))
    return np.array(lengths), float(jnp.sum(trace.reads.weights**2))


def test_the_reference_rule_diverges_where_weights_are_peaked():
    lengths, square = errors("reference", query(near=0.02))
    factor = abs(1 - K * square)
    assert square > 0.7 and factor > 4
    np.testing.assert_allclose(lengths[1:] / lengths[:-1], factor, rtol=1e-3)
    assert lengths[-1] > 1000 * lengths[0]


def test_the_reference_rule_overwrites_where_weights_are_equal():
    """All sub-keys of a half alike: equal scores, weights 1 / K."""
    same = FastWeights(jnp.zeros_like(KEYS), VALUES)
    for rule in ("reference", "contractive"):
        options = replace(OPTIONS, rule=rule)
        _, after, _ = run(same, query(0.5), TARGET, None, options)
        out, _, trace = run(after, query(0.5), TARGET, None, options)
        np.testing.assert_allclose(trace.reads.weights, 1 / K, rtol=1e-6)
        np.testing.assert_allclose(out, TARGET, atol=1e-5)


@pytest.mark.parametrize("near", [0.0, 0.02, 0.5, 3.0])
def test_a_contractive_write_stores_a_lone_token_exactly(near):
    lengths, _ = errors("contractive", query(near))
    assert lengths[0] > 0.1
    np.testing.assert_allclose(lengths[1:], 0, atol=1e-5)


def test_a_gate_shortens_a_contractive_step():
    options = replace(OPTIONS, rule="contractive")
    gate = jnp.full((1, 1), 0.25)
    before, after, _ = run(MEMORY, query(0.02), TARGET, gate, options)
    out, _, _ = run(after, query(0.02), TARGET, gate, options)
    np.testing.assert_allclose(out - TARGET, 0.75 * (before - TARGET), atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_no_contractive_chunk_makes_its_own_errors_grow(seed):
    """In the sum over tokens of gate * error^2 / sum w^2, whatever slots they share."""
    rng = np.random.default_rng(seed)
    options = replace(OPTIONS, rule="contractive", chunk=5, k=4)
    # Queries near one to three sub-keys: slots are shared and weights are peaked.
    centre = rng.integers(0, 1 + seed % 3, size=(5, 2))
    q = np.stack([KEYS[0, half, centre[:, half]] for half in (0, 1)], axis=1)
    q = q + rng.choice([0.01, 0.3]) * rng.normal(size=q.shape)
    q = jnp.asarray(q.reshape(1, 5, -1), jnp.float32)
    v = jnp.asarray(rng.normal(size=(1, 5, W)), jnp.float32)
    gate = jnp.asarray(rng.uniform(0.3, 1, (1, 5)), jnp.float32)

    def total(memory):
        out, after, trace = run(memory, q, v, gate, options)
        square = jnp.sum(trace.reads.weights**2, axis=(-2, -1))
        error = jnp.sum((out - v) ** 2, axis=-1)
        return float(jnp.sum(gate * error / square)), after

    memory, sizes = MEMORY, []
    for _ in range(8):
        size, memory = total(memory)
        sizes.append(size)
    assert np.all(np.diff(sizes) <= 1e-5 * sizes[0])


def test_weights_that_are_all_zero_write_nothing():
    """ReLU of negative scores, the only way to have them."""
    options = replace(OPTIONS, rule="contractive", activation="relu", score="idw")
    far = query(40.0)
    out, after, trace = run(MEMORY, far, TARGET, None, options)
    assert not np.any(trace.reads.weights) and not np.any(out)
    jax.tree.map(partial(np.testing.assert_array_equal), after, MEMORY)
