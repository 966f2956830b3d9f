"""Weights of a sparse read: from the scores of the selected slots.

What: `read_weights`: temperature, activation, subtraction, L1 normalisation, in order.
Why: the product-key papers differ in these four steps and in little else; the guards
against "nothing selected" and division by zero stand in one place.
When not: the weighted sum over rows is `embedding_bag`.
"""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax.errors import ConfigError, ShapeError

Activation = Literal["softmax", "relu", "silu", "none"]
Over = Literal["head", "joint"]
Subtract = Literal["none", "min", "mean", "median"]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
OVERS: tuple[str, ...] = get_args(Over)
SUBTRACTS: tuple[str, ...] = get_args(Subtract)
_ELEMENTWISE = {"relu": jax.nn.relu, "silu": jax.nn.silu, "none": lambda scores: scores}


def read_weights(
    scores_HK: Array,
    *,
    activation: Activation = "softmax",
    over: Over = "head",
    temperature: float = 1.0,
    subtract: Subtract = "none",
    normalize: bool = False,
) -> Array:
    """Weights of the K selected slots of every head, from their scores.

    In this order: s / temperature; the activation; minus the min, mean or median over
    K; divided by the sum of |w| over K. The last two act per head, always.

    Args:
        scores_HK: [..., H, K], any float dtype and order. -inf marks "not selected".
        activation: "softmax"; "relu" (arXiv:2302.06461, 2310.10837); "silu"
            (arXiv:2601.00671); "none", the scores themselves.
        over: the axis the softmax sums to 1 over: "head", the K slots of each head
            (arXiv:1907.05242, 2412.09764, 2407.04153), or "joint", all H * K slots of
            a token (arXiv:2601.00671, and 2310.10837 with a softmax). The other
            activations are elementwise and know no such axis.
        temperature: > 0, finite.
        subtract: "median" is the lower middle value for an even count, as in torch
            (`jnp.median` averages two). min and median pass their gradient to the one
            element they are; among equal ones, the first.
        normalize: whether to divide. After a softmax without `subtract` it changes
            nothing but rounding.

    Returns:
        [..., H, K] in float32 or wider.

    Empty cases: an entry of -inf weighs exactly 0, has gradient 0 and takes no part in
    min, mean, median and norm, as if it were not there; all -inf gives all 0. Where the
    norm is 0 the weights are 0 with gradient 0; equal weights minus their min, mean or
    median are exactly 0, so this is what they give. NaN stays NaN, and through a
    softmax makes all it is summed with NaN; so does +inf.

    Raises:
        ConfigError: an unknown name, or a temperature that is not positive and finite.
        ShapeError: `scores_HK` lacks the axes H, K.

    Source: facebookresearch/XLM, order of the re-scoring. Differs: the release divides
    by 0 where the norm is 0.
    """
    _check(activation, over, temperature, subtract)
    if scores_HK.ndim < 2:
        raise ShapeError("scores", tuple(scores_HK.shape), "[..., H, K]")
    wide = scores_HK.astype(jnp.promote_types(scores_HK.dtype, jnp.float32))
    alive = wide != -jnp.inf
    scaled = wide / temperature
    if activation == "softmax":
        weights = _softmax(scaled, (-2, -1) if over == "joint" else (-1,))
    else:
        weights = _ELEMENTWISE[activation](jnp.where(alive, scaled, 0))
    if subtract != "none":
        weights = weights - _level(weights, alive, subtract)
    weights = jnp.where(alive, weights, 0)
    return _l1_normalize(weights) if normalize else weights


def _check(activation: str, over: str, temperature: float, subtract: str) -> None:
    for field, value, allowed in (
        ("activation", activation, ACTIVATIONS),
        ("over", over, OVERS),
        ("subtract", subtract, SUBTRACTS),
    ):
        if value not in allowed:
            raise ConfigError(field, value, f"one of {allowed}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError("temperature", temperature, "above 0 and finite")


def _softmax(scores: Array, axes: tuple[int, ...]) -> Array:
    """Softmax in which -inf weighs 0 even if there is nothing else."""
    top = lax.stop_gradient(jnp.max(scores, axis=axes, keepdims=True))
    grown = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(grown, axis=axes, keepdims=True)
    return grown / jnp.where(total == 0, 1, total)


def _level(weights: Array, alive: Array, kind: str) -> Array:
    """The min, mean or lower median of the entries that are alive, [..., 1]."""
    count = jnp.sum(alive, axis=-1, keepdims=True, dtype=jnp.int32)
    order = jnp.argsort(jnp.where(alive, weights, jnp.inf), axis=-1)
    rank = jnp.maximum(count - 1, 0) // 2 if kind == "median" else 0 * count
    level = jnp.take_along_axis(
        weights, jnp.take_along_axis(order, rank, axis=-1), axis=-1
    )
    if kind != "mean":
        return level
    # The mean of differences to one of them: exact where all weights are equal.
    level = lax.stop_gradient(level)
    above = jnp.sum(jnp.where(alive, weights - level, 0), axis=-1, keepdims=True)
    return level + above / jnp.maximum(count, 1)


def _l1_normalize(weights: Array) -> Array:
    norm = jnp.sum(jnp.abs(weights), axis=-1, keepdims=True)
    return jnp.where(norm == 0, 0, weights / jnp.where(norm == 0, 1, norm))
