"""Product-key memory: a large value table, addressed by two halves of a query.

What: `ProductKeyMemory`: query, search, weights, weighted sum of rows.
Why: the learned-key family of memories, with the variants of its papers as options.
When not: projected or gated reads of arXiv:2412.09764 and experts of 2407.04153 are
    layers of their own.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from memjax.layers.join import join, token_gate
from memjax.layers.memory import MemoryInputs, own_tables
from memjax.layers.precision import Dtypes
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.layers.query_network import QueryNetwork
from memjax.layers.record import record
from memjax.layers.sub_keys import flat_keys, sub_keys
from memjax.layers.table import Table
from memjax.ops.dot_search import dot_search
from memjax.ops.product_keys import (
    Selection,
    all_slot_scores,
    dot_scores,
    flat_search,
    half_l2_normalize,
    product_key_search,
)
from memjax.ops.read_weights import read_weights
from memjax.parallel.over_batch import over_batch
from memjax.parallel.row_sharding import RowSharding

CONSTANTS = "constants"


class ProductKeyMemory(nn.Module):
    """One product-key memory on a stream.

    Parameters: `keys` (see `sub_keys`), `table` [R, W] (in mode "rows" a variable of
    the collection "tables"), the submodule `query`, LayerNorms `input_norm` and
    `output_norm`, `gate` and `dense` where the config asks for them. What is not
    learned is called `fixed_keys` and `fixed_query`.

    Records, beside "gate": "slots" int32 [B, T, H, K], the rows that were read, after
    permutation and modulo; "weights" [B, T, H, K], what they were multiplied by, before
    dropout; "non_finite_scores", the (token, head) pairs at real positions whose scores
    are not numbers. With k = None only the last, of tokens.

    A NaN in a query makes that token's read NaN and touches no other token, unless
    batch norm is on and the model trains.

    Cost per token: 2 * H * N * C for the scores (H * S * key_width with flat keys), the
    two top-k of every head, and H * K rows. k = None costs S * W instead of the search.
    A permutation_seed puts H * S integers into the compiled program.

    Sources: facebookresearch/XLM (arXiv:1907.05242), lucidrains/product-key-memory,
    RobertCsordas/moe (arXiv:2310.10837). Differs: equal scores take the lowest slot;
    zero queries and norms divide by nothing instead of giving NaN; padding does not
    enter batch statistics; the permutations of heads come from a seed.
    """

    config: ProductKeyConfig
    dtypes: Dtypes
    sharding: RowSharding | None = None

    @nn.compact
    def read(
        self,
        x_BTD: Array,
        inputs: MemoryInputs,
        *,
        train: bool = False,
        drop: bool = False,
    ) -> Array:
        """The branch to be added to the stream.

        Args:
            x_BTD: the stream, normalised by the block.
            inputs: of it, segments_BT and tables.
            train: dropout, noise (they need the rng "dropout") and batch statistics.
            drop: drop the read of every sequence.

        Returns:
            [B, T, E] in the dtype of `x_BTD`, E = value_width or D.

        Raises:
            ConfigError: D does not fit the query or the heads.
        """
        config, d_model = self.config, x_BTD.shape[-1]
        config.check_input_width(d_model)
        mask_BT = inputs.segments_BT > 0
        tables = own_tables(
            self,
            config,
            config.table_specs(d_model),
            inputs.tables,
            self.dtypes,
            self.sharding,
        )
        queries, keys = self.queries(x_BTD, mask_BT, train), self.keys(d_model)
        if config.k is None:
            scores = self.score(queries, keys, train)
            read_BTE = self._read_all(tables["table"], scores, mask_BT, train)
        else:
            selection = self.select(queries, keys, config.k, train)
            read_BTE = self._read_best(tables["table"], selection, mask_BT, train)
        if config.output_norm:
            read_BTE = _layer_norm("output_norm", self.dtypes)(read_BTE)
        read_BTE = self._dropped("value_dropout", read_BTE, train)
        gate_BT = token_gate(config.gate, x_BTD, self.dtypes)
        return join(
            self,
            config,
            read_BTE,
            gate_BT,
            x_BTD,
            self.dtypes,
            train=train,
            drop=drop,
        )

    def queries(self, x_BTD: Array, mask_BT: Array, train: bool) -> Array:
        """Queries [B, T, H, X, C]: X = 2 halves, or 1 whole for flat keys."""
        config = self.config
        if config.detach_input:
            x_BTD = jax.lax.stop_gradient(x_BTD)
        if config.input_norm:
            x_BTD = _layer_norm("input_norm", self.dtypes)(x_BTD)
        network = QueryNetwork(
            kind=config.query,
            n_heads=config.n_heads,
            key_width=config.query_width(x_BTD.shape[-1]),
            hidden=config.hidden_sizes,
            use_bias=config.query_bias,
            init_rule=config.query_init,
            norm=config.query_norm,
            learned=config.query_learned,
            dtypes=self.dtypes,
            name="query" if config.query_learned else "fixed_query",
        )
        x_BTD = self._dropped("input_dropout", x_BTD, train)
        q_BTHQ = network(x_BTD, mask_BT, train=train)
        q_BTHQ = self._dropped("query_dropout", q_BTHQ, train)
        n_halves = 1 if config.flat else 2
        q_BTHXC = q_BTHQ.reshape(*q_BTHQ.shape[:-1], n_halves, -1)
        if config.normalize_query:
            wide = jnp.promote_types(q_BTHXC.dtype, jnp.float32)
            q_BTHXC = half_l2_normalize(q_BTHXC.astype(wide))
        return q_BTHXC

    def keys(self, d_model: int) -> Array:
        """Keys [H, X, N, C], of the halves or whole."""
        config = self.config
        options: dict[str, Any] = dict(
            n_heads=config.n_heads,
            key_width=config.query_width(d_model),
            init=config.key_init,
            std=config.key_deviation(d_model),
            normalized=config.key_normalized,
            shared=config.key_shared,
            learned=config.key_learned,
            dtypes=self.dtypes,
        )
        if config.flat:
            return flat_keys(self, n_slots=config.n_sub_keys, **options)[:, None]
        return sub_keys(self, n_sub_keys=config.n_sub_keys, **options)

    def score(self, q_BTHXC: Array, keys_HXNC: Array, train: bool) -> Array:
        """Scores [B, T, H, X, N] of all (sub-)keys, with their noise."""
        scores = dot_scores(q_BTHXC, keys_HXNC)
        if train and self.config.score_noise > 0:
            key = self.make_rng("dropout")
            noise = jax.random.gumbel(key, scores.shape, scores.dtype)
            scores = scores + self.config.score_noise * noise
        return scores

    def select(
        self, q_BTHXC: Array, keys_HXNC: Array, k: int, train: bool
    ) -> Selection:
        """The k best slots of every head."""
        config = self.config
        mesh = None if self.sharding is None else self.sharding.mesh
        if config.flat or (train and config.score_noise > 0):
            scores_BTHXN = self.score(q_BTHXC, keys_HXNC, train)
            if config.flat:
                search = partial(flat_search, k=k)
                return over_batch(mesh, search, (scores_BTHXN[..., 0, :],))
            return over_batch(mesh, partial(product_key_search, k=k), (scores_BTHXN,))
        return over_batch(mesh, partial(dot_search, k=k), (q_BTHXC,), (keys_HXNC,))

    def weigh(self, scores_BTHK: Array) -> Array:
        """Weights of the selected slots."""
        config = self.config
        return read_weights(
            scores_BTHK,
            activation=config.activation,  # pyright: ignore[reportArgumentType]
            over=config.over,  # pyright: ignore[reportArgumentType]
            temperature=config.temperature,
            subtract=config.subtract,  # pyright: ignore[reportArgumentType]
            normalize=config.normalize,
        )

    def rows(self, slots_BTHK: Array) -> Array:
        """Rows of slots, after the permutation of each head and the modulo."""
        config = self.config
        if config.permutation_seed is not None:
            order_HS = self._permutations()
            heads_H1 = jnp.arange(config.n_heads)[:, None]
            slots_BTHK = order_HS[heads_H1, slots_BTHK]
        if config.modulo_rows is not None:
            slots_BTHK = slots_BTHK % config.modulo_rows
        return slots_BTHK

    def _read_best(
        self, table: Table, selection: Selection, mask_BT: Array, train: bool
    ) -> Array:
        scores_BTHK, slots_BTHK = selection
        rows_BTHK, weights_BTHK = self.rows(slots_BTHK), self.weigh(scores_BTHK)
        record(self, "slots", rows_BTHK)
        record(self, "weights", weights_BTHK)
        self._count_non_finite(scores_BTHK, mask_BT)
        weights_BTHK = self._dropped("weight_dropout", weights_BTHK, train)
        lead = rows_BTHK.shape[:2]
        if self.config.slice_values:
            return table.bag(self, rows_BTHK, weights_BTHK).reshape(*lead, -1)
        return table.bag(
            self, rows_BTHK.reshape(*lead, -1), weights_BTHK.reshape(*lead, -1)
        )

    def _read_all(
        self, table: Table, scores: Array, mask_BT: Array, train: bool
    ) -> Array:
        # The sum over heads of sums of halves is the sum of halves summed over heads.
        summed_BT1XN = jnp.sum(scores, axis=2, keepdims=True)
        if self.config.flat:
            scores_BT1S = summed_BT1XN[..., 0, :]
        else:
            scores_BT1S = all_slot_scores(summed_BT1XN)
        self._count_non_finite(scores_BT1S, mask_BT)
        weights_BT1S = self.weigh(scores_BT1S)
        weights_BT1S = self._dropped("weight_dropout", weights_BT1S, train)
        return jnp.matmul(
            weights_BT1S[..., 0, :],
            table.stored.astype(weights_BT1S.dtype),
            precision=jax.lax.Precision.HIGHEST,
        )

    def _permutations(self) -> Array:
        """int32 [H, S]: from the variable where it was given, else from the seed."""
        config = self.config
        if self.has_variable(CONSTANTS, "permutations"):
            return jnp.asarray(self.get_variable(CONSTANTS, "permutations"))
        # RandomState promises the same numbers for ever.
        random = np.random.RandomState(config.permutation_seed)
        orders = [random.permutation(config.n_slots) for _ in range(config.n_heads)]
        return jnp.asarray(np.stack(orders).astype(np.int32))

    def _count_non_finite(self, scores_BTHK: Array, mask_BT: Array) -> None:
        sound_BTH = jnp.all(scores_BTHK < jnp.inf, axis=-1)
        bad_BTH = ~sound_BTH & mask_BT[..., None]
        record(self, "non_finite_scores", jnp.sum(bad_BTH, dtype=jnp.int32))

    def _dropped(self, name: str, x: Array, train: bool) -> Array:
        rate = getattr(self.config, name)
        return nn.Dropout(rate, name=name)(x, deterministic=not train)


def _layer_norm(name: str, dtypes: Dtypes) -> nn.LayerNorm:
    return nn.LayerNorm(
        epsilon=1e-5,
        dtype=dtypes.accumulation,
        param_dtype=dtypes.params,
        use_fast_variance=False,
        name=name,
    )
