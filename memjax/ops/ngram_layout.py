"""Which numbers an n-gram table hashes with: multipliers, primes, offsets.

What: one frozen `NgramLayout` per memory layer, derived from a handful of sizes.
Why: every table row depends on these numbers, so they are derived once, checked, and
    saved and fingerprinted with the model.
When not: for the hash itself; see ngram_hash.

Source: deepseek-ai/Engram engram_demo_v1.py and deepseek-ai/DeepSeek-V4.1-Flash
inference/engram.py (EngramLayout). Both are reproduced exactly.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from memjax.errors import ConfigError
from memjax.ops.uint32_pairs import MAX_MODULUS

_LAYER_STRIDE = 10007
_MAX_ID = 2**31 - 1
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class NgramLayout:
    """The numbers of one layer's hash, and where each column's rows lie in its table.

    Column c is order-major and head-minor: c = (index of the order) * n_heads + head.
    Its rows are offsets[c] .. offsets[c] + prime - 1 of a table with n_rows rows.

    Attributes:
        layer_id: number of the layer in the model; part of the multipliers' seed.
        vocab_size: ids are 0 .. vocab_size - 1 (after any vocabulary compression).
        pad_id: the id that stands for a token that may not be seen.
        orders: n-gram lengths, ascending, each at least 1.
        n_heads: hashes per order.
        multipliers: one odd integer per look-back, max(orders) of them.
        primes: per order, per head.
        offsets: per column.
        n_rows: rows of the table, the sum of all primes.

    Raises:
        ConfigError: the numbers do not belong together, or do not fit 32-bit rows or
            63-bit products.
    """

    layer_id: int
    vocab_size: int
    pad_id: int
    orders: tuple[int, ...]
    n_heads: int
    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    n_rows: int

    def __post_init__(self) -> None:
        _check_sizes(self.vocab_size, self.pad_id, self.orders, self.n_heads)
        largest = _MAX_INT64 // max(1, self.vocab_size - 1)
        if len(self.multipliers) != max(self.orders):
            want = f"{max(self.orders)} integers, one per look-back"
            raise ConfigError("multipliers", self.multipliers, want)
        for multiplier in self.multipliers:
            if not 0 < multiplier <= largest:
                raise ConfigError("multipliers", multiplier, f"1 to {largest}")
        n_primes = [len(row) for row in self.primes]
        if n_primes != [self.n_heads] * len(self.orders):
            want = f"{len(self.orders)} orders of {self.n_heads}"
            raise ConfigError("primes", self.primes, want)
        flat = self.flat_primes
        for prime in flat:
            if not 1 <= prime <= MAX_MODULUS:
                raise ConfigError("primes", prime, f"1 to {MAX_MODULUS}")
        if self.n_rows != sum(flat):
            raise ConfigError("n_rows", self.n_rows, f"the sum of primes, {sum(flat)}")
        if self.n_rows > _MAX_ID:
            raise ConfigError("n_rows", self.n_rows, f"at most {_MAX_ID}")
        if self.offsets != _offsets(flat):
            raise ConfigError("offsets", self.offsets, f"{_offsets(flat)}")

    @property
    def n_columns(self) -> int:
        """Rows read per token."""
        return len(self.orders) * self.n_heads

    @property
    def max_order(self) -> int:
        """Length of the longest n-gram; the history has one id less."""
        return self.orders[-1]

    @property
    def column_rows(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each column, by order and head: the primes."""
        return self.primes

    @property
    def flat_primes(self) -> tuple[int, ...]:
        """The prime of each column."""
        return tuple(prime for row in self.primes for prime in row)

    def fingerprint(self) -> str:
        """SHA-256 (hex) over every number above: equal iff the rows mean the same."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def ngram_layouts(
    *,
    vocab_size: int,
    pad_id: int,
    orders: Sequence[int],
    n_heads: int,
    rows_per_head: int | Sequence[int],
    layer_ids: Sequence[int],
    seed: int = 0,
) -> tuple[NgramLayout, ...]:
    """The layouts of all memory layers of one model.

    Primes are the next ones at or above `rows_per_head` of their order, and no prime is
    used twice in the model: layers in listed order, then orders, then heads.

    Args:
        vocab_size: ids are 0 .. vocab_size - 1, at most 2^31 - 1.
        pad_id: the id of the padding token.
        orders: ascending, each at least 1; published models use 2 .. N. Only listed
            orders get columns.
        n_heads: hashes per order, at least 1.
        rows_per_head: smallest prime allowed, one number or one per order.
        layer_ids: distinct numbers of the layers that own a table.
        seed: 0 in every published model.

    Returns:
        one `NgramLayout` per layer id, in the listed order.

    Raises:
        ConfigError: a size is not allowed, a prime would reach 2^31, or a table would
            have 2^31 rows or more.

    Cost: about 10 primality tests per column. Multipliers come from numpy's PCG64
    through `Generator.integers`; numpy does not promise that stream for ever, so a
    layout is saved with the model and read back, never derived anew for old weights.
    Source: engram_demo_v1.py NgramHashMapping; inference/engram.py EngramLayout.
    Differs: any set of orders, where the sources have 2 .. N.
    """
    orders = tuple(int(n) for n in orders)
    _check_sizes(vocab_size, pad_id, orders, n_heads)
    starts = _starts(rows_per_head, len(orders))
    layer_ids = tuple(int(layer) for layer in layer_ids)
    if not layer_ids or len(set(layer_ids)) != len(layer_ids) or min(layer_ids) < 0:
        raise ConfigError("layer_ids", layer_ids, "distinct numbers of layers, from 0")
    if seed < 0:
        raise ConfigError("seed", seed, "0 or more")
    seen: set[int] = set()
    layouts = []
    for layer_id in layer_ids:
        primes = tuple(_next_primes(start, n_heads, seen) for start in starts)
        flat = [prime for row in primes for prime in row]
        if sum(flat) > _MAX_ID:
            want = (
                f"sizes whose {len(flat)} columns have at most {_MAX_ID} rows together "
                f"(these have {sum(flat)})"
            )
            raise ConfigError("rows_per_head", rows_per_head, want)
        layouts.append(
            NgramLayout(
                layer_id=layer_id,
                vocab_size=vocab_size,
                pad_id=pad_id,
                orders=orders,
                n_heads=n_heads,
                multipliers=_multipliers(vocab_size, max(orders), layer_id, seed),
                primes=primes,
                offsets=_offsets(flat),
                n_rows=sum(flat),
            )
        )
    return tuple(layouts)


def is_prime(n: int) -> bool:
    """Whether n is prime, for 0 <= n < 3215031751 (exact in that range).

    Miller-Rabin with the bases 2, 3, 5, 7, which no composite below that bound passes.
    """
    if n < 2:
        return False
    for small in (2, 3, 5, 7):
        if n % small == 0:
            return n == small
    twos = ((n - 1) & -(n - 1)).bit_length() - 1
    odd = (n - 1) >> twos
    for base in (2, 3, 5, 7):
        power = pow(base, odd, n)
        if power in (1, n - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % n
            if power == n - 1:
                break
        else:
            return False
    return True


def _multipliers(vocab_size: int, n: int, layer_id: int, seed: int) -> tuple[int, ...]:
    bound = max(1, (_MAX_INT64 // vocab_size) // 2)
    random = np.random.default_rng(seed + _LAYER_STRIDE * layer_id)
    drawn = random.integers(0, bound, size=n, dtype=np.int64)
    return tuple(2 * int(value) + 1 for value in drawn)


def _next_primes(start: int, count: int, seen: set[int]) -> tuple[int, ...]:
    """The next `count` primes >= start outside `seen`, which they join."""
    found: list[int] = []
    candidate = start
    while len(found) < count:
        if candidate > MAX_MODULUS:
            want = f"sizes whose next unused primes are at most {MAX_MODULUS}"
            raise ConfigError("rows_per_head", start, want)
        if candidate not in seen and is_prime(candidate):
            found.append(candidate)
            seen.add(candidate)
        candidate += 1
    return tuple(found)


def _offsets(flat_primes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(flat_primes, initial=0))[:-1]


def _starts(rows_per_head: Any, n_orders: int) -> tuple[int, ...]:
    if isinstance(rows_per_head, int | np.integer):
        starts = (int(rows_per_head),) * n_orders
    else:
        starts = tuple(int(start) for start in rows_per_head)
    if len(starts) != n_orders:
        raise ConfigError("rows_per_head", starts, f"one size, or {n_orders} of them")
    if min(starts) < 1:
        raise ConfigError("rows_per_head", starts, "1 or more")
    return starts


def _check_sizes(
    vocab_size: int, pad_id: int, orders: tuple[int, ...], n_heads: int
) -> None:
    if not 1 <= vocab_size <= _MAX_ID:
        raise ConfigError("vocab_size", vocab_size, f"1 to {_MAX_ID}")
    if not 0 <= pad_id < vocab_size:
        raise ConfigError("pad_id", pad_id, f"0 to {vocab_size - 1} (vocab_size - 1)")
    if not orders or orders[0] < 1 or list(orders) != sorted(set(orders)):
        raise ConfigError("orders", orders, "n-gram lengths from 1 on, ascending")
    if n_heads < 1:
        raise ConfigError("n_heads", n_heads, "1 or more")
