"""Top-k by counting, for many lists that lie side by side: quick on a CPU.

What: `rank_keys`, scores as integers that are compared; `halvings` and
    `best_in_lanes`, the best of every list; `in_turn` and `put`, the loops.
Why: XLA's top-k on a CPU compares one pair at a time, on one core. Where lists lie in
    the last axis every step is a vector loop, and all cores share it.
When not: other devices; k outside `QUICK`: few entries are found sooner one by one,
    and for many the cost grows with k * k; lists in rows, which `lax.top_k` takes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# Lists side by side, where a caller cuts many of them into blocks.
LANES = 128
# The k for which this is quicker than XLA's top-k.
QUICK = range(24, 65)
# Entries a step of a loop; with 8 the search took four times as long.
_AT_A_TIME = 17
_LAST = np.int32(np.iinfo(np.int32).min + 1)


def rank_keys(scores: Array) -> Array:
    """int32 that are ordered as float32 scores are: -0 as 0, a NaN as +inf.

    The lowest int32 and the one above it are keys of no score.
    """
    plain = jnp.where(scores == 0, 0, scores)
    bits = lax.bitcast_convert_type(
        jnp.where(plain < jnp.inf, plain, jnp.inf), jnp.int32
    )
    return _flip(bits)


def key_scores(keys: Array) -> Array:
    """The float32 scores of `rank_keys`."""
    return lax.bitcast_convert_type(_flip(keys), jnp.float32)


def _flip(bits: Array) -> Array:
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def halvings(keys_BNL: Array, k: int) -> tuple[Array, ...]:
    """Keys, the larger ones of neighbours, of those again ..., until few are left.

    Each is [B, n, L] with n half of the one before, rounded up. If an entry is among
    the k best then so is its pair among the pairs, and equal entries stand in order.
    """
    found = [keys_BNL]
    while (n := found[-1].shape[1]) > max(2 * k, _AT_A_TIME):
        keys = jnp.pad(
            found[-1], ((0, 0), (0, n % 2), (0, 0)), constant_values=_LAST
        ).reshape(len(keys_BNL), -1, 2, keys_BNL.shape[2])
        found.append(jnp.maximum(keys[:, :, 0], keys[:, :, 1]))
    return tuple(found)


def best_in_lanes(levels: Sequence[Array], k: int) -> tuple[Array, Array]:
    """The k best of the lists [B, N, L] that `halvings` was given, k <= N.

    Args:
        levels: what `halvings` gave for this k, each below 2^31 entries; best of all
            out of a loop, since the compiler would otherwise form them anew for every
            entry.
        k: entries selected.

    Returns:
        (keys, index), int32 [B, k, L]: descending, lowest index first among equals.

    Cost: for every halving some 10 * k * k comparisons and sums, and 2 * k gathers, a
        list.
    """
    *larger, smallest = levels
    keys, index = [smallest], [_entry(smallest)]
    for level in reversed(larger):
        pair, *_ = put(_places(_ranks(keys), k), [index], k)
        index = [2 * pair, 2 * pair + 1]
        keys = [_fetch(level, side) for side in index]
    best, places = put(_ranks(keys), [keys, index], k)
    return best, places


def _fetch(level_BNL: Array, index_BKL: Array) -> Array:
    """Entries of every list; one past the end is worth nothing."""
    blocks, n, lanes = level_BNL.shape
    block, lane = (lax.broadcasted_iota(jnp.int32, index_BKL.shape, x) for x in (0, 2))
    at = (block * n + jnp.minimum(index_BKL, n - 1)) * lanes + lane
    found = level_BNL.reshape(-1).at[at.reshape(-1)].get(mode="promise_in_bounds")
    return jnp.where(index_BKL < n, found.reshape(index_BKL.shape), _LAST)


# Below, a list is dealt out to strands: entry i of strand s comes before entry j of
# strand t if i < j, or if i = j and s < t.


def _ranks(strands: Sequence[Array]) -> list[Array]:
    """How many entries come before each one, larger ones and equal ones above."""

    def count(j: Array, entries: Any, ranks: list[Array]) -> list[Array]:
        return [
            rank
            + sum(
                (other - _after(rank, s, j, t).astype(jnp.int32) >= keys).astype(
                    jnp.int32
                )
                for t, (other,) in enumerate(entries)
            )
            for s, (keys, rank) in enumerate(zip(strands, ranks, strict=True))
        ]

    none = [jnp.zeros(keys.shape, jnp.int32) for keys in strands]
    return in_turn([[keys] for keys in strands], [_LAST], count, none)


def _places(ranks: Sequence[Array], k: int) -> list[Array]:
    """Where the entries of rank below k stand among themselves; k or more: the rest."""

    def count(j: Array, entries: Any, places: list[Array]) -> list[Array]:
        return [
            place
            + sum(
                ((rank < k) & ~_after(place, s, j, t)).astype(jnp.int32)
                for t, (rank,) in enumerate(entries)
            )
            for s, place in enumerate(places)
        ]

    begin = [jnp.where(rank < k, 0, k) for rank in ranks]
    return in_turn([[rank] for rank in ranks], [k], count, begin)


def put(
    places: Sequence[Array], values: Sequence[Sequence[Array]], k: int
) -> list[Array]:
    """[B, k, L] for each list of strands: values at their places, 0 to k - 1."""
    shape = (len(places[0]), k, places[0].shape[2])

    def put_entries(_: Array, entries: Any, found: list[Array]) -> list[Array]:
        for place, *some in entries:
            here = place == _entry(found[0])
            found = [
                jnp.where(here, value, old)
                for value, old in zip(some, found, strict=True)
            ]
        return found

    strands = [[place, *some] for place, *some in zip(places, *values, strict=True)]
    empty = [jnp.zeros(shape, some[0].dtype) for some in values]
    return in_turn(strands, [k] + [0] * len(values), put_entries, empty)


def in_turn(
    strands: Sequence[Sequence[Array]],
    padding: Sequence[Any],
    do: Callable[[Array, Any, list[Array]], list[Array]],
    begin: Sequence[Array],
) -> list[Array]:
    """`do(j, entries, found)` for every j in turn: for a strand its arrays' [B, 1, L].

    Args:
        strands: for each the arrays [B, n, L] that belong together.
        padding: for each of these what stands behind its end.
        do: what follows from `found`; some entries are taken in a step of a loop.
        begin: what is found before the first.
    """
    n = strands[0][0].shape[1]
    n_steps = max(
        2, -(-n // _AT_A_TIME)
    )  # the compiler takes a single step out of its loop
    size = -(-n // n_steps)
    widths = ((0, 0), (0, n_steps * size - n), (0, 0))
    padded = [
        [
            jnp.pad(x, widths, constant_values=value)
            for x, value in zip(strand, padding, strict=True)
        ]
        for strand in strands
    ]

    def step(i: Array, found: list[Array]) -> list[Array]:
        some = [
            [lax.dynamic_slice_in_dim(x, i * size, size, 1) for x in strand]
            for strand in padded
        ]
        for p in range(size):
            entries = [[x[:, p : p + 1] for x in strand] for strand in some]
            found = do(i * size + p, entries, found)
        return found

    return lax.fori_loop(0, n_steps, step, list(begin))


def _after(like: Array, s: int, j: Array, t: int) -> Array:
    """Whether entry j of strand t does not come before each entry of strand s."""
    return _entry(like) < j if t < s else _entry(like) <= j


def _entry(like: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, like.shape, 1)
