"""Bytes to table rows: FNV-1a over the last n bytes.

What: 64-bit FNV-1a of every byte's last n bytes, and its row, on the host and in jit.
Why: byte-level models address their tables without a tokenizer; the published byte
    model of this kind (sehaxe/dormouse) does it this way.
When not: for token ids; see ngram_hash.

h = basis; for each byte of the window, oldest first: h = (h xor byte) * prime mod 2^64.
A window is shorter, never padded, where fewer bytes may be seen (see look_back).
Index = h mod slots, row = index + slots of the orders before it.

Source: sehaxe/dormouse crates/dormouse-data/src/lib.rs, whose offset basis lacks the
last digit of the FNV standard's: basis="dormouse" or "standard".
Differs: segments and DEAD (-1) bytes are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError
from memjax.ops import uint32_pairs
from memjax.ops.column_layout import ColumnLayout
from memjax.ops.look_back import (
    BAD_ROW,
    DEAD,
    check_host_ids,
    device_ids,
    look_backs,
)

FNV_PRIME = 2**40 + 0x1B3
FNV_BASES = {"dormouse": 1469598103934665603, "standard": 14695981039346656037}
_N_BYTES = 256


def host_byte_fnv(
    bytes_BT: Any,
    orders: Sequence[int],
    *,
    basis: str = "dormouse",
    segments_BT: Any = None,
    history_BN: Any = None,
) -> np.ndarray:
    """The 64-bit hashes of every byte's last n bytes, in numpy uint64.

    Args:
        bytes_BT: integers 0 .. 255 [..., T] (uint8 or wider); -1 is no byte.
        orders: window lengths, distinct, each at least 1; a column each, as listed.
        basis: "dormouse" or "standard".
        segments_BT: as in `ngram_hash.ngram_rows`.
        history_BN: the max(orders) - 1 bytes before, as in `ngram_hash.ngram_rows`.

    Returns:
        uint64 [..., T, G], one per order. A window without bytes gives the basis.

    Raises:
        DataError: a value is outside 0 .. 255. ConfigError: orders or basis.
    """
    start = _check(orders, basis)
    bytes_BT = check_host_ids(bytes_BT, _N_BYTES, "bytes")
    if history_BN is not None:
        history_BN = check_host_ids(history_BN, _N_BYTES, "history")
    if segments_BT is not None:
        segments_BT = np.asarray(segments_BT)
    windows = look_backs(
        bytes_BT, max(orders), segments_BT=segments_BT, history_BN=history_BN
    )
    hashes = []
    for n in orders:
        hash_BT = np.full(bytes_BT.shape, start, np.uint64)
        for byte_BT, blocked_BT in reversed(windows[:n]):
            mixed_BT = (hash_BT ^ byte_BT.astype(np.uint64)) * np.uint64(FNV_PRIME)
            hash_BT = np.where(blocked_BT, hash_BT, mixed_BT)
        hashes.append(hash_BT)
    return np.stack(hashes, axis=-1)


def host_byte_fnv_rows(
    bytes_BT: Any,
    orders: Sequence[int],
    n_slots: Sequence[int],
    *,
    basis: str = "dormouse",
    segments_BT: Any = None,
    history_BN: Any = None,
) -> np.ndarray:
    """The table rows of every byte on the host; one column per order.

    Args:
        n_slots: rows of each order's part of the table, need not be prime; together
            at most 2^31 - 1.
        bytes_BT, orders, basis, segments_BT, history_BN: as in `host_byte_fnv`.

    Returns:
        int32 rows [..., T, G], the parts of earlier orders counted in.

    Raises:
        DataError, ConfigError: as in `host_byte_fnv`, or `n_slots` does not fit.
    """
    offsets = _check_slots(orders, n_slots, basis)
    hash_BTG = host_byte_fnv(
        bytes_BT, orders, basis=basis, segments_BT=segments_BT, history_BN=history_BN
    )
    index_BTG = (hash_BTG % np.array(n_slots, np.uint64)).astype(np.int64)
    return (index_BTG + offsets).astype(np.int32)


def byte_fnv(
    bytes_BT: Any,
    orders: Sequence[int],
    *,
    basis: str = "dormouse",
    segments_BT: Any = None,
    history_BN: Any = None,
) -> uint32_pairs.Pair:
    """`host_byte_fnv` inside jit: (high, low) uint32 halves [..., T, G], bit-equal.

    Values outside 0 .. 255 raise DataError in host arrays; a traced one gives a hash
    without meaning, which `byte_fnv_rows` turns into BAD_ROW.
    """
    return _device_fnv(bytes_BT, orders, basis, segments_BT, history_BN)[0]


def byte_fnv_rows(
    bytes_BT: Any,
    orders: Sequence[int],
    n_slots: Sequence[int],
    *,
    basis: str = "dormouse",
    segments_BT: Any = None,
    history_BN: Any = None,
) -> jax.Array:
    """`host_byte_fnv_rows` inside jit, bit-equal.

    A traced value outside 0 .. 255 (and not -1) gives BAD_ROW (2^31 - 1), outside of
    every table, in every column whose window sees it.
    """
    offsets = _check_slots(orders, n_slots, basis)
    pair, bad_BTG = _device_fnv(bytes_BT, orders, basis, segments_BT, history_BN)
    index_BTG = uint32_pairs.remainder(pair, np.array(n_slots, np.int64))
    rows_BTG = index_BTG.astype(jnp.int32) + offsets.astype(np.int32)
    return jnp.where(bad_BTG, np.int32(BAD_ROW), rows_BTG)


@dataclass(frozen=True, kw_only=True)
class ByteLayout(ColumnLayout):
    """One column per order, its row the FNV-1a hash of the last bytes modulo its rows.

    Ids from 256 on (a separator) are no bytes: no window reaches over one, and its own
    windows are empty.

    Attributes:
        basis: "dormouse" or "standard".

    Raises:
        ConfigError: as `ColumnLayout`; more than 257 ids, which are no byte vocabulary;
            more than one head; an unknown basis.
    """

    basis: str = "dormouse"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.orders, self.basis)
        if self.vocab_size > _N_BYTES + 1:
            want = f"at most {_N_BYTES + 1}: bytes and a separator"
            raise ConfigError("vocab_size", self.vocab_size, want)
        if self.n_heads != 1:
            raise ConfigError("column_rows", self.column_rows, "one head by order")

    @property
    def pad_id(self) -> int:
        """An id that no byte has: windows are shorter, not padded."""
        return max(self.vocab_size, _N_BYTES)

    def seen_ids(self, ids_BT: Any) -> Any:
        """Ids with -1 for those that are no bytes, and 256 for those outside."""
        xp = jnp if isinstance(ids_BT, jax.Array) else np
        outside = (ids_BT < DEAD) | (ids_BT >= self.vocab_size)
        ids_BT = xp.where(ids_BT >= _N_BYTES, DEAD, ids_BT)
        return xp.where(outside, _N_BYTES, ids_BT)

    def rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> jax.Array:
        ids_BT = self.seen_ids(device_ids(ids_BT, self.vocab_size))
        if history_BN is not None:
            history_BN = device_ids(history_BN, self.vocab_size, "history")
            history_BN = self.seen_ids(history_BN)
        return byte_fnv_rows(
            ids_BT,
            self.orders,
            self.flat_rows,
            basis=self.basis,
            segments_BT=segments_BT,
            history_BN=history_BN,
        )

    def host_rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> np.ndarray:
        ids_BT = self.seen_ids(check_host_ids(ids_BT, self.vocab_size))
        if history_BN is not None:
            history_BN = check_host_ids(history_BN, self.vocab_size, "history")
            history_BN = self.seen_ids(history_BN)
        return host_byte_fnv_rows(
            ids_BT,
            self.orders,
            self.flat_rows,
            basis=self.basis,
            segments_BT=segments_BT,
            history_BN=history_BN,
        )


def _device_fnv(
    bytes_BT: Any, orders: Sequence[int], basis: str, segments_BT: Any, history_BN: Any
) -> tuple[uint32_pairs.Pair, jax.Array]:
    start = uint32_pairs.split64(_check(orders, basis))
    bytes_BT = device_ids(bytes_BT, _N_BYTES, "bytes")
    if history_BN is not None:
        history_BN = device_ids(history_BN, _N_BYTES, "history")
    windows = look_backs(
        bytes_BT, max(orders), segments_BT=segments_BT, history_BN=history_BN
    )
    bads, pairs = [], []
    for n in orders:
        bad_BT = jnp.zeros(bytes_BT.shape, bool)
        high_BT = jnp.full(bytes_BT.shape, start[0], jnp.uint32)
        low_BT = jnp.full(bytes_BT.shape, start[1], jnp.uint32)
        for byte_BT, blocked_BT in reversed(windows[:n]):
            bad_BT |= ((byte_BT < 0) | (byte_BT >= _N_BYTES)) & ~blocked_BT
            mixed = _fnv_step(high_BT, low_BT, byte_BT.astype(jnp.uint32))
            high_BT = jnp.where(blocked_BT, high_BT, mixed[0])
            low_BT = jnp.where(blocked_BT, low_BT, mixed[1])
        pairs.append((high_BT, low_BT))
        bads.append(bad_BT)
    high_BTG, low_BTG = (jnp.stack(half, axis=-1) for half in zip(*pairs, strict=True))
    return (high_BTG, low_BTG), jnp.stack(bads, axis=-1)


def _fnv_step(high: jax.Array, low: jax.Array, byte: jax.Array) -> uint32_pairs.Pair:
    """((high, low) xor byte) * (2^40 + 0x1b3) modulo 2^64."""
    low = low ^ byte
    small = np.uint32(FNV_PRIME & 0xFFFFFFFF)
    carry, product = uint32_pairs.multiply32(low, small)
    return high * small + carry + (low << np.uint32(8)), product


def _check(orders: Sequence[int], basis: str) -> int:
    if not orders or min(orders) < 1 or len(set(orders)) != len(orders):
        raise ConfigError("orders", tuple(orders), "distinct window lengths from 1 on")
    if basis not in FNV_BASES:
        raise ConfigError("basis", basis, f"one of {sorted(FNV_BASES)}")
    return FNV_BASES[basis]


def _check_slots(
    orders: Sequence[int], n_slots: Sequence[int], basis: str
) -> np.ndarray:
    """Offsets of the orders' parts, int64."""
    _check(orders, basis)
    slots = [int(n) for n in n_slots]
    if len(slots) != len(orders):
        raise ConfigError("n_slots", tuple(slots), f"{len(orders)} sizes, as orders")
    if min(slots) < 1 or sum(slots) > uint32_pairs.MAX_MODULUS:
        want = f"1 or more each, at most {uint32_pairs.MAX_MODULUS} together"
        raise ConfigError("n_slots", tuple(slots), want)
    return np.array(list(accumulate(slots, initial=0))[:-1], np.int64)
