"""The short causal convolution against a loop, and its laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.short_conv import short_conv


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
