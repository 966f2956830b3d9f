"""Product keys over n-grams: the last tokens, not the stream, say which slots are read.

What: small learned codes of the last N tokens, concatenated and mapped to the queries
    of a product-key search.
Why: an n-gram memory without collisions by hash: near n-grams can share slots, and what
    an n-gram reads is learned.
When not: queries from the stream (`product_key`), rows by hash (`engram`).
"""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from memjax.arrays import check_shape
from memjax.errors import ConfigError, ShapeError
from memjax.layers.join import check_gate, join, token_gate
from memjax.layers.memory import (
    MemoryConfig,
    MemoryInputs,
    TableSpec,
    check_fields,
    check_least,
    own_tables,
)
from memjax.layers.precision import Dtypes
from memjax.layers.projection import projection
from memjax.layers.record import add_loss, record
from memjax.layers.slot_read import check_slots, check_std, weigh_slots
from memjax.layers.sub_keys import sub_keys
from memjax.layers.token_rows import TokenRows
from memjax.ops.address_entropy import address_entropy
from memjax.ops.ngram_window import WindowLayout
from memjax.ops.product_keys import dot_scores, product_key_search
from memjax.parallel.over_batch import over_batch
from memjax.parallel.row_sharding import RowSharding

ACTIVATIONS = ("softmax", "relu")
# Of the initial codes; the query's kernel then gives queries of unit variance.
CODE_STD = 1.0


@dataclass(frozen=True, kw_only=True)
class NgramKeysConfig(TokenRows, MemoryConfig):
    """Options of product keys over n-grams, beside those of `MemoryConfig`.

    Attributes:
        order: N, tokens of the n-gram.
        code_width: width r of the code of a token at one of the N places.
        n_heads: H, each with its own query and keys.
        n_sub_keys: N of each half; the table has N * N rows.
        key_width: width of a whole key, even.
        k: slots read per head, 2 to N * N. With one slot an n-gram could own a row.
        activation: of the scores of a head, "softmax" or "relu".
        address_weight: of the auxiliary loss, minus the `address_entropy`; 0: none.
        gate: "sigmoid": the read times sigmoid(w . x + b) of the stream; "none".
        value_width: width W of a row, with a projection to the stream after the sum;
            None: rows as wide as the stream, and no projection.
        table_std: standard deviation of the table; None: W^-1/2.
    """

    order: int = 3
    code_width: int = 16
    n_heads: int = 4
    n_sub_keys: int = 128
    key_width: int = 64
    k: int = 8
    activation: str = "softmax"
    address_weight: float = 0.01
    gate: str = "sigmoid"
    value_width: int | None = None
    table_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"activation": ACTIVATIONS})
        check_gate(self, self.gate)
        check_least(
            self,
            {
                "order": 1,
                "code_width": 1,
                "n_heads": 1,
                "n_sub_keys": 2,
                "key_width": 2,
                "k": 2,
            },
        )
        if self.key_width % 2:
            raise ConfigError("memories.key_width", self.key_width, "an even number")
        check_slots(self)
        if self.value_width is not None:
            check_least(self, {"value_width": 1})
        check_std(self, "table_std")
        if not 0 <= self.address_weight < float("inf"):
            raise ConfigError(
                "memories.address_weight", self.address_weight, "a finite number >= 0"
            )

    def row_layout(self, vocab_size: int) -> WindowLayout:
        """One code a place and id."""
        try:
            return WindowLayout(vocab_size=vocab_size, order=self.order)
        except ConfigError as error:
            field = f"memories.{error.field}"
            raise ConfigError(field, error.value, error.allowed) from None

    def table_specs(self, d_model: int) -> dict[str, TableSpec]:
        width = self.value_width or d_model
        std = width**-0.5 if self.table_std is None else self.table_std
        reads = self.n_heads * self.k
        return {"table": TableSpec(self.n_sub_keys**2, width, std, reads)}


class NgramKeys(nn.Module):
    """One product-key memory that is addressed by n-grams.

    query = concat over places of code[row] . W + b, then scores, search, weights and
    weighted sum as in a product-key memory. The stream decides the gate and nothing
    else.

    Parameters: `embedding` [n_rows, r], the codes; the submodule `query`; `keys` [H, 2,
    N, C]; `table` [N * N, W] (in mode "rows" a variable of the collection "tables");
    `value`, `token_gate` and `dense` where the config asks for them.

    Records, beside "gate": "slots", "weights" and "non_finite_scores" as
    `slot_read.weigh_slots`, and "address_entropy". Hands out the loss "address".

    Attributes:
        n_rows: rows of the codes, those of `config.row_layout(vocab_size)`.

    Cost per token: N rows of width r, N * r * H * key_width products, and those of a
    product-key memory.
    Source: none, this is ours; the address loss is after arXiv:2601.00671 eqs. 16-18.
    Every n-gram reads H * k rows and each row can be read by any n-gram: none owns one.
    """

    config: NgramKeysConfig
    n_rows: int
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
            inputs: of it segments_BT, tables and rows_BTC, int32 [B, T, order].
            train: apply memory dropout (needs the rng "dropout").
            drop: drop the read of every sequence.

        Returns:
            [B, T, D] in the dtype of `x_BTD`.
        """
        config, d_model = self.config, x_BTD.shape[-1]
        real_BT = inputs.segments_BT > 0
        table = own_tables(
            self,
            config,
            config.table_specs(d_model),
            inputs.tables,
            self.dtypes,
            self.sharding,
        )["table"]
        scores_BTHXN = self.score(inputs.rows_BTC)
        mesh = None if self.sharding is None else self.sharding.mesh
        slots_BTHK, weights_BTHK = weigh_slots(
            self,
            over_batch(mesh, partial(product_key_search, k=config.k), (scores_BTHXN,)),
            inputs.segments_BT,
            activation=config.activation,  # pyright: ignore[reportArgumentType]
        )
        entropy = address_entropy(scores_BTHXN, config.k, real_BT)
        record(self, "address_entropy", entropy)
        if config.address_weight > 0:
            add_loss(self, "address", -config.address_weight * entropy)
        lead = slots_BTHK.shape[:2]
        read_BTW = table.bag(
            self, slots_BTHK.reshape(*lead, -1), weights_BTHK.reshape(*lead, -1)
        )
        if config.value_width is not None:
            read_BTW = projection("value", d_model, self.dtypes)(read_BTW)
        gate_BT = token_gate(config.gate, x_BTD, self.dtypes)
        return join(
            self,
            config,
            read_BTW,
            jnp.where(real_BT, gate_BT, 0),
            x_BTD,
            self.dtypes,
            train=train,
            drop=drop,
        )

    def score(self, rows_BTC: Array | None) -> Array:
        """Scores [B, T, H, 2, N] of the sub-keys for the n-grams of `rows_BTC`."""
        config = self.config
        if rows_BTC is None:
            raise ShapeError("rows_BTC", (), ("B", "T", config.order))
        check_shape("rows_BTC", rows_BTC, (None, None, config.order))
        codes_Rr = self.param(
            "embedding",
            nn.initializers.normal(CODE_STD),
            (self.n_rows, config.code_width),
            self.dtypes.params,
        )
        codes_BTCr = codes_Rr.at[rows_BTC].get(
            mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
        )
        width = config.n_heads * config.key_width
        q_BTQ = projection("query", width, self.dtypes, use_bias=True)(
            codes_BTCr.reshape(*rows_BTC.shape[:2], -1).astype(self.dtypes.compute)
        )
        keys_HXNC = sub_keys(
            self,
            n_heads=config.n_heads,
            n_sub_keys=config.n_sub_keys,
            key_width=config.key_width,
            dtypes=self.dtypes,
        )
        shape = (*rows_BTC.shape[:2], config.n_heads, 2, config.key_width // 2)
        return dot_scores(q_BTQ.reshape(shape), keys_HXNC)
