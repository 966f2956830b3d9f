"""Gates on a memory read, and the one combinator that joins a read to the stream.

What: score -> gate in (0, 1), and `combine`, which mixes a read with a dense path.
Why: every memory layer joins the model through the same few published formulas.
When not: the arrangements of whole branches belong to the model, not here.
"""

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError

GateKind = Literal["signed_sqrt", "signed_sqrt_copysign", "plain"]
CombineMode = Literal["sum", "convex", "interpolate", "capped", "capped_rms"]

GATE_KINDS: tuple[str, ...] = get_args(GateKind)
COMBINE_MODES: tuple[str, ...] = get_args(CombineMode)
RMS_EPS = 1e-6


def signed_sqrt_gate(
    score: Array, *, zero: Literal["sign", "copysign"] = "sign", floor: float = 1e-6
) -> Array:
    """sigmoid(sign(s) * sqrt(max(|s|, floor))), the gate of both Engram releases.

    Args:
        score: any shape, float; compute it in float32 at least, the slope just
            above `floor` is about 125 per unit of score.
        zero: what happens at s = 0: "sign" gives exactly 0.5 (the demo), "copysign"
            follows the sign bit and gives sigmoid(+-sqrt(floor)) (V4.1).
        floor: lower bound of |s| under the root, > 0. Scores below it have gradient
            0; at |s| = floor the gradient passes, as in torch's clamp.

    Returns:
        Gate in (0, 1), same shape and dtype.

    Raises:
        ConfigError: `zero` is neither "sign" nor "copysign".

    Source: deepseek-ai/Engram engram_demo_v1.py and DeepSeek-V4.1-Flash
    inference/engram.py. arXiv:2601.07372 eq. 4 prints a plain sigmoid instead.
    """
    size = jnp.abs(score)
    root = jnp.sqrt(jnp.where(size >= floor, size, floor))
    if zero == "sign":
        return jax.nn.sigmoid(jnp.sign(score) * root)
    if zero == "copysign":
        return jax.nn.sigmoid(jnp.copysign(root, score))
    raise ConfigError("zero", zero, "'sign' or 'copysign'")


def plain_gate(score: Array) -> Array:
    """sigmoid(s), the gate as arXiv:2601.07372 eq. 4 prints it. Shape, dtype kept."""
    return jax.nn.sigmoid(score)


def gate_of(kind: str, score: Array) -> Array:
    """The gate called `kind` (one of GATE_KINDS) of a score; ConfigError otherwise."""
    if kind == "signed_sqrt":
        return signed_sqrt_gate(score, zero="sign")
    if kind == "signed_sqrt_copysign":
        return signed_sqrt_gate(score, zero="copysign")
    if kind == "plain":
        return plain_gate(score)
    raise ConfigError("gate", kind, f"one of {GATE_KINDS}")


def rms_normalize(x: Array, eps: float = RMS_EPS) -> Array:
    """x / rms(x) over the last axis, without a gain; zero vectors stay zero.

    Statistics are taken in float32 or wider; the dtype of `x` is kept.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)


def normalized_dot(query: Array, key: Array, gain: Array, eps: float) -> Array:
    """Sum over the last axis of gain * query / rms(query) * key / rms(key).

    Args:
        query, key: [..., D], float; give them in float32 or wider.
        gain: [D], the product of the gains of both norms.
        eps: added to both mean squares.

    Returns:
        [...] in their dtype. Vectors are multiplied first and the roots divided out of
        the sum, so neither normalised vector is formed, nor kept for the gradient.
    """
    inverse_query = jax.lax.rsqrt(jnp.mean(query * query, axis=-1) + eps)
    inverse_key = jax.lax.rsqrt(jnp.mean(key * key, axis=-1) + eps)
    return jnp.sum(query * gain * key, axis=-1) * inverse_query * inverse_key


def combine(
    read: Array,
    gate: Array,
    dense: Array | None,
    *,
    mode: CombineMode,
    cap: float = 0.25,
    refine: Callable[[Array], Array] = lambda gated: gated,
) -> Array:
    """The branch that a memory adds to the residual stream.

    With r = refine(g * read) the modes are

        sum          r                          (Engram reference)
        convex       r + (1 - g) * dense        (arXiv:2601.00671 eq. 12)
        interpolate  cap * r + (1 - cap) * dense
        capped       cap * r + (1 - cap * g) * dense
        capped_rms   capped, with read and dense RMS-normalised first

    so that in `interpolate` and `capped` the coefficient of the memory never passes
    `cap`, whatever the gate learns. It bounds the coefficient, not the value: rows
    can still grow, which is what `capped_rms` takes away. A gate of 0 makes the
    branch 0 in `sum` and the dense path alone in `convex` and `capped`.

    Args:
        read: [..., E], what the table returned, already projected to the stream.
        gate: [...], in [0, 1]; no trailing axis.
        dense: [..., E], one linear map of the same hidden state; None for `sum`.
        mode: one of COMBINE_MODES.
        cap: largest share of the memory, 0 <= cap <= 1; unused by sum and convex.
        refine: applied to g * read before it is mixed (Engram's short convolution).

    Returns:
        [..., E] in the dtype of `read` and `dense` promoted.

    Raises:
        ConfigError: unknown mode, cap outside [0, 1], or no dense path where the
            mode needs one.
    """
    if mode not in COMBINE_MODES:
        raise ConfigError("mode", mode, f"one of {COMBINE_MODES}")
    if not 0.0 <= cap <= 1.0:
        raise ConfigError("cap", cap, "0 <= cap <= 1")
    g = gate[..., None].astype(read.dtype)
    if mode == "sum":
        return refine(g * read)
    if dense is None:
        raise ConfigError("dense", None, f"an array when mode = {mode!r}")
    if mode == "capped_rms":
        read, dense = rms_normalize(read), rms_normalize(dense)
    mixed = refine(g * read)
    if mode == "convex":
        return mixed + (1 - g) * dense
    if mode == "interpolate":
        return cap * mixed + (1 - cap) * dense
    return cap * mixed + (1 - cap * g) * dense
