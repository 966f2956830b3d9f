"""Which experts a token goes to, with which weights, and the way there and back.

What: scores, the choice (learned or handed in), loads and the balance loss, and the
    sorting of tokens by expert that makes an exact mixture without a capacity.
Why: routing is a handful of small rules (ties, normalisation, padding), each easy to
    get wrong and invisible in a loss curve.
When not: the experts themselves are layers; tables of hash routing are `hash_routing`.

Axes: N tokens, E experts, K experts of a token, P = N * K pairs of both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from memjax.arrays import check_shape
from memjax.errors import ConfigError, ShapeError

SCORES = ("softmax", "sqrt_softplus")
_TAIL = -40.0  # below, softplus(x) is exp(x) to within one part in 10^17


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        experts: int32 [..., K], in [0, E).
        weights: [..., K], of the outputs, in float32 or wider.
    """

    experts: Array
    weights: Array


def routing_scores(logits: Array, kind: str = "softmax") -> Array:
    """Non-negative scores [..., E] of logits [..., E], in float32 or wider.

    Args:
        kind: "softmax" over the experts (Switch, arXiv:2101.03961), or "sqrt_softplus",
            sqrt(log(1 + exp(x))) of each (the gate of DeepSeek-V4, as public ports read
            it). For very negative logits the latter is exp(x / 2), value and gradient,
            where the plain formula has the gradient 0 / 0.

    Raises:
        ConfigError: unknown `kind`.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if kind == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    if kind == "sqrt_softplus":
        root = jnp.sqrt(jax.nn.softplus(jnp.maximum(logits, _TAIL)))
        return jnp.where(logits < _TAIL, jnp.exp(jnp.minimum(logits, _TAIL) / 2), root)
    raise ConfigError("scores", kind, f"one of {SCORES}")


def choose_experts(
    scores: Array, k: int, *, normalize: bool = True, scale: float = 1.0
) -> Routing:
    """The k experts of largest score; equal scores: the lowest index first.

    Args:
        scores: [..., E], >= 0. A token with a NaN gets weights NaN.
        k: 1 <= k <= E.
        normalize: weights are divided by their sum; where that is 0 they stay 0.
        scale: factor on the weights.

    Returns:
        `Routing`, by descending score. Gradient reaches the scores of chosen experts
        only; with k = 1 and `normalize` the weight is `scale` and there is none.

    Raises:
        ConfigError: k out of range.
    """
    check_choice(scores.shape[-1], k)
    chosen, experts = jax.lax.top_k(scores, k)
    is_nan = jnp.any(jnp.isnan(scores), axis=-1, keepdims=True)
    chosen = jnp.where(is_nan, jnp.nan, chosen)
    return Routing(experts.astype(jnp.int32), _weights(chosen, normalize, scale))


def given_experts(
    experts: Array,
    n_experts: int,
    scores: Array | None = None,
    *,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Routing to experts that something else chose (hash routing).

    Args:
        experts: integers [..., K]. An index outside [0, E) gives the weights NaN.
        n_experts: E.
        scores: [..., E], >= 0, of a learned gate: the weights are those of the given
            experts. None: every weight is scale / K (Roller et al., arXiv:2106.04426,
            with K = 1).
        normalize, scale: as in `choose_experts`.

    Raises:
        ShapeError: scores and experts do not fit.
    """
    experts = jnp.asarray(experts)
    inside = (experts >= 0) & (experts < n_experts)
    experts = jnp.where(inside, experts, 0).astype(jnp.int32)
    if scores is None:
        chosen, normalize = jnp.full(experts.shape, 1 / experts.shape[-1]), False
    else:
        check_shape("scores", scores, (*experts.shape[:-1], n_experts))
        chosen = jnp.take_along_axis(scores, experts, axis=-1)
    chosen = jnp.where(inside, chosen, jnp.nan)
    return Routing(experts, _weights(chosen, normalize, scale))


def expert_load(experts: Array, n_experts: int, mask: Array | None = None) -> Array:
    """How many (token, choice) pairs each expert got: int32 [E].

    Args:
        experts: integers [..., K]; those outside [0, E) count for none.
        mask: bool [...]; False is padding, which is not counted.
    """
    counted = (experts >= 0) & (experts < n_experts)
    if mask is not None:
        check_shape("mask", mask, tuple(experts.shape[:-1]))
        counted &= mask[..., None]
    index = jnp.where(counted, experts, n_experts).ravel()
    ones = jnp.ones(index.shape, jnp.int32)
    return jax.ops.segment_sum(ones, index, n_experts + 1)[:n_experts]


def balance_loss(scores: Array, load_E: Array, mask: Array | None = None) -> Array:
    """E * sum over experts of (share of the load) * (mean share of the scores).

    It is 1 for a uniform choice and, where load follows scores, least there; E when one
    expert takes all. The gradient goes through the scores only.

    Args:
        scores: [..., E], >= 0; each token's are divided by their sum first.
        load_E: of the same tokens (`expert_load`), over all K choices.
        mask: bool [...]; False is padding and takes no part.

    Returns:
        Scalar, dtype of `scores`; 0 when there is no token.

    Source: arXiv:2101.03961 eq. 4-6, with the K choices of a token counted as K.
    """
    n_experts = scores.shape[-1]
    check_shape("load", load_E, (n_experts,))
    total = jnp.sum(scores, axis=-1, keepdims=True)
    shares = scores / jnp.where(total == 0, 1, total)
    real = jnp.ones(scores.shape[:-1], bool) if mask is None else mask
    shares = jnp.where(real[..., None], shares, 0).reshape(-1, n_experts)
    mean_E = jnp.sum(shares, axis=0) / jnp.maximum(jnp.sum(real), 1)
    load_E = load_E.astype(scores.dtype)
    return n_experts * jnp.sum(load_E / jnp.maximum(jnp.sum(load_E), 1) * mean_E)


class Dispatch(NamedTuple):
    """Pairs of token and expert, sorted by expert.

    Attributes:
        x_PD: the token of each pair.
        sizes_E: int32, pairs of each expert; they sum to P.
        order_P: pair t * K + k that stands at each place; places_P: its inverse.
    """

    x_PD: Array
    sizes_E: Array
    order_P: Array
    places_P: Array


def dispatch(x_ND: Array, experts_NK: Array, n_experts: int) -> Dispatch:
    """Sort the tokens by expert; every pair has a place, none is dropped.

    Args:
        x_ND: [N, D]; experts_NK: int32, in [0, E).

    Cost: one sort of N * K numbers and a copy of K * N rows. Pairs of one expert keep
    the order of their tokens; sums of the backward pass have a fixed order.
    """
    n_tokens, k = experts_NK.shape
    if x_ND.shape[0] != n_tokens:
        raise ShapeError("x", tuple(x_ND.shape), f"[{n_tokens}, D]")
    order_P = jnp.argsort(experts_NK.ravel(), stable=True).astype(jnp.int32)
    places_P = jnp.zeros_like(order_P)
    places_P = places_P.at[order_P].set(
        jnp.arange(n_tokens * k, dtype=jnp.int32), unique_indices=True
    )
    # Each pair owns its row, so that the gradient of this copy adds in a fixed order.
    x_PD = jnp.repeat(x_ND[:, None], k, axis=1).reshape(n_tokens * k, -1)
    x_PD = x_PD.at[order_P].get(unique_indices=True)
    return Dispatch(x_PD, expert_load(experts_NK, n_experts), order_P, places_P)


def combine_experts(y_PD: Array, sent: Dispatch, weights_NK: Array) -> Array:
    """Back to tokens: sum over k of weight * output, [N, D] in the dtype of weights."""
    n_tokens, k = weights_NK.shape
    y_PD = y_PD.at[sent.places_P].get(unique_indices=True)
    y_NKD = y_PD.reshape(n_tokens, k, -1).astype(weights_NK.dtype)
    return jnp.sum(y_NKD * weights_NK[..., None], axis=1)


def check_choice(n_experts: int, k: int, field: str = "k") -> None:
    """ConfigError unless 1 <= k <= n_experts."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= n_experts:
        raise ConfigError(field, k, f"1 to the number of experts, {n_experts}")


def _weights(chosen: Array, normalize: bool, scale: float) -> Array:
    if normalize:
        total = jnp.sum(chosen, axis=-1, keepdims=True)
        chosen = chosen / jnp.where(total == 0, 1, total)
    return chosen * scale
