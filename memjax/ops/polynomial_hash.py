"""Token ids to table rows: a polynomial in a prime, in wrapping 64-bit integers.

What: the row of every token's last n ids, on the host in int64 and inside jit in pairs
    of uint32, bit-equal.
Why: the byte n-gram embeddings of arXiv:2412.09871 (BLT) are addressed this way.
When not: Engram's hash; see ngram_hash.

With b_0 the oldest and b_(n-1) the newest id of a window (0 where it may not be seen):
h = sum over i of b_i * prime^i in two's complement of 64 bits, row = h mod rows, in
[0, rows) for negative h too, plus the rows of the columns before.

Source: arXiv:2412.09871 section 3.2.1 and the rolling hash of facebookresearch/blt, as
described; its code was not read. Differs: the primes are given; segments and DEAD (-1)
ids are ours.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError
from memjax.ops import uint32_pairs
from memjax.ops.column_layout import ColumnLayout
from memjax.ops.look_back import BAD_ROW, check_host_ids, device_ids, look_backs

FIRST_PRIME = 1000000007


@dataclass(frozen=True, kw_only=True)
class PolynomialLayout(ColumnLayout):
    """Columns by order and, within an order, by prime.

    Attributes:
        primes: one per head, odd, below 2^63.

    Raises:
        ConfigError: as `ColumnLayout`, or the primes do not fit.
    """

    primes: tuple[int, ...] = (FIRST_PRIME,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.primes)) != self.n_heads or len(self.primes) != self.n_heads:
            want = f"{self.n_heads} distinct primes, one a head"
            raise ConfigError("primes", self.primes, want)
        if any(not 2 < p < 2**63 or p % 2 == 0 for p in self.primes):
            raise ConfigError("primes", self.primes, "odd numbers, 3 to 2^63 - 1")

    def rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> jax.Array:
        ids_BT = device_ids(ids_BT, self.vocab_size)
        if history_BN is not None:
            history_BN = device_ids(history_BN, self.vocab_size, "history")
        windows = look_backs(
            ids_BT, self.max_order, segments_BT=segments_BT, history_BN=history_BN
        )
        columns, bads = [], []
        for order in self.orders:
            bad_BT = jnp.zeros(ids_BT.shape, bool)
            zeros_BTH = jnp.zeros((*ids_BT.shape, self.n_heads), jnp.uint32)
            total = zeros_BTH, zeros_BTH
            for k, (token_BT, blocked_BT) in enumerate(windows[:order]):
                outside = (token_BT < 0) | (token_BT >= self.vocab_size)
                bad_BT |= outside & ~blocked_BT
                token_BT = jnp.where(blocked_BT, 0, token_BT).astype(jnp.uint32)
                powers_H = self._powers(order - 1 - k)
                product = uint32_pairs.multiply_by(token_BT[..., None], powers_H)
                total = uint32_pairs.add(total, product)
            columns.append(total)
            bads.append(jnp.repeat(bad_BT[..., None], self.n_heads, axis=-1))
        high_BTC, low_BTC = (
            jnp.concatenate(half, axis=-1) for half in zip(*columns, strict=True)
        )
        sizes_C = np.array(self.flat_rows, np.int64)
        index_BTC = uint32_pairs.remainder((high_BTC, low_BTC), sizes_C)
        # A set highest bit stands for -2^63 and not for 2^63: 2^64 too much.
        excess_C = np.array([2**64 % size for size in self.flat_rows], np.uint32)
        sizes_C = sizes_C.astype(np.uint32)
        lowered_BTC = index_BTC + (sizes_C - excess_C)
        lowered_BTC = jnp.where(
            lowered_BTC >= sizes_C, lowered_BTC - sizes_C, lowered_BTC
        )
        index_BTC = jnp.where(high_BTC >= np.uint32(2**31), lowered_BTC, index_BTC)
        rows_BTC = index_BTC.astype(jnp.int32) + np.array(self.offsets, np.int32)
        return jnp.where(jnp.concatenate(bads, axis=-1), np.int32(BAD_ROW), rows_BTC)

    def host_rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> np.ndarray:
        ids_BT = check_host_ids(ids_BT, self.vocab_size)
        if history_BN is not None:
            history_BN = check_host_ids(history_BN, self.vocab_size, "history")
        if segments_BT is not None:
            segments_BT = np.asarray(segments_BT)
        windows = look_backs(
            ids_BT, self.max_order, segments_BT=segments_BT, history_BN=history_BN
        )
        columns = []
        for order, sizes_H in zip(self.orders, self.column_rows, strict=True):
            total_BTH = np.zeros((*ids_BT.shape, self.n_heads), np.uint64)
            for k, (token_BT, blocked_BT) in enumerate(windows[:order]):
                token_BT = np.where(blocked_BT, 0, token_BT).astype(np.uint64)
                total_BTH += token_BT[..., None] * self._powers(order - 1 - k)
            columns.append(np.mod(total_BTH.view(np.int64), np.array(sizes_H)))
        rows_BTC = np.concatenate(columns, axis=-1) + np.array(self.offsets)
        return rows_BTC.astype(np.int32)

    def _powers(self, exponent: int) -> np.ndarray:
        """Of each prime modulo 2^64, uint64 [H]."""
        return np.array([pow(p, exponent, 2**64) for p in self.primes], np.uint64)
