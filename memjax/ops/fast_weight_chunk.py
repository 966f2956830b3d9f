"""One chunk of a fast-weight memory: what its tokens read, and what they write.

What: the settings, `read_chunk`, `write_chunk` and the address loss.
Why: every form of the memory (one for a batch, one for each document, a text in pieces)
    shares the mathematics of a chunk.
When not: whole texts; see `fast_weights` and `fast_weight_documents`.

Source: arXiv:2601.00671, with what its released code does where the two differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax.errors import ConfigError
from memjax.ops.product_keys import (
    distance_scores,
    dot_scores,
    product_key_search,
)
from memjax.ops.read_weights import read_weights

SCORES = ("idw", "dot")
ACTIVATIONS = ("softmax", "relu", "silu")
RULES = ("reference", "contractive")
ENTROPY_EPS = 1e-8
_HIGHEST = lax.Precision.HIGHEST

ReadRows = Callable[[Array], Array]


@dataclass(frozen=True, kw_only=True)
class FastWeightOptions:
    """Static settings of a fast-weight memory.

    Attributes:
        k: slots K read by each head.
        chunk: tokens c read with one state; what they write is read by later chunks.
        lookahead: L; the read of token t is to become the value of token t + L. The
            last L tokens of a chunk have no target.
        score: "idw", -log(1e-3 + |q - key|^2) of each half, or "dot".
        activation: of the scores: "softmax" jointly over all H * K slots of a token,
            "relu" or "silu".
        temperature: divides the scores before the activation.
        learning_rate, weight_decay: of the inner updates; a decay of the values shrinks
            every slot of the table at every chunk.
        grad_clip: clamp each entry of an inner gradient (without decay) to +-1.
        address_weight: of the loss that spreads reads over the sub-keys; 0 or None:
            none.
        values_only: False: the memory loss also moves the sub-keys.
        rule: "reference": the step of a value is K * H times the gradient, which
            overshoots where the weights of a token are peaked (a token alone on its
            slots has its error times 1 - rho * K * H * sum w^2). "contractive": divided
            by the sum of w^2 of the token instead, and no rho. While the sub-keys stand
            still, no chunk can then make the errors of its own tokens grow, in the sum
            of gate * error^2 / sum w^2, for gates and rates up to 1, and a token alone
            on its slots is stored exactly.
    """

    k: int = 8
    chunk: int = 512
    lookahead: int = 1
    score: str = "idw"
    activation: str = "softmax"
    temperature: float = 1.0
    learning_rate: float = 1.0
    weight_decay: float = 0.0
    grad_clip: bool = False
    address_weight: float | None = 1.0
    values_only: bool = True
    rule: str = "reference"

    def __post_init__(self) -> None:
        for field, allowed in (
            ("score", SCORES),
            ("activation", ACTIVATIONS),
            ("rule", RULES),
        ):
            if getattr(self, field) not in allowed:
                raise ConfigError(field, getattr(self, field), f"one of {allowed}")
        for field, least in (("k", 1), ("chunk", 1), ("lookahead", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(field, value, f"an integer >= {least}")
        for field in ("learning_rate", "weight_decay", "address_weight"):
            value = getattr(self, field)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(field, value, "a finite number >= 0")
        if not 0 < self.temperature < float("inf"):
            raise ConfigError("temperature", self.temperature, "above 0 and finite")

    @property
    def moves_keys(self) -> bool:
        """Whether an inner loss reaches the sub-keys."""
        return bool(self.address_weight) or not self.values_only


class FastWeights(NamedTuple):
    """A memory: sub-keys [H, 2, N, C], and a value for each of N * N slots [S, W]."""

    keys_HXNC: Array
    values_SW: Array


class Reads(NamedTuple):
    """What tokens read.

    Attributes:
        scores, slots, weights: [..., H, K]; slots int32.
        out: [..., W], the weighted sum of the rows.
    """

    scores: Array
    slots: Array
    weights: Array
    out: Array


class Writes(NamedTuple):
    """What a chunk of B sequences does to a memory.

    Attributes:
        keys_HXNC: the new sub-keys.
        slots_N, rows_NW: what is added to the values (after their decay); N counts all
            B * c * H * K reads, slot S stands for none.
        losses_BP: gate * mean square error of each pair, without the factor 1/2.
        address: scalar, the address loss.
    """

    keys_HXNC: Array
    slots_N: Array
    rows_NW: Array
    losses_BP: Array
    address: Array


def half_scores(q_HXC: Array, keys_HXNC: Array, options: FastWeightOptions) -> Array:
    """Scores [..., H, 2, N] of every sub-key."""
    score = dot_scores if options.score == "dot" else distance_scores
    return score(q_HXC, keys_HXNC)


def read_chunk(
    keys_HXNC: Array, rows_of: ReadRows, q_HXC: Array, options: FastWeightOptions
) -> Reads:
    """What queries [..., H, 2, C] read from one state of the memory.

    `rows_of` gives rows [..., W] for slots [...]. Ties, NaN and -inf as in
    `product_key_search`.
    """
    scores, slots = product_key_search(
        half_scores(q_HXC, keys_HXNC, options), options.k
    )
    weights = _weights(scores, options)
    return Reads(scores, slots, weights, _sum_rows(weights, rows_of(slots)))


def address_loss(
    keys_HXNC: Array, q_HXC: Array, options: FastWeightOptions, real: Array
) -> Array:
    """address_weight * the negative entropy of where tokens look, both halves added.

    In each half a token looks at its best min(K, N) sub-keys (and those that tie with
    the last) with the softmax of their scores; the mean of that over tokens and heads
    has the entropy -sum p log(p + 1e-8).

    Args:
        q_HXC: [..., H, 2, C].
        real: bool [...]: tokens that count.

    Source: arXiv:2601.00671 eqs. 16-18. As in its code sub-key i of one head and of
    another are taken as one. No token: 0.
    """
    weight = options.address_weight
    if not weight:
        return jnp.zeros((), keys_HXNC.dtype)
    scores_HXN = half_scores(q_HXC, keys_HXNC, options)
    kept = min(options.k, keys_HXNC.shape[2])
    least = lax.stop_gradient(lax.top_k(scores_HXN, kept)[0][..., -1:])
    look = jax.nn.softmax(jnp.where(scores_HXN < least, -jnp.inf, scores_HXN), axis=-1)
    look = jnp.where(real[..., None, None, None], look, 0)
    n_heads = keys_HXNC.shape[0]
    total = jnp.maximum(jnp.sum(real) * n_heads, 1).astype(look.dtype)
    mean_XN = jnp.sum(look, axis=tuple(range(look.ndim - 2))) / total
    return weight * jnp.sum(mean_XN * jnp.log(mean_XN + ENTROPY_EPS))


def write_chunk(
    keys_HXNC: Array,
    rows_of: ReadRows,
    q_HXC: Array,
    target_BcW: Array,
    gate_Bc: Array | None,
    reads: Reads,
    options: FastWeightOptions,
    *,
    mask_Bc: Array | None = None,
    real_Bc: Array | None = None,
) -> Writes:
    """The update that follows a chunk, from what its tokens read.

    With e_t = mask_t * gate_t * (out_t - target_{t+L}), cnt[s] the reads of slot s and
    M the tokens of the chunk (with a mask: its pairs whose mask is not 0),

        V[s] <- (1 - lr * wd) * V[s] - lr * rho / cnt[s] * sum w_tj * a_t * e_t
                                                           over the reads (t, j) of s

    where the rule "reference" has rho = M / pairs and a_t = K * H, and "contractive"
    rho = 1 and a_t = 1 / sum_j w_tj^2. Sub-keys take a gradient step on the address
    loss.

    Args:
        rows_of: rows of the state that `reads` read.
        q_HXC: [B, c, H, 2, C].
        target_BcW, gate_Bc: values and gates; gate None: ones.
        reads: of these tokens, with these keys and rows.
        mask_Bc: weight of each token's loss. A masked token still counts in cnt and in
            the address loss, as in the reference.
        real_Bc: bool; tokens that are there, the first ones of each sequence. Others
            take no part in anything. None: all.

    A chunk of L tokens or fewer has no pairs: values then only decay. Differentiable in
    all floats, without truncation.

    Source: arXiv:2601.00671 eqs. 13-18, rescaled as in its released code. The rule
    "contractive" is ours.
    """
    n_batch, n_tokens = target_BcW.shape[:2]
    n_pairs = max(n_tokens - options.lookahead, 0)
    rate = options.learning_rate
    real = jnp.ones((n_batch, n_tokens), bool) if real_Bc is None else real_Bc
    weigh = jnp.ones((n_batch, n_tokens), reads.out.dtype)
    for factor in (gate_Bc, mask_Bc):
        weigh = weigh if factor is None else weigh * factor.astype(weigh.dtype)
    paired = real[:, :n_pairs] & real[:, n_tokens - n_pairs :]
    weigh = jnp.where(paired, weigh[:, :n_pairs], 0)
    target = target_BcW[:, n_tokens - n_pairs :]
    total = jnp.maximum(jnp.sum(paired), 1).astype(weigh.dtype)

    def losses(out_BcW: Array) -> Array:
        error = out_BcW[:, :n_pairs] - target
        return weigh * jnp.mean(error * error, axis=-1)

    def inner(keys: Array) -> tuple[Array, Array]:
        address = address_loss(keys, q_HXC, options, real)
        if options.values_only or n_pairs == 0:
            return address, address
        chosen = _scores_of(half_scores(q_HXC, keys, options), reads.slots)
        out = _sum_rows(_weights(chosen, options), rows_of(reads.slots))
        return address + 0.5 * jnp.sum(losses(out)) / total, address

    new_keys, address = keys_HXNC, jnp.zeros((), keys_HXNC.dtype)
    if options.weight_decay:
        new_keys = keys_HXNC * (1 - rate * options.weight_decay)
    if options.moves_keys:
        gradient, address = jax.grad(inner, has_aux=True)(keys_HXNC)
        new_keys = new_keys - rate * _clip(gradient, options)

    scale = _step_scale(reads.weights, options)
    if options.rule == "reference":
        n_samples = real if mask_Bc is None else paired & (mask_Bc[:, :n_pairs] > 0)
        scale = scale * (jnp.sum(n_samples) / total)
    error = weigh * scale[:, :n_pairs]
    error = error[..., None] * (reads.out[:, :n_pairs] - target)
    error = jnp.pad(error, ((0, 0), (0, n_tokens - n_pairs), (0, 0)))
    n_slots = keys_HXNC.shape[2] ** 2
    slots_N = jnp.where(real[..., None, None], reads.slots, n_slots).reshape(-1)
    first_N, count_N = _repeats(slots_N)
    shares = reads.weights / count_N.reshape(reads.weights.shape)
    rows = jnp.einsum("bchk,bcw->bchkw", shares, error, precision=_HIGHEST)
    rows_NW = rows.reshape(slots_N.size, -1)
    rows_NW = jnp.where((slots_N < n_slots)[:, None], rows_NW, 0)
    if options.grad_clip:
        rows_NW = _clip(jnp.zeros_like(rows_NW).at[first_N].add(rows_NW), options)
    return Writes(new_keys, slots_N, -rate * rows_NW, losses(reads.out), address)


def _weights(scores_HK: Array, options: FastWeightOptions) -> Array:
    return read_weights(
        scores_HK,
        activation=options.activation,  # pyright: ignore[reportArgumentType]
        over="joint",
        temperature=options.temperature,
    )


def _sum_rows(weights_HK: Array, rows_HKW: Array) -> Array:
    return jnp.einsum("...hk,...hkw->...w", weights_HK, rows_HKW, precision=_HIGHEST)


def _scores_of(scores_HXN: Array, slots_HK: Array) -> Array:
    """Sums of the half scores of given slots."""
    n = scores_HXN.shape[-1]
    first, second = scores_HXN[..., 0, :], scores_HXN[..., 1, :]
    return jnp.take_along_axis(first, slots_HK // n, axis=-1) + jnp.take_along_axis(
        second, slots_HK % n, axis=-1
    )


def _step_scale(weights_HK: Array, options: FastWeightOptions) -> Array:
    """What multiplies a token's share of an update, [...]."""
    if options.rule == "reference":
        n_reads = weights_HK.shape[-1] * weights_HK.shape[-2]
        return jnp.full(weights_HK.shape[:-2], n_reads, weights_HK.dtype)
    square = jnp.sum(weights_HK * weights_HK, axis=(-2, -1))
    return jnp.where(square > 0, 1 / jnp.where(square > 0, square, 1), 0)


def _clip(gradient: Array, options: FastWeightOptions) -> Array:
    return jnp.clip(gradient, -1, 1) if options.grad_clip else gradient


def _repeats(slots_N: Array) -> tuple[Array, Array]:
    """The first entry of the same slot, and how often the slot occurs, for each."""
    order = jnp.argsort(slots_N, stable=True)
    ordered = slots_N[order]
    low = jnp.searchsorted(ordered, slots_N)
    high = jnp.searchsorted(ordered, slots_N, side="right")
    return order[low], high - low
