"""Attention and norm: against a plain loop, and what may see what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.layers.attention import Attention, rope
from memjax.layers.decode_piece import Place
from memjax.layers.norm import RMSNorm
from memjax.layers.precision import Dtypes, PrecisionConfig

FLOAT32 = Dtypes.of(PrecisionConfig())


def oracle(params, h, segments, positions, n_heads, n_kv_heads, window, theta):
    """Attention of one row in float64, one query at a time."""
    h = np.asarray(h, np.float64)
    n_tokens, d_model = h.shape
    width = d_model // n_heads

    def heads(name, count):
        out = h @ np.asarray(params[name]["kernel"], np.float64)
        return out.reshape(n_tokens, count, width)

    def turn(x):
        out = np.empty_like(x)
        half = width // 2
        for t in range(n_tokens):
            for i in range(half):
                angle = positions[t] * theta ** (-i / half)
                a, b = x[t, :, i], x[t, :, half + i]
                out[t, :, i] = a * np.cos(angle) - b * np.sin(angle)
                out[t, :, half + i] = b * np.cos(angle) + a * np.sin(angle)
        return out

    q, k = turn(heads("query", n_heads)), turn(heads("key", n_kv_heads))
    v = heads("value", n_kv_heads)
    out = np.zeros((n_tokens, n_heads, width))
    for t in range(n_tokens):
        seen = [
            s
            for s in range(t + 1)
            if segments[s] == segments[t] and (window is None or t - s < window)
        ]
        for head in range(n_heads):
            kv = head // (n_heads // n_kv_heads)
            scores = np.array([q[t, head] @ k[s, kv] for s in seen]) * width**-0.5
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[t, head] = weights @ v[seen, kv]
    return out.reshape(n_tokens, d_model) @ np.asarray(params["out"]["kernel"])


@pytest.mark.parametrize(("n_kv_heads", "window"), [(4, None), (2, 3), (1, 1)])
def test_equals_the_loop(n_kv_heads, window):
    module = Attention(
        n_heads=4, n_kv_heads=n_kv_heads, window=window, dtypes=FLOAT32, rope_theta=50.0
    )
    h = jax.random.normal(jax.random.key(0), (2, 7, 16))
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2], [1] * 7])
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2], list(range(7))])
    params = module.init(jax.random.key(1), h, segments, positions)["params"]
    got = module.apply({"params": params}, h, segments, positions)
    for row in range(2):
        want = oracle(
            params, h[row], segments[row], positions[row], 4, n_kv_heads, window, 50.0
        )
        np.testing.assert_allclose(got[row], want, atol=2e-5)


def test_rope_is_relative_and_keeps_lengths():
    x = jax.random.normal(jax.random.key(0), (1, 1, 2, 8))
    norms = [jnp.linalg.norm(rope(x, jnp.array([[p]]), 10000.0)) for p in (0, 5, 999)]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-5)
    y = jax.random.normal(jax.random.key(1), (1, 1, 2, 8))

    def dot(p, q):
        at = rope(x, jnp.array([[p]]), 10000.0), rope(y, jnp.array([[q]]), 10000.0)
        return jnp.sum(at[0] * at[1])

    np.testing.assert_allclose(dot(3, 10), dot(103, 110), atol=1e-4)


def test_rms_norm_equals_its_formula_with_one_gain_an_axis():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4), jnp.float32)
    module = RMSNorm(eps=0.1, n_gain_axes=2)
    scale = jax.random.normal(jax.random.key(1), (3, 4))
    got = module.apply({"params": {"scale": scale}}, x)
    want = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 0.1) * scale
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(("n_kv_heads", "window"), [(4, None), (2, 3), (1, 1)])
def test_pieces_equal_the_loop(n_kv_heads, window):
    """Seven tokens as 3 + 1 + 3 into ten places, row 1 idle in the first piece."""
    module = Attention(
        n_heads=4, n_kv_heads=n_kv_heads, window=window, dtypes=FLOAT32, rope_theta=50.0
    )
    h = jax.random.normal(jax.random.key(0), (2, 7, 16))
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2], [1] * 7])
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2], list(range(7))])
    params = module.init(jax.random.key(1), h, segments, positions)["params"]
    place = Place(n_places=10, n_history=0)
    cache = {"place": {}, "attention": {}}

    def step(cache, h, segments):
        ids = jnp.zeros_like(segments)
        piece, where = place.apply(
            {"cache": cache["place"]}, ids, segments, mutable=["cache"]
        )
        out, kept = module.apply(
            {"params": params, "cache": cache["attention"]},
            h,
            piece.documents_BT,
            piece.positions_BT,
            piece=piece,
            mutable=["cache"],
        )
        return out, {"place": where["cache"], "attention": kept["cache"]}

    got = ([], [])
    for first, second in (((0, 3), None), ((3, 4), (0, 1)), ((4, 7), (1, 4))):
        at = first, second or (0, 3)
        hs = jnp.stack([h[row, slice(*at[row])] for row in (0, 1)])
        here = jnp.stack([segments[row, slice(*at[row])] for row in (0, 1)])
        if second is None:
            here = here.at[1].set(0)
        out, cache = step(cache, hs, here)
        for row, fed in enumerate((True, second is not None)):
            got[row].extend(out[row] if fed else [])
    for row in (0, 1):
        want = oracle(
            params, h[row], segments[row], positions[row], 4, n_kv_heads, window, 50.0
        )
        np.testing.assert_allclose(got[row], want[: len(got[row])], atol=2e-5)
    np.testing.assert_array_equal(cache["place"]["length"], [7, 4])
