"""One pre-norm decoder block, with or without memories.

What: attention and feed-forward branches around the residual stream.
Why: the unit that is repeated, scanned and rematerialised.
When not: embedding, head and the order of blocks belong to the model.
"""

from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from memjax.layers.attention import Attention
from memjax.layers.feed_forward import FeedForward
from memjax.layers.memory import MemoryInputs
from memjax.layers.norm import RMSNorm
from memjax.layers.precision import Dtypes
from memjax.layers.record import record


class Seat(NamedTuple):
    """Where the memory of the same number sits.

    Attributes:
        name: of its module.
        place: one of `layers.memory.PLACES`.
        normed: whether it reads the normalised stream.
    """

    name: str
    place: str
    normed: bool


class Block(nn.Module):
    """[B, T, D] -> [B, T, D].

    Without `three_branch`: attention, then the feed-forward, each on the normalised
    stream and added to it, and memories at their places. With it: all branches read the
    same stream, h + attn * w_attn + read * w_mem + ffn * w_ffn, with learned scalars
    that start at 1 (the arrangement whose backbone can starve).

    Records the RMS of what each branch adds, `attention_rms`, `feed_forward_rms` and,
    by the name of each memory, `memory_rms`; and of the stream after the block,
    `stream_rms`.

    Attributes:
        memories: modules with `read(x, inputs, train=, drop=)`, in the order in which
            they act; seats: where each sits.
    """

    n_heads: int
    n_kv_heads: int
    d_ff: int
    window: int | None
    starve_window: int | None
    rope_theta: float
    norm_eps: float
    dropout: float
    out_scale: float
    three_branch: bool
    dtypes: Dtypes
    memories: tuple[nn.Module, ...] = ()
    seats: tuple[Seat, ...] = ()

    # Linen then keeps the names that the memories come with.
    preserve_adopted_names: ClassVar[bool] = True

    @nn.compact
    def __call__(
        self,
        h_BTD: Array,
        segments_BT: Array,
        positions_BT: Array,
        starved_B: Array | None,
        inputs: tuple[MemoryInputs, ...],
        train: bool,
        drop_memory: bool,
    ) -> Array:
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

        def attend(h: Array) -> Array:
            attention = Attention(
                n_heads=self.n_heads,
                n_kv_heads=self.n_kv_heads,
                window=self.window,
                starve_window=self.starve_window,
                rope_theta=self.rope_theta,
                out_scale=self.out_scale,
                dtypes=self.dtypes,
                name="attention",
            )
            h = norm("attention_norm", h)
            return dropped(attention(h, segments_BT, positions_BT, starved_B))

        def feed(h: Array) -> Array:
            feed_forward = FeedForward(
                d_ff=self.d_ff,
                out_scale=self.out_scale,
                dtypes=self.dtypes,
                name="feed_forward",
            )
            return dropped(feed_forward(norm("feed_forward_norm", h)))

        def read(number: int, h: Array) -> Array:
            seat = self.seats[number]
            x = norm(f"{seat.name}_input_norm", h) if seat.normed else h
            found = self.memories[number].read(  # pyright: ignore[reportAttributeAccessIssue]
                x, inputs[number], train=train, drop=drop_memory
            )
            rms(seat.name, found)
            return found

        def at(place: str) -> list[int]:
            return [i for i, seat in enumerate(self.seats) if seat.place == place]

        if self.three_branch:
            attended = attend(h_BTD) * weight("w_attn")
            fed = feed(h_BTD) * weight("w_ffn")
            reads = jnp.zeros((), h_BTD.dtype)
            for i, seat in enumerate(self.seats):
                name = seat.name.replace("memory", "w_mem")
                reads = reads + read(i, h_BTD) * weight(name)
            h_BTD = h_BTD + attended + reads + fed
        else:
            for i in at("before_attention"):
                h_BTD = h_BTD + read(i, h_BTD)
            attended = attend(h_BTD)
            h_BTD = h_BTD + attended
            instead = at("instead_of_feed_forward")
            fed = None if instead else feed(h_BTD)
            beside = [read(i, h_BTD) for i in instead + at("beside_feed_forward")]
            for branch in beside if fed is None else [fed, *beside]:
                h_BTD = h_BTD + branch
            for i in at("after_feed_forward"):
                h_BTD = h_BTD + read(i, h_BTD)
        rms("attention", attended)
        if fed is not None:
            rms("feed_forward", fed)
        rms("stream", h_BTD)
        return h_BTD
