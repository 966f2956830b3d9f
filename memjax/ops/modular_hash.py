"""Token ids to table rows: the n-gram as a number to the base V, modulo each table.

What: the row of every token's last n ids, on the host in int64 and inside jit in pairs
    of uint32, bit-equal; and the sizes of the tables.
Why: the n-gram embedding of LongCat (arXiv:2601.21204) is addressed this way.
When not: Engram's hash; see ngram_hash. This one is linear in the ids: its sizes must
    stay away from multiples of V, see `evaluate.collisions.collision_excess`.

With x_k the id k places back (0 where it may not be seen) and q the size of a column:
row = sum over k < n of x_k * V^k mod q, plus the rows of the columns before.

Source: arXiv:2601.21204, and a public port of its code, as described in words.
Differs: segments and DEAD (-1) ids are ours; any set of orders from 2 on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError
from memjax.ops import uint32_pairs
from memjax.ops.column_layout import ColumnLayout
from memjax.ops.look_back import BAD_ROW, check_host_ids, device_ids, look_backs


@dataclass(frozen=True, kw_only=True)
class ModularLayout(ColumnLayout):
    """Columns by order and table; `column_rows` are the moduli q, below 2^31.

    Use `modular_layout` for the published sizes.
    """

    def rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> jax.Array:
        ids_BT = device_ids(ids_BT, self.vocab_size)
        if history_BN is not None:
            history_BN = device_ids(history_BN, self.vocab_size, "history")
        windows = look_backs(
            ids_BT, self.max_order, segments_BT=segments_BT, history_BN=history_BN
        )
        sizes_C = np.array(self.flat_rows, np.int64)
        orders_C = self._column_orders()
        index_BTC = jnp.zeros((*ids_BT.shape, self.n_columns), jnp.uint32)
        bad_BTC = jnp.zeros(index_BTC.shape, bool)
        # Oldest first: index <- index * V + id; ids beyond a column's order are 0.
        for k, (token_BT, blocked_BT) in reversed(list(enumerate(windows))):
            outside = (token_BT < 0) | (token_BT >= self.vocab_size)
            seen_C = orders_C > k
            bad_BTC |= (outside & ~blocked_BT)[..., None] & seen_C
            token_BT = jnp.where(blocked_BT, 0, token_BT).astype(jnp.uint32)
            token_BTC = jnp.where(seen_C, token_BT[..., None], np.uint32(0))
            raised = uint32_pairs.multiply32(index_BTC, np.uint32(self.vocab_size))
            raised = uint32_pairs.add(raised, (jnp.zeros_like(token_BTC), token_BTC))
            index_BTC = uint32_pairs.remainder(raised, sizes_C)
        rows_BTC = index_BTC.astype(jnp.int32) + np.array(self.offsets, np.int32)
        return jnp.where(bad_BTC, np.int32(BAD_ROW), rows_BTC)

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
        sizes_C = np.array(self.flat_rows, np.int64)
        index_BTC = np.zeros((*ids_BT.shape, self.n_columns), np.int64)
        for k, (token_BT, blocked_BT) in reversed(list(enumerate(windows))):
            token_BTC = np.where(blocked_BT, 0, token_BT)[..., None]
            token_BTC = np.where(self._column_orders() > k, token_BTC, 0)
            index_BTC = (index_BTC * self.vocab_size + token_BTC) % sizes_C
        return (index_BTC + np.array(self.offsets)).astype(np.int32)

    def _column_orders(self) -> np.ndarray:
        return np.repeat(np.array(self.orders), self.n_heads)


def modular_layout(
    vocab_size: int, orders: Sequence[int], n_tables: int, rows_per_table: int
) -> ModularLayout:
    """The layout of tables whose sizes go up by two, as published.

    Table j of order n has rows_per_table + 2 * ((n - 2) * n_tables + j) + 1 rows; with
    rows_per_table = 78 * V (V even) these are the release's odd sizes.

    Args:
        orders: n-gram lengths, ascending, from 2 on.
        n_tables: K, tables by order.

    Raises:
        ConfigError: as `ColumnLayout`, or an order below 2.
    """
    orders = tuple(orders)
    if orders and min(orders) < 2:
        raise ConfigError("orders", orders, "n-gram lengths from 2 on")
    sizes = tuple(
        tuple(
            rows_per_table + 2 * ((n - 2) * n_tables + j) + 1 for j in range(n_tables)
        )
        for n in orders
    )
    return ModularLayout(vocab_size=vocab_size, orders=orders, column_rows=sizes)
