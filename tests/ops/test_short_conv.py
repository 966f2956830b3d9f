"""The short causal convolution against a loop, and its laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.short_conv import reach, short_conv


def oracle(u, weight, dilation, segments=None):
    """y_t = silu(sum_j w_j u_{t - (K-1-j) dilation}), written as it is read."""
    n_batch, n_tokens, n_channels = u.shape
    n_taps = len(weight)
    out = np.zeros(u.shape)
    for b in range(n_batch):
        for t in range(n_tokens):
            for j in range(n_taps):
                source = t - (n_taps - 1 - j) * dilation
                if source < 0:
                    continue
                if segments is not None and segments[b, source] != segments[b, t]:
                    continue
                out[b, t] += weight[j] * u[b, source]
    return out / (1 + np.exp(-out))


@pytest.mark.parametrize(
    ("taps", "dilation", "tokens"), [(4, 3, 17), (1, 1, 3), (4, 4, 2)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_loop(taps, dilation, tokens, packed):
    rng = np.random.default_rng(taps)
    u = rng.normal(size=(2, tokens, 5))
    weight = rng.normal(size=(taps, 5))
    segments = np.sort(rng.integers(1, 3, size=(2, tokens)), axis=1) if packed else None
    got = short_conv(
        jnp.asarray(u, jnp.float32),
        jnp.asarray(weight, jnp.float32),
        dilation=dilation,
        segments_BT=None if segments is None else jnp.asarray(segments),
    )
    np.testing.assert_allclose(
        got, oracle(u, weight, dilation, segments), rtol=2e-5, atol=1e-6
    )


def test_the_last_tap_multiplies_the_current_token():
    u = jnp.ones((1, 3, 1))
    weight = jnp.array([[0.0], [1.0]])
    np.testing.assert_allclose(
        short_conv(u, weight, dilation=1)[0, :, 0], jax.nn.silu(jnp.ones(3))
    )


def test_causal_by_gradient_and_zero_weights_still_train():
    u = jax.random.normal(jax.random.key(0), (1, 9, 2))
    weight = jnp.zeros((3, 2))

    def at(t):
        return lambda u, w: short_conv(u, w, dilation=2)[0, t].sum()

    grad_u, _ = jax.grad(at(4), argnums=(0, 1))(u, jnp.ones((3, 2)))
    touched = np.flatnonzero(np.abs(np.asarray(grad_u[0])).sum(-1))
    assert touched.tolist() == [0, 2, 4]
    assert np.abs(jax.grad(at(4), argnums=1)(u, weight)).max() > 0.01


def test_a_packed_document_equals_the_document_alone():
    u = jax.random.normal(jax.random.key(1), (1, 8, 3))
    weight = jax.random.normal(jax.random.key(2), (4, 3))
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2]])
    packed = short_conv(u, weight, dilation=1, segments_BT=segments)
    alone = short_conv(u[:, 3:], weight, dilation=1)
    np.testing.assert_allclose(packed[:, 3:], alone, atol=1e-6)


def test_p09_packed_documents():
    """Inputs [50, 60, 70, 80], segments [1, 1, 2, 2], three taps, then padding."""
    u = jnp.array([50.0, 60, 70, 80, 90])[None, :, None]
    weight = jnp.array([[100.0], [10.0], [1.0]])
    segments = jnp.array([[1, 1, 2, 2, 0]])
    got = short_conv(u, weight, dilation=1, segments_BT=segments)
    np.testing.assert_allclose(got[0, :4, 0], [50, 560, 70, 780], rtol=1e-6)


def test_bfloat16_stays_and_bad_input_is_named():
    u = jnp.ones((1, 4, 2), jnp.bfloat16)
    assert short_conv(u, jnp.ones((2, 2), jnp.bfloat16), dilation=1).dtype == u.dtype
    with pytest.raises(ConfigError, match="dilation = 0"):
        short_conv(u, jnp.ones((2, 2)), dilation=0)
    with pytest.raises(ShapeError, match="u_BTC"):
        short_conv(u, jnp.ones((2, 3)), dilation=1)


@pytest.mark.parametrize("cuts", [(11,), (1, 10), (4, 4, 3), (1,) * 11])
def test_pieces_give_what_the_whole_gives(cuts):
    """Two documents, kernel 4, dilation 3, so that the first tap looks back nine."""
    rng = np.random.default_rng(3)
    u = jnp.asarray(rng.normal(size=(2, 11, 5)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)
    segments = jnp.ones((2, 11), jnp.int32).at[1, 6:].set(2)
    want = short_conv(u, weight, dilation=3, segments_BT=segments)
    n_before = reach(4, 3)
    assert n_before == 9
    before = jnp.zeros((2, n_before, 5)), jnp.zeros((2, n_before), jnp.int32)
    start = 0
    for length in cuts:
        here = slice(start, start + length)
        got = short_conv(
            u[:, here], weight, dilation=3, segments_BT=segments[:, here], before=before
        )
        np.testing.assert_allclose(got, want[:, here], atol=1e-6)
        before = tuple(
            jnp.concatenate([old, new[:, here]], axis=1)[:, -n_before:]
            for old, new in zip(before, (u, segments), strict=True)
        )
        start += length


def test_what_was_before_must_fit():
    u, weight = jnp.ones((1, 2, 3)), jnp.ones((2, 3))
    before = jnp.ones((1, 1, 3)), jnp.ones((1, 1), jnp.int32)
    with pytest.raises(ConfigError, match="segments_BT = None"):
        short_conv(u, weight, dilation=1, before=before)
    segments = jnp.ones((1, 2), jnp.int32)
    with pytest.raises(ShapeError, match="before"):
        short_conv(u, weight, dilation=2, segments_BT=segments, before=before)
    assert reach(0, 3) == reach(1, 3) == 0
