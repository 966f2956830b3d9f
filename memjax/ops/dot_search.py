"""Scores and search of product keys in one: dot products, never all in memory.

What: `dot_search`, `product_key_search(dot_scores(q, keys), k)` with its gradient.
Why: the scores of all heads and halves are the largest array of a memory, and the best
    of them are found sooner while they are in the cache of a CPU.
When not: scores that are changed before the search (noise, other distances), and
    forward-mode derivatives; the two functions by themselves have those.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax.errors import ShapeError
from memjax.ops.best_pairs import Kept
from memjax.ops.lane_top_k import (
    LANES,
    QUICK,
    best_in_lanes,
    halvings,
    key_scores,
    rank_keys,
)
from memjax.ops.product_keys import (
    Selection,
    best_of_half,
    best_slots,
    fitting,
    kept_length,
    poison,
)

_AT_A_TIME = 2**21


def dot_search(
    q_HXC: Array, keys_HXNC: Array, k: int, half_k: int | None = None
) -> Selection:
    """The k slots of every head that score best, first[i] . q[0] + second[j] . q[1].

    Args:
        q_HXC: [..., H, 2, C], the halves of queries.
        keys_HXNC: [H, 2, N, C], a codebook for every head and half.
        k, half_k: as in `product_key_search`.

    Returns:
        Selection [..., H, k], with dtypes, ties, -inf and NaN as in
        `product_key_search`; scores differ from `dot_scores` by the order of sums.

    Raises:
        ConfigError, ShapeError: as `dot_scores` and `product_key_search`.

    Cost: a matrix product [T, C] x [C, N] and a top-k of N for every head and half. On
        a CPU 2^21 scores at a time where `lane_top_k` is quick, else two heads at once.
        Backward: one array of scores' gradients per head and half, zero but at the k
        selected, and two matrix products.

    Source: arXiv:1907.05242 section 3.1.
    """
    q, keys = fitting(q_HXC, keys_HXNC)
    heads, halves, n, width = keys.shape
    if halves != 2:
        raise ShapeError("keys", tuple(keys.shape), "[H, 2, N, C]")
    lead = q.shape[:-3]
    q_THXC = q.reshape(math.prod(lead), heads, halves, width)
    scores, slots = _search(q_THXC, keys, k, kept_length(k, n, half_k))
    return Selection(scores.reshape(*lead, heads, k), slots.reshape(*lead, heads, k))


def _found(q_THXC: Array, keys_HXNC: Array, k: int, length: int) -> Selection:
    n = keys_HXNC.shape[2]
    if length in QUICK and q_THXC.dtype == jnp.float32 and len(q_THXC):
        first, second = lax.platform_dependent(
            q_THXC,
            keys_HXNC,
            cpu=functools.partial(best_by_counting, length=length),
            default=functools.partial(best_by_top_k, length=length),
        )
    else:
        first, second = best_by_top_k(q_THXC, keys_HXNC, length)
    sums_THK, slots_THK, sound_TH = best_slots(first, second, n, k)
    return Selection(poison(sums_THK, sound_TH), slots_THK)


def best_by_top_k(q_THXC: Array, keys_HXNC: Array, length: int) -> tuple[Kept, Kept]:
    """The best sub-keys of both halves, [T, H, length]."""

    def half(h: int, x: int) -> Kept:
        # One product, one top-k: in a larger program XLA turns top-k into a sort.
        return best_of_half(_matmul(q_THXC[:, h, x], keys_HXNC[h, x].T), length)

    def stacked(x: int) -> Kept:
        kept = [half(h, x) for h in range(len(keys_HXNC))]
        return Kept(*(jnp.stack(part, 1) for part in zip(*kept, strict=True)))

    return stacked(0), stacked(1)


def best_by_counting(
    q_THXC: Array, keys_HXNC: Array, length: int, at_a_time: int = _AT_A_TIME
) -> tuple[Kept, Kept]:
    """`best_by_top_k` on all cores of a CPU: float32, `at_a_time` scores at a time,
    which stay in its cache."""
    n_tokens, heads, halves, width = q_THXC.shape
    lanes = min(LANES, n_tokens)
    most = max(1, at_a_time // (lanes * heads * halves * keys_HXNC.shape[2]))
    n_blocks = -(-n_tokens // lanes)
    n_parts = -(-n_blocks // most)
    some_tokens = lanes * -(-n_blocks // n_parts)
    q_THXC = jnp.pad(q_THXC, ((0, -n_tokens % some_tokens), (0, 0), (0, 0), (0, 0)))
    keys_FNC = keys_HXNC.reshape(heads * halves, -1, width)  # F: heads and halves

    def levels(q_and_keys: tuple[Array, Array]) -> tuple[Array, ...]:
        q_SC, keys_NC = q_and_keys
        scores_NBL = _matmul(keys_NC, q_SC.T).reshape(len(keys_NC), -1, lanes)
        return halvings(rank_keys(jnp.swapaxes(scores_NBL, 0, 1)), length)

    def some(q_SFC: Array) -> Kept:
        found = lax.map(levels, (jnp.swapaxes(q_SFC, 0, 1), keys_FNC))
        found = [x.reshape(-1, *x.shape[2:]) for x in found]
        keys, index = best_in_lanes(found, length)
        return Kept(key_scores(keys), index)

    q_GSFC = q_THXC.reshape(-1, some_tokens, heads * halves, width)
    kept = lax.map(some, q_GSFC)

    def half(x: int, found: Array) -> Array:
        shape = (-1, heads, halves, some_tokens // lanes, length, lanes)
        found_GHBKL = found.reshape(shape)[:, :, x]
        found_GBLHK = found_GHBKL.transpose(0, 2, 4, 1, 3)
        return found_GBLHK.reshape(-1, heads, length)[:n_tokens]

    return Kept(*(half(0, x) for x in kept)), Kept(*(half(1, x) for x in kept))


# Rules for derivatives, with k and the number of kept sub-keys left out of them.
_search: Any = jax.custom_vjp(_found, nondiff_argnums=(2, 3))


def _forward(
    q_THXC: Array, keys_HXNC: Array, k: int, length: int
) -> tuple[Selection, Any]:
    found = _found(q_THXC, keys_HXNC, k, length)
    return found, (q_THXC, keys_HXNC, found.slots)


def _backward(k: int, length: int, saved: Any, bar: Any) -> tuple[Array, Array]:
    """A score's gradient goes to one sub-key of each half."""
    del k, length
    q_THXC, keys_HXNC, slots_THK = saved
    heads, halves, n, _ = keys_HXNC.shape
    index_XTHK = slots_THK // n, slots_THK % n
    q_bars, key_bars = [], []
    for h in range(heads):
        for x in range(halves):
            scores_bar_TN = _spread(bar.scores[:, h], index_XTHK[x][:, h], n)
            q_bars.append(_matmul(scores_bar_TN, keys_HXNC[h, x]))
            key_bars.append(_matmul(scores_bar_TN.T, q_THXC[:, h, x]))
    q_bar_THXC = jnp.stack(q_bars, 1).reshape(q_THXC.shape)
    return q_bar_THXC, jnp.stack(key_bars).reshape(keys_HXNC.shape)


_search.defvjp(_forward, _backward)


def _spread(values_TK: Array, index_TK: Array, n: int) -> Array:
    """[T, N]: zeros, to which the values of a row are added at its indices."""

    def row(values_K: Array, index_K: Array) -> Array:
        zeros_N = jnp.zeros(n, values_K.dtype)
        return zeros_N.at[index_K].add(values_K, mode="promise_in_bounds")

    return jax.vmap(row)(values_TK, index_TK)


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
