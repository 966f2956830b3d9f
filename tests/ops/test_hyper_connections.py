"""Mixing of residual streams.

What: equal to the oracle, the laws of the matrix, direction of its indices, gradients
    against finite differences of the oracle, low precision, error texts.
Why: source and destination are easily swapped, and a model trains all the same.
When not: the recorded numbers; tests/golden.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.hyper_connections import (
    Mixing,
    collapse,
    expand,
    first_pre,
    hyper_residual,
    merge,
    mixing,
    sinkhorn_mixing,
    stream_mixes,
)
from tests.oracles import hyper_connections as oracle

M, D, ITERATIONS, EPS, NORM_EPS = 3, 4, 4, 1e-3, 1e-2


def whole(stream, kernel, scale, base, out):
    mixes = stream_mixes(stream, kernel, NORM_EPS)
    mix = mixing(mixes, scale, base, n_streams=M, n_iterations=ITERATIONS, eps=EPS)
    return mix, collapse(stream, mix.pre), merge(stream, out, mix.post, mix.comb)


def oracle_whole(stream, kernel, scale, base, out):
    found = []
    for x, y in zip(stream, out, strict=True):
        mix = oracle.mixing(x, kernel, scale, base, ITERATIONS, EPS, NORM_EPS)
        pre, post, comb = mix
        new = oracle.merge(x, y, post, comb)
        found.append((*mix, oracle.collapse(x, pre), new))
    return [np.stack(values) for values in zip(*found, strict=True)]


jitted = jax.jit(whole)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    n = (2 + M) * M
    shapes = ((2, M, D), (M * D, n), (3,), (n,), (2, D))
    return [rng.normal(size=shape) for shape in shapes]


def test_equal_to_the_oracle_and_jit_to_no_jit(inputs):
    arrays = [jnp.asarray(a, jnp.float32) for a in inputs]
    found = jax.tree.leaves(jitted(*arrays))
    plain = jax.tree.leaves(whole(*arrays))
    for got, loose, want in zip(found, plain, oracle_whole(*inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(got, loose, rtol=1e-5, atol=1e-6)


def test_gradients_are_the_finite_differences_of_the_oracle(inputs):
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=a.shape) for a in oracle_whole(*inputs)]

    def total(found):
        return sum((w * a).sum() for w, a in zip(weights, found, strict=True))

    grads = jax.jit(
        jax.grad(lambda *a: total(jax.tree.leaves(whole(*a))), argnums=range(5))
    )(*(jnp.asarray(a, jnp.float32) for a in inputs))
    for number, grad in enumerate(grads):
        direction = rng.normal(size=inputs[number].shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = list(inputs)
            moved[number] = inputs[number] + step * direction
            ends.append(total(oracle_whole(*moved)))
        want = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(np.sum(grad * direction), want, rtol=1e-3, atol=1e-3)


def test_columns_sum_to_one_after_any_number_of_steps_and_rows_in_the_end():
    logits = 2 * jax.random.normal(jax.random.key(0), (20, 4, 4))
    off = []
    for n_iterations in (1, 3, 40):
        comb = np.asarray(sinkhorn_mixing(logits, n_iterations=n_iterations))
        assert (comb > 0).all()
        np.testing.assert_allclose(comb.sum(-2), 1, atol=1e-4)
        off.append(np.abs(comb.sum(-1) - 1).max())
    assert off[0] > off[1] > 0.01 > 1e-3 > off[2]


def test_extreme_logits_stay_finite():
    logits = jnp.array([[1e4, 0.0], [1e4, -1e4]])
    comb, grad = jax.value_and_grad(lambda x: sinkhorn_mixing(x)[0, 1])(logits)
    assert np.isfinite(comb) and np.isfinite(grad).all()


def test_the_first_index_of_comb_is_the_source():
    stream, out = jnp.eye(2)[None] * jnp.array([1.0, 10.0]), jnp.zeros((1, 2))
    comb = jnp.array([[[0.9, 0.2], [0.1, 0.8]]])
    got = merge(stream, out, jnp.ones((1, 2)), comb)
    # Destination 0 is 0.9 of stream 0 and 0.1 of stream 1, which holds a 10.
    np.testing.assert_allclose(got[0], [[0.9, 1.0], [0.2, 8.0]], rtol=1e-6)


def test_identity_mixing_of_one_stream_is_the_plain_residual_bit_for_bit():
    x = jax.random.normal(jax.random.key(1), (2, 5, D))
    one = jnp.ones((2, 5, 1))
    identity = Mixing(one, one, one[..., None])
    for pre in (None, first_pre(x, 1)):
        got = hyper_residual(expand(x, 1), identity, jnp.sin, pre=pre)
        np.testing.assert_array_equal(collapse(got, one), x + jnp.sin(x))


def test_equal_streams_with_a_sum_to_one_pre_are_a_plain_residual():
    """Columns of comb sum to 1 and post is 1, so M equal streams stay equal."""
    x = jax.random.normal(jax.random.key(1), (5, D))
    comb = sinkhorn_mixing(jax.random.normal(jax.random.key(2), (5, M, M)))
    mix = Mixing(jnp.full((5, M), 1 / M), jnp.ones((5, M)), comb)
    got = hyper_residual(expand(x, M), mix, jnp.sin)
    want = jnp.broadcast_to((x + jnp.sin(x))[:, None], (5, M, D))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_single_pass_form_reads_with_the_pre_that_is_handed_in():
    stream = jax.random.normal(jax.random.key(3), (1, M, D))
    pre = jnp.array([[0.5, 0.0, 2.0]])
    mix = Mixing(first_pre(stream[:, 0], M), jnp.ones((1, M)), jnp.zeros((1, M, M)))
    own = hyper_residual(stream, mix, lambda u: u)
    np.testing.assert_array_equal(own, expand(stream[:, 0], M))
    handed = hyper_residual(stream, mix, lambda u: u, pre=pre)
    want = expand(0.5 * stream[:, 0] + 2 * stream[:, 2], M)
    np.testing.assert_allclose(handed, want, rtol=1e-6)


def test_mixes_ignore_the_size_of_a_token_and_each_token_its_neighbours(inputs):
    stream, kernel = (jnp.asarray(a, jnp.float32) for a in inputs[:2])
    both = stream_mixes(stream, kernel, 0.0)
    np.testing.assert_allclose(
        stream_mixes(8 * stream, kernel, 0.0), both, rtol=1e-5, atol=1e-6
    )
    alone = stream_mixes(stream[1], kernel, 0.0)
    np.testing.assert_allclose(alone, both[1], rtol=1e-5, atol=1e-6)
    empty = stream_mixes(stream[:0], kernel, 0.0)
    assert empty.shape == (0, (2 + M) * M)


def test_bfloat16_streams_stay_bfloat16_and_are_mixed_in_float32(inputs):
    low = [jnp.asarray(a, jnp.bfloat16) for a in inputs]
    mix, layer_input, new = jitted(*low)
    assert {leaf.dtype for leaf in mix} == {jnp.dtype("float32")}
    assert layer_input.dtype == new.dtype == jnp.bfloat16
    wide = [np.asarray(a, np.float64) for a in low]
    want = oracle_whole(*wide)
    np.testing.assert_allclose(mix.comb, want[2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(new, np.float64), want[4], rtol=1e-2)


def test_errors_name_the_field(inputs):
    stream, kernel, scale, base, _ = inputs
    with pytest.raises(ShapeError, match=r"kernel has shape \(12, 15\)"):
        stream_mixes(stream[:, :2], kernel, 0.0)
    mixes = np.zeros((2, 15), np.float32)
    with pytest.raises(ShapeError, match="mixes"):
        mixing(mixes[:, :8], scale, base, n_streams=M)
    with pytest.raises(ShapeError, match="scale"):
        mixing(mixes, scale[:2], base, n_streams=M)
    with pytest.raises(ShapeError, match="base"):
        mixing(mixes, scale, base[:8], n_streams=M)
    for field, value in (("n_streams", 0), ("n_iterations", 0), ("eps", -1.0)):
        with pytest.raises(ConfigError, match=f"{field} = {value}"):
            mixing(mixes, scale, base, **({"n_streams": M} | {field: value}))
