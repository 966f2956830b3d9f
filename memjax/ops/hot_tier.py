"""Rows of their own for the most frequent n-grams, beside a hashed table.

What: `HotIndex`, the n-grams that have such a row; `HotLayout`, the rows of every token
    in both tables, on the host and inside jit.
Why: a frequent n-gram that shares its row with others is the one that costs; an exact
    index gives it a row that no other n-gram ever reads (arXiv:2601.16531).
When not: the read; see layers.hot_engram. Counting; see evaluate.hot_ngrams.

An n-gram is found by binary search among sorted 64-bit keys that are one to one, so
there are no false positives, where the source has a minimal perfect hash and a
fingerprint. Windows that reach before a document's start are never hot.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError, DataError
from memjax.ops import uint32_pairs
from memjax.ops.look_back import check_host_ids, device_ids, look_backs
from memjax.ops.ngram_hash import host_ngram_rows, ngram_rows
from memjax.ops.ngram_key import keys_are_exact, ngram_keys
from memjax.ops.ngram_layout import NgramLayout

MISS = -1
# What numpy raises for a file that is none, cut short or of another kind.
_NO_INDEX = (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile)


@dataclass(frozen=True, eq=False)
class HotIndex:
    """The n-grams that may be hot.

    Attributes:
        vocab_size: ids are 0 .. vocab_size - 1 (or classes, where those are hashed).
        keys: {order: uint64 [U]}, the most frequent first, distinct; see
            `ngram_key.ngram_keys`.

    Raises:
        ConfigError: an order whose n-grams have no exact 64-bit keys.
        DataError: keys that are not distinct, or that no n-gram has.
    """

    vocab_size: int
    keys: Mapping[int, np.ndarray]

    def __post_init__(self) -> None:
        for order, keys in self.keys.items():
            if not keys_are_exact(order, self.vocab_size):
                want = f"orders with {self.vocab_size}^order <= 2^64"
                raise ConfigError("orders", order, want)
            largest = self.vocab_size**order - 1
            if keys.dtype != np.uint64 or keys.ndim != 1:
                raise DataError(f"hot keys of order {order} are not uint64 in a row")
            if len(np.unique(keys)) != len(keys) or (keys > largest).any():
                want = f"distinct numbers from 0 to {largest}"
                raise DataError(f"hot keys of order {order} are not {want}")

    @cached_property
    def sha256(self) -> str:
        """SHA-256 (hex) of vocabulary, orders and keys."""
        digest = hashlib.sha256(str(self.vocab_size).encode())
        for order in sorted(self.keys):
            digest.update(f" {order} {len(self.keys[order])} ".encode())
            digest.update(self.keys[order].astype("<u8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write an .npz file, whole or not at all; folders on the way are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {f"keys_{n}": keys for n, keys in self.keys.items()}
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        with scratch.open("wb") as file:
            np.savez(file, vocab_size=np.int64(self.vocab_size), **arrays)
        scratch.replace(path)


def load_hot_index(path: Path | str) -> HotIndex:
    """The index that `HotIndex.save` wrote; read once, and again when it changes.

    Raises:
        DataError: the file is missing or is no such file.
    """
    path = Path(path).expanduser()
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return _load(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _load(path: Path, changed: int, size: int) -> HotIndex:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            keys = {
                int(name.removeprefix("keys_")): file[name]
                for name in file.files
                if name.startswith("keys_")
            }
            return HotIndex(int(file["vocab_size"]), keys)
    except (OSError, *_NO_INDEX) as error:
        raise DataError(f"{path} is no file of hot n-grams: {error}") from None


@dataclass(frozen=True, eq=False)
class HotLayout:
    """Columns of the cold table, then one column for each order in the hot table.

    A hot column holds the row of the n-gram in the hot table (offset + rank, the most
    frequent first), or MISS (-1).

    Attributes:
        cold: the layout of the hashed table, whose rows are read as if all were cold.
        index: of the n-grams.
        hot_rows: for each order of `cold`, how many of its most frequent n-grams are
            hot.

    Raises:
        ConfigError: the index is of other ids, or has fewer n-grams.
    """

    cold: NgramLayout
    index: HotIndex
    hot_rows: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.index.vocab_size != self.cold.vocab_size:
            want = f"{self.cold.vocab_size}, the ids that are hashed"
            raise ConfigError("hot_file", f"vocab_size {self.index.vocab_size}", want)
        for order, wanted in zip(self.cold.orders, self.hot_rows, strict=True):
            there = len(self.index.keys.get(order, ()))
            if wanted > there:
                want = f"at most {there} of order {order}, as the file holds"
                raise ConfigError("hot_rows", wanted, want)

    @property
    def vocab_size(self) -> int:
        """Of the ids that are hashed."""
        return self.cold.vocab_size

    @property
    def max_order(self) -> int:
        """Length of the longest n-gram; the history has one id less."""
        return self.cold.max_order

    @property
    def n_rows(self) -> int:
        """Rows of the cold table."""
        return self.cold.n_rows

    @property
    def n_columns(self) -> int:
        """Cold columns and one for each order."""
        return self.cold.n_columns + len(self.hot_rows)

    def fingerprint(self) -> str:
        """SHA-256 (hex): equal iff the rows mean the same."""
        numbers = [self.cold.fingerprint(), self.hot_rows]
        digest = hashlib.sha256(json.dumps(numbers).encode())
        for order, n in zip(self.cold.orders, self.hot_rows, strict=True):
            digest.update(self._ranked(order, n).astype("<u8").tobytes())
        return digest.hexdigest()

    def rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> jax.Array:
        """int32 [..., T, C + G] inside jit; arguments as in `ngram_hash.ngram_rows`.

        Cost: beside the hash, log2(hot rows) steps of a search for each order. The
        keys are constants of the compiled program, 12 bytes for each hot row.
        """
        options = {"segments_BT": segments_BT, "history_BN": history_BN}
        cold_BTC = ngram_rows(ids_BT, self.cold, **options)
        ids_BT = device_ids(ids_BT, self.vocab_size)
        if history_BN is not None:
            history_BN = device_ids(history_BN, self.vocab_size, "history")
        windows = look_backs(
            ids_BT,
            self.cold.max_order,
            segments_BT=segments_BT,
            history_BN=history_BN,
        )
        zeros_BT = jnp.zeros(ids_BT.shape, jnp.uint32)
        key, whole_BT = (zeros_BT, zeros_BT), jnp.ones(ids_BT.shape, bool)
        hot, offset = [], 0
        for k, (token_BT, blocked_BT) in enumerate(windows):
            inside_BT = (token_BT >= 0) & (token_BT < self.vocab_size)
            whole_BT &= inside_BT & ~blocked_BT
            power = pow(self.vocab_size, k, 2**64)
            digit = jnp.where(inside_BT, token_BT, 0).astype(jnp.uint32)
            key = uint32_pairs.add(key, uint32_pairs.multiply_by(digit, power))
            if k + 1 in self.cold.orders:
                n = self.hot_rows[self.cold.orders.index(k + 1)]
                ranked = self._ranked(k + 1, n)
                hot.append(_found(key, whole_BT, ranked, offset))
                offset += n
        return jnp.concatenate([cold_BTC, jnp.stack(hot, axis=-1)], axis=-1)

    def host_rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> np.ndarray:
        """`rows` on the host, bit-equal; DataError for an id outside."""
        ids_BT = check_host_ids(ids_BT, self.vocab_size)
        options = {"segments_BT": segments_BT, "history_BN": history_BN}
        cold_BTC = host_ngram_rows(ids_BT, self.cold, **options)
        windows = look_backs(ids_BT, self.cold.max_order, **options)
        tokens = [np.where(blocked, 0, token) for token, blocked in windows]
        hot, offset = [], 0
        for order, n in zip(self.cold.orders, self.hot_rows, strict=True):
            keys_BT = ngram_keys(tokens[:order], self.vocab_size)
            row_of = {int(x): i for i, x in enumerate(self._ranked(order, n), offset)}
            rows = [row_of.get(int(key), MISS) for key in keys_BT.ravel()]
            rows_BT = np.array(rows, np.int32).reshape(keys_BT.shape)
            hot.append(np.where(windows[order - 1][1], np.int32(MISS), rows_BT))
            offset += n
        return np.concatenate([cold_BTC, np.stack(hot, axis=-1)], axis=-1)

    def _ranked(self, order: int, n: int) -> np.ndarray:
        return self.index.keys[order][:n] if n else np.zeros(0, np.uint64)


def _found(
    key: uint32_pairs.Pair, whole_BT: jax.Array, ranked: np.ndarray, offset: int
) -> jax.Array:
    """offset + rank of each key among `ranked`, or MISS; int32."""
    if not len(ranked):
        return jnp.full(whole_BT.shape, MISS, jnp.int32)
    order = np.argsort(ranked, kind="stable")
    high, low = (jnp.asarray(half) for half in uint32_pairs.split64(ranked[order]))
    ranks = jnp.asarray(order.astype(np.int32))
    place = first_not_below(key, (high, low))
    at = jnp.minimum(place, len(ranked) - 1)
    hit = (high[at] == key[0]) & (low[at] == key[1]) & whole_BT
    return jnp.where(hit, ranks[at] + np.int32(offset), np.int32(MISS))


def first_not_below(key: uint32_pairs.Pair, ascending: uint32_pairs.Pair) -> jax.Array:
    """How many of the 64-bit numbers `ascending` [U] are below each key; int32."""
    high, low = ascending
    n = high.shape[0]

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> Any:
        least, most = bounds
        middle = (least + most) // 2
        at = jnp.minimum(middle, n - 1)
        same = high[at] == key[0]
        below = (high[at] < key[0]) | (same & (low[at] < key[1]))
        below &= least < most
        return jnp.where(below, middle + 1, least), jnp.where(below, most, middle)

    zeros = jnp.zeros(key[0].shape, jnp.int32)
    steps = int(n).bit_length()
    start = zeros, zeros + np.int32(n)
    return jax.lax.fori_loop(np.int32(0), np.int32(steps), halve, start)[0]
