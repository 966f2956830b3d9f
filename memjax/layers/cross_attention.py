"""Attention to the keys and values of an earlier block: the decoder of a CED.

What: `HeadKeys`, keys and values of a stream; `Source`, what all decoder blocks look
    at; `CrossAttention`, queries of a block's own stream against them; `CedConfig`.
Why: with one source for half of the blocks a prompt costs the other half only its last
    tokens, and their keys and values need not be kept for each block.
When not: blocks that look at their own stream; see `attention`.

Source: arXiv:2405.05254 (YOCO) and section 2.2 of arXiv:2609.19969 (DeepSeek-V4.1).
Left out: the compression of keys and values, with its gate.
"""

from dataclasses import dataclass
from typing import NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError
from memjax.layers.attention import rope
from memjax.layers.decode_piece import Piece, keep
from memjax.layers.precision import Dtypes
from memjax.layers.projection import projection


@dataclass(frozen=True, kw_only=True)
class CedConfig:
    """A causal encoder-decoder: later blocks attend to what an earlier one left.

    Attributes:
        first_decoder: index of the first block whose attention takes keys and values
            from the stream that enters it, as all blocks after it do.
        share_kv: one pair of projections for all decoder blocks (YOCO), or one for each
            (the text of arXiv:2609.19969).
        local_window: tokens of a decoder block's own stream, the token itself included,
            that stand beside the source in one softmax; None: none.
    """

    first_decoder: int
    share_kv: bool = False
    local_window: int | None = None

    def __post_init__(self) -> None:
        for field, least in (("first_decoder", 1), ("local_window", 1)):
            value = getattr(self, field)
            if field == "local_window" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"ced.{field}", value, f"an integer >= {least}")
        if self.share_kv not in (False, True):
            raise ConfigError("ced.share_kv", self.share_kv, "True or False")


class KeysValues(NamedTuple):
    """Keys (turned) and values [B, S, heads, width], of tokens or of a row's places."""

    keys_BSAC: Array
    values_BSAC: Array


@flax.struct.dataclass
class Source:
    """What all decoder blocks look at.

    Attributes:
        stream_BTD: the normalised stream of all tokens.
        segments_BT, positions_BT: of all tokens; a block may have the last ones alone.
        shared: keys and values when the blocks share them, else None.
    """

    stream_BTD: Array
    segments_BT: Array
    positions_BT: Array
    shared: KeysValues | None = None


class HeadKeys(nn.Module):
    """Keys and values of a stream, [B, T, D] -> `KeysValues`.

    Parameters `key` and `value`. With a piece, those of the row's earlier tokens come
    first, from the variables `keys` and `values` of the collection "cache".
    """

    n_heads: int
    width: int
    rope_theta: float
    dtypes: Dtypes

    @nn.compact
    def __call__(
        self, x_BTD: Array, positions_BT: Array, piece: Piece | None = None
    ) -> KeysValues:
        def heads(name: str) -> Array:
            flat = projection(name, self.n_heads * self.width, self.dtypes)(x_BTD)
            return flat.reshape(*x_BTD.shape[:2], self.n_heads, self.width)

        keys_BTAC = rope(heads("key"), positions_BT, self.rope_theta)
        values_BTAC = heads("value")
        if piece is None:
            return KeysValues(keys_BTAC, values_BTAC)
        return KeysValues(
            keep(self, "keys", keys_BTAC, piece),
            piece.clean(keep(self, "values", values_BTAC, piece)),
        )


class CrossAttention(nn.Module):
    """Queries of the last t tokens against a source, [B, t, D] -> [B, t, D].

    A token sees the source of its own segment, not later than itself, and, where
    `local_window` says so, its own stream for that many tokens, in one softmax.

    Parameters: `query`, `out`; `source` and `local`, each a `HeadKeys`, where they are
    this block's.

    Attributes:
        n_heads, n_kv_heads, rope_theta, out_scale, starve_window: as in `Attention`.
    """

    n_heads: int
    n_kv_heads: int
    local_window: int | None
    starve_window: int | None
    rope_theta: float
    out_scale: float
    dtypes: Dtypes

    @nn.compact
    def __call__(
        self,
        h_BtD: Array,
        positions_Bt: Array,
        source: Source,
        starved_B: Array | None,
        piece: Piece | None,
    ) -> Array:
        n_batch, n_last, d_model = h_BtD.shape
        width = d_model // self.n_heads

        def keys_of(name: str) -> HeadKeys:
            return HeadKeys(
                self.n_kv_heads, width, self.rope_theta, self.dtypes, name=name
            )

        flat = projection("query", d_model, self.dtypes)(h_BtD)
        q_BtAC = rope(
            flat.reshape(n_batch, n_last, self.n_heads, width),
            positions_Bt,
            self.rope_theta,
        )
        found = source.shared
        if found is None:
            found = keys_of("source")(source.stream_BTD, source.positions_BT, piece)
        segments_BT = source.segments_BT

        def seen(n_keys: int, window: int | None) -> Array:
            if piece is not None:
                return piece.visible(window)
            return visible(segments_BT, n_last, n_keys, window)

        def mask(n_keys: int, window: int | None) -> Array:
            everything = seen(n_keys, window)
            if starved_B is None or self.starve_window is None:
                return everything
            near = seen(n_keys, self.starve_window)
            return everything & (near | ~starved_B[:, None, None, None])

        looked_at, masks = [found], [mask(segments_BT.shape[1], None)]
        if self.local_window is not None:
            looked_at.append(keys_of("local")(h_BtD, positions_Bt, piece))
            masks.append(mask(n_last, self.local_window))
        out_BtAC = jax.nn.dot_product_attention(
            q_BtAC,
            jnp.concatenate([kv.keys_BSAC for kv in looked_at], axis=1),
            jnp.concatenate([kv.values_BSAC for kv in looked_at], axis=1),
            mask=jnp.concatenate(masks, axis=-1),
        )
        return projection("out", d_model, self.dtypes, scale=self.out_scale)(
            out_BtAC.reshape(n_batch, n_last, d_model)
        )


def visible(
    segments_BT: Array, n_queries: int, n_keys: int, window: int | None
) -> Array:
    """Which keys a query sees, bool [B, 1, queries, keys], both of the last tokens.

    Those of its segment, not later than itself, and of the last `window` only.
    """
    at_T = jnp.arange(segments_BT.shape[1])
    asks, keys = at_T[-n_queries:], at_T[-n_keys:]
    back = asks[:, None] - keys[None, :]
    near = back >= 0 if window is None else (back >= 0) & (back < window)
    same = segments_BT[:, -n_queries:, None] == segments_BT[:, None, -n_keys:]
    return (same & near)[:, None]
