"""Causal grouped-query attention with rotary positions and an optional window.

What: q, k, v, out projections around `jax.nn.dot_product_attention`; whole rows, or
    the next tokens of rows whose keys and values are kept.
Why: packed rows need the causal, the segment and the window mask in one place.
When not: which token goes where in the cache is `decode_piece`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from memjax.layers.decode_piece import Piece, keep
from memjax.layers.precision import Dtypes
from memjax.layers.projection import projection
from memjax.parallel.logical_axes import ActivationSharding, constrain


def rope(x_BTAC: Array, positions_BT: Array, theta: float) -> Array:
    """Rotary position embedding (arXiv:2104.09864), half-split pairing.

    Entry i of the first half of a head is rotated with entry i of the second half by
    the angle position * theta^(-2i / C).

    Args:
        x_BTAC: queries or keys; C even.
        positions_BT: int positions.
        theta: base of the wavelengths.

    Returns:
        Same shape and dtype; angles and products are float32.
    """
    half = x_BTAC.shape[-1] // 2
    rates = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions_BT[..., None, None].astype(jnp.float32) * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    wide = x_BTAC.astype(jnp.float32)
    a, b = wide[..., :half], wide[..., half:]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x_BTAC.dtype)


class Attention(nn.Module):
    """Causal self-attention over packed rows, [B, T, D] -> [B, T, D].

    A token sees tokens of its own segment, not later than itself, and with `window`
    only the last `window` of them, itself included.

    With a `piece`, rows go on from the variables `keys` (turned already) and `values`
    [B, S, heads, width] of the collection "cache", S places a row; segments and
    positions are then those of the piece. A token costs S dot products a head.

    Attributes:
        n_heads: query heads A; n_kv_heads: key and value heads, a divisor of A.
        window: None for full attention.
        starve_window: tokens that the queries of starved sequences see, themselves
            included.
        rope_theta: base of the rotary wavelengths.
        out_scale: as in `FeedForward`.
        activations: how queries, keys and values are divided; None: not stated.
    """

    n_heads: int
    n_kv_heads: int
    dtypes: Dtypes
    window: int | None = None
    starve_window: int | None = None
    rope_theta: float = 10000.0
    out_scale: float = 1.0
    activations: ActivationSharding | None = None

    @nn.compact
    def __call__(
        self,
        h_BTD: Array,
        segments_BT: Array,
        positions_BT: Array,
        starved_B: Array | None = None,
        piece: Piece | None = None,
    ) -> Array:
        n_batch, n_tokens, d_model = h_BTD.shape
        width = d_model // self.n_heads

        def heads(name: str, count: int) -> Array:
            flat = projection(name, count * width, self.dtypes)(h_BTD)
            split = flat.reshape(n_batch, n_tokens, count, width)
            axis = "heads" if name == "query" else "kv_heads"
            return constrain(self.activations, split, "batch", None, axis)

        q_BTAC = rope(heads("query", self.n_heads), positions_BT, self.rope_theta)
        k_BTAC = rope(heads("key", self.n_kv_heads), positions_BT, self.rope_theta)
        v_BTAC = heads("value", self.n_kv_heads)
        if piece is not None:
            k_BSAC = keep(self, "keys", k_BTAC, piece)
            v_BSAC = piece.clean(keep(self, "values", v_BTAC, piece))
            seen_B1TS = piece.visible(self.window)
            out_BTAC = jax.nn.dot_product_attention(
                q_BTAC, k_BSAC, v_BSAC, mask=seen_B1TS
            )
            return self._out(out_BTAC)
        same_B1TT = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
        if starved_B is not None and self.starve_window is not None:
            at_T = jnp.arange(n_tokens)
            near_TT = at_T[:, None] - at_T[None, :] < self.starve_window
            same_B1TT &= near_TT | ~starved_B[:, None, None, None]
        out_BTAC = jax.nn.dot_product_attention(
            q_BTAC,
            k_BTAC,
            v_BTAC,
            mask=same_B1TT,
            is_causal=True,
            local_window_size=None if self.window is None else (self.window - 1, 0),
        )
        return self._out(out_BTAC)

    def _out(self, out_BTAC: Array) -> Array:
        n_batch, n_tokens, n_heads, width = out_BTAC.shape
        d_model = n_heads * width
        return projection("out", d_model, self.dtypes, scale=self.out_scale)(
            out_BTAC.reshape(n_batch, n_tokens, d_model)
        )
