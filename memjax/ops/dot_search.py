"""Scores and search of product keys in one: dot products, never all in memory.

What: `dot_search`, `product_key_search(dot_scores(q, keys), k)` with its gradient.
Why: the scores of all heads and halves are the largest array of a memory, and top-k of
    a CPU is quick on a matrix that a product just made.
When not: scores that are changed before the search (noise, other distances), and
    forward-mode derivatives; the two functions by themselves have those.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax.errors import ShapeError
from memjax.ops.best_pairs import Kept
from memjax.ops.product_keys import (
    Selection,
    best_of_half,
    best_slots,
    fitting,
    kept_length,
    poison,
)


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

    Cost: a matrix product [T, C] x [C, N] and a top-k of N for every head and half, of
        which a CPU holds two at a time. Backward: one array of scores' gradients per
        head and half, zero but at the k selected, and two matrix products.

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
    heads, _, n, _ = keys_HXNC.shape

    def half(h: int, x: int) -> Kept:
        # One product, one top-k: in a larger program XLA turns top-k into a sort.
        return best_of_half(_matmul(q_THXC[:, h, x], keys_HXNC[h, x].T), length)

    def stacked(x: int) -> Kept:
        kept = [half(h, x) for h in range(heads)]
        return Kept(*(jnp.stack(part, 1) for part in zip(*kept, strict=True)))

    sums_THK, slots_THK, sound_TH = best_slots(stacked(0), stacked(1), n, k)
    return Selection(poison(sums_THK, sound_TH), slots_THK)


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
