"""One pre-norm decoder block, with or without a memory.

What: attention and feed-forward branches around the residual stream.
Why: the unit that is repeated, scanned and rematerialised.
When not: embedding, head and the order of blocks belong to the model.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from memjax.layers.attention import Attention
from memjax.layers.engram import Engram
from memjax.layers.feed_forward import FeedForward
from memjax.layers.norm import RMSNorm
from memjax.layers.precision import Dtypes
from memjax.layers.record import record


class Block(nn.Module):
    """[B, T, D] -> [B, T, D].

    Without `three_branch`: the memory acts on the stream first, then attention, then
    the feed-forward, each on the normalised stream and added to it. With it: all
    branches read the same stream, h + attn * w_attn + read * w_mem + ffn * w_ffn,
    with learned scalars that start at 1 (the arrangement whose backbone can starve).

    Records the RMS of what each branch adds, `attention_rms`, `feed_forward_rms` and
    `memory_rms`, and of the stream after the block, `stream_rms`.
    """

    n_heads: int
    n_kv_heads: int
    d_ff: int
    window: int | None
    rope_theta: float
    norm_eps: float
    dropout: float
    out_scale: float
    three_branch: bool
    dtypes: Dtypes
    memory: Engram | None = None

    @nn.compact
    def __call__(
        self,
        h_BTD: Array,
        segments_BT: Array,
        positions_BT: Array,
        rows_BTC: Array | None,
        train: bool,
        drop_memory: bool,
    ) -> Array:
        attention = Attention(
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            window=self.window,
            rope_theta=self.rope_theta,
            out_scale=self.out_scale,
            dtypes=self.dtypes,
            name="attention",
        )
        feed_forward = FeedForward(
            d_ff=self.d_ff,
            out_scale=self.out_scale,
            dtypes=self.dtypes,
            name="feed_forward",
        )

        def norm(name: str, h: Array) -> Array:
            return RMSNorm(
                eps=self.norm_eps,
                param_dtype=self.dtypes.params,
                accumulation=self.dtypes.accumulation,
                name=name,
            )(h)

        def dropped(branch: Array) -> Array:
            return nn.Dropout(self.dropout, deterministic=not train)(branch)

        def rms(name: str, x: Array) -> None:
            wide = x.astype(jnp.float32)
            record(self, f"{name}_rms", jnp.sqrt(jnp.mean(wide * wide)))

        def weight(name: str) -> Array:
            scalar = self.param(name, nn.initializers.ones, (), self.dtypes.params)
            return scalar.astype(h_BTD.dtype)

        read = jnp.zeros((), h_BTD.dtype)
        if self.memory is not None:
            assert rows_BTC is not None, "a block with a memory needs row ids"
            read = self.memory.branch(
                h_BTD,
                rows_BTC,
                segments_BT=segments_BT,
                token_mask_BT=segments_BT > 0,
                train=train,
                drop=drop_memory,
            )
        if self.three_branch:
            attended = attention(
                norm("attention_norm", h_BTD), segments_BT, positions_BT
            )
            attended = dropped(attended) * weight("w_attn")
            fed = dropped(feed_forward(norm("feed_forward_norm", h_BTD)))
            fed = fed * weight("w_ffn")
            if self.memory is not None:
                read = read * weight("w_mem")
            h_BTD = h_BTD + attended + read + fed
        else:
            h_BTD = h_BTD + read
            attended = dropped(
                attention(norm("attention_norm", h_BTD), segments_BT, positions_BT)
            )
            h_BTD = h_BTD + attended
            fed = dropped(feed_forward(norm("feed_forward_norm", h_BTD)))
            h_BTD = h_BTD + fed
        rms("attention", attended)
        rms("feed_forward", fed)
        if self.memory is not None:
            rms("memory", read)
        rms("stream", h_BTD)
        return h_BTD
