"""Experts chosen by the token alone: tables built on the host, and a hash of two ids.

What: integer tables [V, K] (random, balanced, sliced), their look-up and load, and the
    bigram hash.
Why: routing without a learned choice needs no balance loss, and the first layers of
    DeepSeek-V4 are published in this form.
When not: how the chosen experts are weighted is `routing.given_experts`.

Source: Roller et al., arXiv:2106.04426 (random, balanced, bigram and multi-hash). The
tables of DeepSeek-V4 are shipped as data, and how they were made is not published.
A table is part of a model: save it. numpy does not promise its random stream for ever.
"""

import heapq
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError, ShapeError
from memjax.ops.look_back import BAD_ROW, check_host_ids, device_ids
from memjax.ops.ngram_hash import host_ngram_rows, ngram_rows
from memjax.ops.ngram_layout import NgramLayout, ngram_layouts
from memjax.ops.routing import check_choice

_DRAWN_AT_ONCE = 1 << 22


def random_table(
    vocab_size: int, n_experts: int, k: int = 1, *, seed: int = 0
) -> np.ndarray:
    """int32 [V, K]: k distinct experts for each token, every choice equally likely.

    Raises:
        ConfigError: vocab_size or n_experts below 1, k not in 1 .. n_experts, seed < 0.

    Cost: V * E random numbers and sorts of E, a few million at a time.
    """
    _check(vocab_size, n_experts, k, seed)
    random = np.random.default_rng(seed)
    step = max(1, _DRAWN_AT_ONCE // n_experts)
    parts = [
        random.random((min(step, vocab_size - start), n_experts))
        .argsort(axis=1, kind="stable")[:, :k]
        .astype(np.int32)
        for start in range(0, vocab_size, step)
    ]
    return np.concatenate(parts)


def balanced_table(counts_V: Any, n_experts: int, k: int = 1) -> np.ndarray:
    """int32 [V, K]: frequent tokens first, each to the k experts that are lightest.

    The weight of an expert is the sum of the counts of its tokens. Equal counts: the
    lower token id first; equally light experts: the lower index first. A token that is
    more frequent than a fair share still makes its experts too heavy (`table_load`).

    Args:
        counts_V: integers >= 0, how often each token occurs in the training text.

    Raises:
        ConfigError: no token, n_experts below 1, or k not in 1 .. n_experts.
        ShapeError: the counts are not one row of integers >= 0.

    Cost: V * K steps of a heap of E, in python: a third of a second for 10^5 tokens.
    """
    counts_V = _counts(counts_V)
    _check(len(counts_V), n_experts, k, 0)
    table_VK = np.empty((len(counts_V), k), np.int32)
    heap = [(0, expert) for expert in range(n_experts)]
    for token in np.argsort(-counts_V, kind="stable"):
        lightest = [heapq.heappop(heap) for _ in range(k)]
        table_VK[token] = [expert for _, expert in lightest]
        for weight, expert in lightest:
            heapq.heappush(heap, (weight + int(counts_V[token]), expert))
    return table_VK


def sliced_table(
    vocab_size: int, n_experts: int, k: int, *, seed: int = 0
) -> np.ndarray:
    """int32 [V, K]: choice j is one of the E / K experts of slice j, drawn alone.

    The multi-hash of the paper: K independent hashes, each of which picks one slice of
    the feed-forward. With experts of width d_ff / K, uniform weights and a route scale
    of K the chosen slices add up to one feed-forward of width d_ff.

    Raises:
        ConfigError: as `random_table`, and when k does not divide n_experts.
    """
    _check(vocab_size, n_experts, k, seed)
    if n_experts % k:
        raise ConfigError("n_experts", n_experts, f"a multiple of k = {k}")
    slice_size = n_experts // k
    drawn_VK = np.random.default_rng(seed).integers(0, slice_size, (vocab_size, k))
    return (drawn_VK + slice_size * np.arange(k)).astype(np.int32)


def table_load(table_VK: Any, counts_V: Any, n_experts: int) -> np.ndarray:
    """int64 [E]: pairs that each expert gets from a text with these token counts."""
    table_VK, counts_V = np.asarray(table_VK), _counts(counts_V)
    if table_VK.ndim != 2 or len(table_VK) != len(counts_V):
        raise ShapeError("table", table_VK.shape, (len(counts_V), "K"))
    load_E = np.zeros(n_experts, np.int64)
    np.add.at(load_E, table_VK, counts_V[:, None])
    return load_E


def table_experts(table_VK: Any, ids: Any) -> Any:
    """The experts [..., K] of token ids [...]: numpy for numpy, jax for jax.

    Args:
        table_VK: integers; int32 on the device.
        ids: raw token ids. DEAD (-1) gives BAD_ROW, which is no expert: such a token is
            masked, or its weights are NaN. So do ids that do not exist, inside jit.

    Raises:
        DataError: an id of the host is outside [-1, V).
    """
    n_ids = len(table_VK)
    if not isinstance(ids, jax.Array):
        ids = check_host_ids(ids, n_ids)
        found = np.asarray(table_VK)[np.maximum(ids, 0)]
        return np.where((ids >= 0)[..., None], found, BAD_ROW).astype(np.int32)
    ids = device_ids(ids, n_ids)
    known = (ids >= 0) & (ids < n_ids)
    found = jnp.asarray(table_VK, jnp.int32)[jnp.where(known, ids, 0)]
    return jnp.where(known[..., None], found, BAD_ROW)


def bigram_layout(
    *,
    vocab_size: int,
    pad_id: int,
    n_experts: int,
    k: int = 1,
    seed: int = 0,
    layer_id: int = 0,
) -> NgramLayout:
    """The numbers of a bigram hash onto experts, for `bigram_experts`.

    The multipliers are those of an n-gram table of this layer and seed; the k moduli
    are E, E - 1, .. instead of primes.

    Raises:
        ConfigError: a size is not allowed, or k is not in 1 .. n_experts.
    """
    _check(vocab_size, n_experts, k, seed)
    (layout,) = ngram_layouts(
        vocab_size=vocab_size,
        pad_id=pad_id,
        orders=(2,),
        n_heads=1,
        rows_per_head=1,
        layer_ids=(layer_id,),
        seed=seed,
    )
    moduli = tuple(range(n_experts, n_experts - k, -1))
    return replace(
        layout,
        n_heads=k,
        primes=(moduli,),
        offsets=tuple(accumulate(moduli, initial=0))[:-1],
        n_rows=sum(moduli),
    )


def bigram_experts(
    ids_BT: Any, layout: NgramLayout, *, segments_BT: Any = None, history_BN: Any = None
) -> Any:
    """k distinct experts of each pair (token before, token): numpy or jax, as the ids.

    With mix = the n-gram hash of both ids, the first expert is mix mod E and the next
    is number mix mod (E - 1) of those that are left, and so on.

    Args:
        ids_BT: [..., T]; -1 is DEAD. Before the start of a document stands `pad_id`.
        layout: of `bigram_layout`.
        segments_BT, history_BN: as in `ops.ngram_hash.ngram_rows`; history [..., 1].

    Returns:
        int32 [..., T, K]; BAD_ROW, no expert, for ids that do not exist (inside jit).

    Raises:
        DataError: an id of the host is out of range.

    Differs from the paper only in the hash, which it leaves open. If E is a power of
    two, the expert depends on the low bits of the two ids only.
    """
    on_device = isinstance(ids_BT, jax.Array)
    rows = ngram_rows if on_device else host_ngram_rows
    rows_BTK = rows(ids_BT, layout, segments_BT=segments_BT, history_BN=history_BN)
    xp: Any = jnp if on_device else np
    chosen: list[Any] = []
    for k, offset in enumerate(layout.offsets):
        expert = rows_BTK[..., k] - offset
        if chosen:
            for taken in xp.moveaxis(xp.sort(xp.stack(chosen, -1), axis=-1), -1, 0):
                expert = expert + (taken <= expert)
        chosen.append(expert)
    found = xp.stack(chosen, axis=-1)
    return xp.where(rows_BTK == BAD_ROW, BAD_ROW, found).astype(np.int32)


def _counts(counts_V: Any) -> np.ndarray:
    counts_V = np.asarray(counts_V)
    if counts_V.ndim != 1 or counts_V.dtype.kind not in "iu" or (counts_V < 0).any():
        raise ShapeError("counts", counts_V.shape, "one row of integers >= 0")
    return counts_V.astype(np.int64)


def _check(vocab_size: int, n_experts: int, k: int, seed: int) -> None:
    for field, value in (("vocab_size", vocab_size), ("n_experts", n_experts)):
        if value < 1:
            raise ConfigError(field, value, "at least 1")
    check_choice(n_experts, k)
    if seed < 0:
        raise ConfigError("seed", seed, "0 or more")
