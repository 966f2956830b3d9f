"""One pre-norm decoder block, with or without memories.

What: attention and feed-forward branches around the residual stream.
Why: the unit that is repeated, scanned and rematerialised.
When not: embedding, head and the order of blocks belong to the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError
from memjax.layers.attention import Attention
from memjax.layers.cross_attention import CrossAttention, Source
from memjax.layers.decode_piece import Piece
from memjax.layers.experts import Experts, ExpertsConfig
from memjax.layers.feed_forward import FeedForward
from memjax.layers.hyper_connections import HyperConnection
from memjax.layers.memory import MemoryInputs, check_numbers
from memjax.layers.norm import RMSNorm
from memjax.layers.precision import Dtypes
from memjax.layers.record import record
from memjax.ops.hyper_connections import (
    MIXING_EPS,
    MIXING_ITERATIONS,
    check_streams,
    hyper_residual,
)
from memjax.parallel.logical_axes import ActivationSharding, constrain

HYPER_FORMS = ("own", "single_pass")


class Seat(NamedTuple):
    """Where the memory of the same number sits.

    Attributes:
        name: of its module.
        place: one of `layers.memory.PLACES`.
        normed: whether it reads the normalised stream.
        all_streams: whether it reads and writes every residual stream by itself.
    """

    name: str
    place: str
    normed: bool
    all_streams: bool = False


@dataclass(frozen=True, kw_only=True)
class HyperConfig:
    """Hyper-connections: M residual streams (arXiv:2512.24880).

    Attributes:
        n_streams: M.
        form: "own": a sub-block reads the streams by weights computed from the streams
            it writes to (the paper); "single_pass": by those of the sub-block before
            (DeepSeek-V4.1), so that a block needs one pass over its streams.
        n_iterations, eps: of the Sinkhorn loop of the mixing.
        norm_eps: of the normalisation of the streams; V4.1 has 1e-20.
    """

    n_streams: int = 4
    form: str = "own"
    n_iterations: int = MIXING_ITERATIONS
    eps: float = MIXING_EPS
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_numbers(self, "hyper")
        if self.form not in HYPER_FORMS:
            raise ConfigError("hyper.form", self.form, f"one of {HYPER_FORMS}")
        try:
            check_streams(self.n_streams, self.n_iterations, self.eps, self.norm_eps)
        except ConfigError as error:
            raise ConfigError(
                f"hyper.{error.field}", error.value, error.allowed
            ) from None


class Block(nn.Module):
    """(stream, pre) -> (stream, pre), a stream [B, T, D], or [B, T, M, D] with `hyper`.

    `pre` [B, T, M] goes from sub-block to sub-block in the single-pass form of
    hyper-connections and is None otherwise.

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
        experts: a mixture of experts as the feed-forward; None: a dense one.
        window, local_window: of the attention to the block's own stream, without and
            beside a source.
        activations: how the stream and what is inside the branches are divided over a
            mesh; None: not stated.
    """

    n_heads: int
    n_kv_heads: int
    d_ff: int
    window: int | None
    starve_window: int | None
    local_window: int | None
    rope_theta: float
    norm_eps: float
    dropout: float
    out_scale: float
    three_branch: bool
    hyper: HyperConfig | None
    experts: ExpertsConfig | None
    dtypes: Dtypes
    memories: tuple[nn.Module, ...] = ()
    seats: tuple[Seat, ...] = ()
    activations: ActivationSharding | None = None

    # Linen then keeps the names that the memories come with.
    preserve_adopted_names: ClassVar[bool] = True

    @nn.compact
    def __call__(
        self,
        carried: tuple[Array, Array | None],
        segments_BT: Array,
        positions_BT: Array,
        starved_B: Array | None,
        expert_ids_BTK: Array | None,
        inputs: tuple[MemoryInputs, ...],
        train: bool,
        drop_memory: bool,
        piece: Piece | None = None,
        source: Source | None = None,
    ) -> tuple[Array, Array | None]:
        stream, pre = carried

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
            return scalar.astype(stream.dtype)

        def attend(h: Array) -> Array:
            options = {
                "n_heads": self.n_heads,
                "n_kv_heads": self.n_kv_heads,
                "starve_window": self.starve_window,
                "rope_theta": self.rope_theta,
                "out_scale": self.out_scale,
                "dtypes": self.dtypes,
                "name": "attention",
            }
            h = norm("attention_norm", h)
            if source is not None:
                attention = CrossAttention(local_window=self.local_window, **options)
                return dropped(attention(h, positions_BT, source, starved_B, piece))
            attention = Attention(
                window=self.window, activations=self.activations, **options
            )
            attended = attention(h, segments_BT, positions_BT, starved_B, piece)
            return dropped(attended)

        def feed(h: Array) -> Array:
            h = norm("feed_forward_norm", h)
            if self.experts is not None:
                experts = Experts(
                    self.experts,
                    dtypes=self.dtypes,
                    out_scale=self.out_scale,
                    name="feed_forward",
                )
                return dropped(experts(h, segments_BT > 0, expert_ids_BTK))
            feed_forward = FeedForward(
                d_ff=self.d_ff,
                out_scale=self.out_scale,
                dtypes=self.dtypes,
                activations=self.activations,
                name="feed_forward",
            )
            return dropped(feed_forward(h))

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
            attended = attend(stream) * weight("w_attn")
            fed = feed(stream) * weight("w_ffn")
            reads = jnp.zeros((), stream.dtype)
            for i, seat in enumerate(self.seats):
                name = seat.name.replace("memory", "w_mem")
                reads = reads + read(i, stream) * weight(name)
            rms("attention", attended)
            rms("feed_forward", fed)
            stream = stream + attended + reads + fed
            rms("stream", stream)
            return constrain(self.activations, stream, "batch"), pre

        def after(name: str, stream: Array, branch: Callable[[Array], Array]) -> Array:
            """The stream after a sub-block."""
            nonlocal pre
            if self.hyper is None:
                return stream + branch(stream)
            mixing = HyperConnection(
                n_streams=self.hyper.n_streams,
                n_iterations=self.hyper.n_iterations,
                eps=self.hyper.eps,
                norm_eps=self.hyper.norm_eps,
                dtypes=self.dtypes,
                name=f"{name}_mixing",
            )(stream)
            stream = hyper_residual(stream, mixing, branch, pre=pre)
            if pre is not None:
                pre = mixing.pre
            return stream

        def after_memory(i: int, stream: Array) -> Array:
            if self.seats[i].all_streams:
                return stream + read(i, stream)
            return after(self.seats[i].name, stream, lambda h: read(i, h))

        def attention(h: Array) -> Array:
            attended = attend(h)
            rms("attention", attended)
            return attended

        def feed_forward(h: Array) -> Array:
            """The feed-forward, what stands in for it and what stands beside it."""
            instead, branches = at("instead_of_feed_forward"), []
            if not instead:
                branches = [feed(h)]
                rms("feed_forward", branches[0])
            branches += [read(i, h) for i in instead + at("beside_feed_forward")]
            return sum(branches[1:], branches[0])

        for i in at("before_attention"):
            stream = after_memory(i, stream)
        stream = after("attention", stream, attention)
        stream = after("feed_forward", stream, feed_forward)
        for i in at("after_feed_forward"):
            stream = after_memory(i, stream)
        rms("stream", stream)
        return constrain(self.activations, stream, "batch"), pre
