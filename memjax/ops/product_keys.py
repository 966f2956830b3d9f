"""Product keys: scores of two halves of a query, and the best slots of their grid.

What: half scores (dot product, inverse distance), the exact pruned search for the best
K of N * N slots, the flat and the exhaustive form of it, `slot_count`.
Why: a table of a million rows is addressed with two products of a thousand sub-keys.
When not: what a selected score weighs is `read_weights`; tables whose rows are not
pairs of sub-keys need `flat_search` only.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax.errors import ConfigError, ShapeError
from memjax.ops.best_pairs import Kept, best_pairs

MAX_SLOTS = 2**31 - 1
MAX_SUB_KEYS = math.isqrt(MAX_SLOTS)


def slot_count(sub_keys: int) -> int:
    """Slots of a square grid: one for every pair of sub-keys, row i * N + j.

    Args:
        sub_keys: sub-keys N of each half.

    Raises:
        ConfigError: N is below 1, or N * N slots do not fit 32-bit integers.

    Source: arXiv:1907.05242, product keys.
    """
    if not 1 <= sub_keys <= MAX_SUB_KEYS:
        raise ConfigError(
            "sub_keys",
            sub_keys,
            f"1 to {MAX_SUB_KEYS} sub-keys a half ({MAX_SLOTS} slots at most)",
        )
    return sub_keys * sub_keys


def check_selection(k: int, n_slots: int, field: str = "k") -> None:
    """ConfigError naming `field` unless 1 <= k <= n_slots.

    k may exceed the sub-keys of one half; the references need k <= N.
    """
    if not 1 <= k <= n_slots:
        raise ConfigError(field, k, f"1 to {n_slots}, the number of slots")


def check_half_selection(
    half_k: int, k: int, n_sub_keys: int, field: str = "half_k"
) -> None:
    """ConfigError naming `field` unless half_k sub-keys of each half hold k slots."""
    if not (1 <= half_k <= n_sub_keys and k <= half_k * half_k):
        raise ConfigError(
            field, half_k, f"1 to {n_sub_keys} sub-keys, whose square is at least {k}"
        )


def half_l2_normalize(q: Array, eps: float = 1e-12) -> Array:
    """q / |q| over the last axis: each half of a query on the unit sphere.

    A vector of length `eps` or less becomes 0 and gets gradient 0; a NaN component
    makes its vector NaN. The length is taken in float32 or wider, the dtype of `q` is
    kept.

    Source: arXiv:1907.05242, released code (each half by itself). Differs: the release
    divides by the bare length, so a zero query is NaN there.
    """
    wide = q.astype(jnp.promote_types(q.dtype, jnp.float32))
    square = jnp.sum(wide * wide, axis=-1, keepdims=True)
    short = square <= eps * eps
    length = jnp.sqrt(jnp.where(short, 1, square))
    return jnp.where(short, 0, wide / length).astype(q.dtype)


def dot_scores(q_HXC: Array, keys_HXNC: Array) -> Array:
    """Scores q . key of every sub-key of each half, without a factor 1 / sqrt(C).

    Args:
        q_HXC: [..., H, X, C], the halves of queries (X = 2; X = 1 for flat keys).
        keys_HXNC: [H, X, N, C], a codebook for every head and half.

    Returns:
        [..., H, X, N] in float32, or float64 if an input is float64. Operands are
        widened before the product, so bfloat16 rounds the inputs only.

    Raises:
        ShapeError: the axes of queries and keys do not fit.

    Cost: one matrix product of T * H * X * N * C.
    Source: arXiv:1907.05242 section 3.1.
    """
    q, keys = fitting(q_HXC, keys_HXNC)
    return _dot(q, keys)


def distance_scores(q_HXC: Array, keys_HXNC: Array, eps: float = 1e-3) -> Array:
    """Scores -log(eps + |q - key|^2): inverse distance weighting (IDW).

    Args:
        q_HXC: [..., H, X, C], the halves of the queries.
        keys_HXNC: [H, X, N, C], a codebook for every head and half.
        eps: > 0; a query that sits on a key scores -log(eps), a maximum.

    Returns:
        [..., H, X, N] in float32, or float64 if an input is float64.

    Raises:
        ShapeError: the axes of queries and keys do not fit.
        ConfigError: eps is not above 0.

    The differences are squared and summed as they stand: |q|^2 + |k|^2 - 2 q.k loses
    the short distances, which are those that count here. Derivatives, of any order, are
    matrix products: they need no differences in memory either, but within a distance
    of eps of a key the gradient, which vanishes there, is rounded at |q| / eps.
    Cost: T * H * X * N * C subtractions; under jit without an array of that size.

    Source: arXiv:2601.00671 and its released code (a square root is taken and squared
    again there; ours never takes one, so that the gradient at distance 0 is finite).
    """
    if not eps > 0:
        raise ConfigError("eps", eps, "above 0")
    q, keys = fitting(q_HXC, keys_HXNC)
    return -jnp.log(eps + _square_distance(q, keys))


class Selection(NamedTuple):
    """The K best slots of every head: [..., H, K] each, best first.

    Equal scores stand lowest slot first, and no slot appears twice.
    """

    scores: Array
    slots: Array


def product_key_search(
    scores_HXN: Array, k: int, half_k: int | None = None
) -> Selection:
    """The k best of the N * N slots, where slot i * N + j scores first[i] + second[j].

    Each half keeps its best min(k, N) sub-keys, the lowest index among equal ones, and
    the search ends among pairs of kept ones (`best_pairs`). A pair (i, j) whose i was
    not kept comes after k pairs (i', j) of kept i', each of which scores more, or as
    much at a lower slot; with the same for j, the k best are pairs of kept sub-keys.

    Args:
        scores_HXN: [..., H, 2, N], any float dtype; half 0 is the high digit.
        k: slots selected for every head, 1 <= k <= N * N.
        half_k: sub-keys that each half keeps, 1 <= half_k <= N and k <= half_k^2;
            None: min(k, N). With fewer than that the search is no longer exact, it
            gives the k best of the grid of the kept (arXiv:2407.04153's released code
            has the option).

    Returns:
        Selection: scores [..., H, k] in float32 or wider, descending; slots int32. The
        gradient goes to the half scores of the selected slots, added up; others get 0.

    Ties: the rule is exact where the sums are. Floats of very different size can have
    equal rounded sums from unequal halves; the scores are then still the k best, and
    only the slots among those equals may differ from an exhaustive search.
    -inf is a legal score (an excluded sub-key) and comes last; a selected slot of score
    -inf fills up the k, weighs 0, and is any one of those. A NaN (of either sign) or a
    +inf among the half scores or the selected sums of a head of a token makes all k
    scores of that head and token NaN, with slots in range (0 to k - 1, unless only a
    sum overflowed); others are untouched.

    Raises:
        ConfigError: k outside 1..N * N, half_k not as above, or N * N slots do not fit
            32-bit integers.
        ShapeError: axis -2 is not the two halves.

    Cost: two top-k of N, and `best_pairs`, per head and token.
    Source: arXiv:1907.05242 section 3.1. Differs: k > N is allowed, ties have a rule.
    """
    first_HN, second_HN = _halves(scores_HXN)
    n = first_HN.shape[-1]
    length = kept_length(k, n, half_k)
    halves = best_of_half(first_HN, length), best_of_half(second_HN, length)
    slots_HK, sound_H = best_slots(*halves, n, k)[1:]
    i_HK, j_HK = slots_HK // n, slots_HK % n
    scores_HK = _pick(first_HN, i_HK) + _pick(second_HN, j_HK)
    return Selection(poison(scores_HK, sound_H), slots_HK)


def kept_length(k: int, n: int, half_k: int | None) -> int:
    """Sub-keys that each half of N keeps for k slots; raises as the search does."""
    check_selection(k, slot_count(n))
    length = min(k, n) if half_k is None else half_k
    check_half_selection(length, k, n)
    return length


def best_of_half(scores_N: Array, length: int) -> Kept:
    """The best sub-keys of a half, lowest index first among equals; no gradient.

    A NaN of either sign counts as +inf, so the first score tells whether there is one.
    """
    plain_N = jnp.where(scores_N == 0, 0, scores_N)  # top-k puts -0 below 0
    ranked_N = jnp.where(scores_N < jnp.inf, plain_N, jnp.inf)
    kept = lax.top_k(lax.stop_gradient(ranked_N), length)
    # XLA knows top-k by its slices of a sort, and loses it where they are sliced again.
    # One barrier for both would take the result as it is, at which XLA on a CPU fails
    # inside shard_map.
    return Kept(*map(lax.optimization_barrier, kept))


def best_slots(first: Kept, second: Kept, n: int, k: int) -> tuple[Array, Array, Array]:
    """(sums [..., k], slots [..., k], sound [...]) of the best of both halves.

    Where a half has a NaN or +inf it is not sound: slots are then any in range.
    """
    sound = (first.scores[..., 0] < jnp.inf) & (second.scores[..., 0] < jnp.inf)

    def calm(kept: Kept) -> Kept:
        places = lax.broadcasted_iota(jnp.int32, kept.index.shape, kept.index.ndim - 1)
        return Kept(
            jnp.where(sound[..., None], kept.scores, 0),
            jnp.where(sound[..., None], kept.index, places),
        )

    return *best_pairs(calm(first), calm(second), n, k), sound


def flat_search(scores_HS: Array, k: int) -> Selection:
    """The k best of S slots that are scored one by one.

    Args:
        scores_HS: [..., H, S], any float dtype.
        k: slots selected for every head, 1 <= k <= S.

    Returns:
        Selection, with dtypes, ties, -inf and NaN as in `product_key_search`.

    Raises:
        ConfigError: k outside 1..S.

    Cost: one top-k of S per head and token. `flat_search(all_slot_scores(s), k)` is the
    exhaustive form of `product_key_search(s, k)`.
    Source: arXiv:1907.05242, the flat-key baseline.
    """
    check_selection(k, scores_HS.shape[-1])
    wide_HS = _widen(scores_HS)
    sound_H = jnp.all(wide_HS < jnp.inf, axis=-1)
    # Top-k orders bit patterns: -0 is below 0, and a NaN is first or last by its sign.
    clean_HS = jnp.where(sound_H[..., None] & (wide_HS != 0), wide_HS, 0)
    slots_HK = lax.top_k(lax.stop_gradient(clean_HS), k)[1]
    return Selection(poison(_pick(wide_HS, slots_HK), sound_H), slots_HK)


def all_slot_scores(scores_HXN: Array) -> Array:
    """The scores of all slots, [..., H, N * N]: first[i] + second[j] at i * N + j.

    Takes half scores [..., H, 2, N] of any float dtype; the sums are in float32 or
    wider. For the dense read of small grids (arXiv:2310.10837, released sweeps) and for
    tests. Raises as `product_key_search` does for the halves.
    """
    first_HN, second_HN = _halves(scores_HXN)
    n_slots = slot_count(first_HN.shape[-1])
    grid_HNN = first_HN[..., :, None] + second_HN[..., None, :]
    return grid_HNN.reshape(*first_HN.shape[:-1], n_slots)


def poison(scores_HK: Array, sound_H: Array) -> Array:
    """NaN for the scores of a head that is not sound, or whose sums overflowed."""
    sound_H = sound_H & jnp.all(scores_HK < jnp.inf, axis=-1)
    return scores_HK + jnp.where(sound_H, 0, jnp.nan)[..., None].astype(scores_HK.dtype)


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def fitting(q_HXC: Array, keys_HXNC: Array) -> tuple[Array, Array]:
    """Queries and keys in one dtype, float32 at least, after a check of their axes."""
    if keys_HXNC.ndim != 4:
        raise ShapeError("keys", tuple(keys_HXNC.shape), "[H, X, N, C]")
    heads, halves, _, width = keys_HXNC.shape
    if q_HXC.shape[-3:] != (heads, halves, width):
        want = f"[..., {heads}, {halves}, {width}] for these keys"
        raise ShapeError("queries", tuple(q_HXC.shape), want)
    dtype = jnp.promote_types(q_HXC.dtype, keys_HXNC.dtype)
    dtype = jnp.promote_types(dtype, jnp.float32)
    return q_HXC.astype(dtype), keys_HXNC.astype(dtype)


def _dot(q_HXC: Array, keys_HXNC: Array) -> Array:
    return jnp.einsum(
        "...hxc,hxnc->...hxn", q_HXC, keys_HXNC, precision=lax.Precision.HIGHEST
    )


@jax.custom_jvp
def _square_distance(q_HXC: Array, keys_HXNC: Array) -> Array:
    apart_HXNC = q_HXC[..., None, :] - keys_HXNC
    return jnp.sum(apart_HXNC * apart_HXNC, axis=-1)


@_square_distance.defjvp
def _square_distance_jvp(primals, tangents):
    """d |q - k|^2 = 2 (q.dq + k.dk - dq.k - q.dk): no array of the differences."""
    (q, keys), (dq, dkeys) = primals, tangents
    own = jnp.sum(q * dq, axis=-1)[..., None] + jnp.sum(keys * dkeys, axis=-1)
    return _square_distance(q, keys), 2 * (own - _dot(dq, keys) - _dot(q, dkeys))


def _halves(scores_HXN: Array) -> tuple[Array, Array]:
    if scores_HXN.ndim < 2 or scores_HXN.shape[-2] != 2:
        raise ShapeError("scores", tuple(scores_HXN.shape), "[..., 2, N]")
    wide_HXN = _widen(scores_HXN)
    return wide_HXN[..., 0, :], wide_HXN[..., 1, :]


def _pick(values: Array, index: Array) -> Array:
    return jnp.take_along_axis(values, index, axis=-1, mode="promise_in_bounds")
