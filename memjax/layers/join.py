"""How the read of a memory becomes the branch that is added to the stream.

What: `token_gate`, a scalar per token, and `join`: memory dropout, the dense path and
    the combinator, the same for every memory.
Why: any memory can be combined in any mode, and what is measured has one name.
When not: where the branch is added is the block's business.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError
from memjax.layers.memory import MemoryConfig
from memjax.layers.precision import Dtypes
from memjax.layers.projection import projection
from memjax.layers.record import record
from memjax.ops.gates import combine

TOKEN_GATES = ("none", "sigmoid")


def check_gate(config: MemoryConfig, gate: str) -> None:
    """ConfigError for an unknown token gate, or a mode that is nothing without one."""
    if gate not in TOKEN_GATES:
        raise ConfigError("memories.gate", gate, f"one of {TOKEN_GATES}")
    if gate == "none" and config.mode == "convex":
        raise ConfigError(
            "memories.gate",
            gate,
            "'sigmoid' when mode = 'convex': the dense path has the weight 1 - gate",
        )


def token_gate(
    kind: str,
    x_BTD: Array,
    dtypes: Dtypes,
    init: nn.initializers.Initializer | None = None,
) -> Array:
    """Gate [B, T] of a memory, in the dtype of the accumulation.

    Args:
        kind: "none": ones; "sigmoid": sigmoid(w . x + b) by the submodule `token_gate`.
        x_BTD: what the memory reads by.
        init: of w; the default is N(0, 1/D).

    Call it inside the compact method of the memory.
    """
    if kind == "none":
        return jnp.ones(x_BTD.shape[:-1], dtypes.accumulation)
    score_BT1 = nn.Dense(
        1,
        name="token_gate",
        dtype=dtypes.compute,
        param_dtype=dtypes.params,
        kernel_init=init or nn.initializers.normal(x_BTD.shape[-1] ** -0.5),
    )(x_BTD.astype(dtypes.compute))
    return jax.nn.sigmoid(score_BT1[..., 0].astype(dtypes.accumulation))


def join(
    module: nn.Module,
    config: MemoryConfig,
    read: Array,
    gate: Array,
    x: Array,
    dtypes: Dtypes,
    *,
    train: bool,
    drop: bool,
    refine: Callable[[Array, int], Array] = lambda gated, branch: gated,
) -> Array:
    """The branch that a memory adds to the stream; records `gate`.

    Args:
        module: the memory, inside its compact method; modes other than "sum" make its
            submodule `dense`, a linear map of `x`.
        read: [B, T, E].
        gate: [B, T]; or [B, T, M], one for each of M streams that share the read.
        x: what the memory read by, [B, T, D] or [B, T, M, D].
        train: apply memory dropout (needs the rng "dropout" when it is positive).
        drop: drop the read of every sequence.
        refine: (gated read [B, T, E], number of the stream) -> what `ops.gates.combine`
            refines it to.

    Returns:
        Like `x` but E wide, in the dtype of `x`. With mode "sum" and a gate of ones it
        is the read itself.
    """
    acc = dtypes.accumulation
    record(module, "gate", gate)
    if drop:
        gate = jnp.zeros_like(gate)
    elif train and config.dropout > 0:
        keep = jax.random.bernoulli(
            module.make_rng("dropout"),
            1 - config.dropout,
            (gate.shape[0],) + (1,) * (gate.ndim - 1),
        )
        gate = gate * keep
    dense = None
    if config.mode != "sum":
        width = read.shape[-1]
        dense = projection("dense", width, dtypes)(x.astype(dtypes.compute)).astype(acc)
    read = read.astype(acc)

    def stream(gate_BT: Array, dense_BTE: Array | None, number: int) -> Array:
        return combine(
            read,
            gate_BT,
            dense_BTE,
            mode=config.mode,  # pyright: ignore[reportArgumentType]
            cap=config.cap,
            refine=lambda gated: refine(gated, number),
        )

    if gate.ndim == 2:
        return stream(gate, dense, 0).astype(x.dtype)
    # One by one: on a CPU, reductions of arrays with an axis M are slow.
    streams = [
        stream(gate[:, :, m], None if dense is None else dense[:, :, m], m)
        for m in range(gate.shape[2])
    ]
    return jnp.stack(streams, axis=2).astype(x.dtype)
