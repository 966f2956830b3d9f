"""PEER: a mixture of a million experts of one neuron each, found by product keys.

What: a read whose rows are experts, u and v: the sum of w * gelu(x . u) * v.
Why: the product-key memory in which what is read depends on the input twice
    (arXiv:2407.04153).
When not: experts behind Memory+'s query; that is form "experts" of `memory_plus`.
"""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError
from memjax.layers.batch_norm import MaskedBatchNorm
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
from memjax.layers.slot_read import (
    check_rates,
    check_slots,
    check_std,
    expert_read,
    weigh_slots,
)
from memjax.layers.sub_keys import sub_keys
from memjax.layers.table import MAX_ROWS
from memjax.ops.dot_search import dot_search
from memjax.ops.product_keys import check_half_selection, half_l2_normalize
from memjax.parallel.over_batch import over_batch
from memjax.parallel.row_sharding import RowSharding

ACTIVATIONS = ("softmax", "relu")
QUERY_NORMS = ("none", "batch")
KEY_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class PeerConfig(MemoryConfig):
    """Options of a PEER memory, beside those of `MemoryConfig`.

    Attributes:
        n_sub_keys: N of each half; there are N * N experts.
        key_width: width of a whole key, even; None: D, or D - 1 when D is odd. (Each
            half is as wide as half the stream.)
        n_heads: H, each with its own keys.
        k: experts read per head, 1 to N * N.
        half_k: sub-keys that each half keeps in the search, with half_k^2 >= k; None:
            as many as an exact search needs.
        activation: of the scores of a head. "softmax" over its k, the paper's; "relu",
            each by itself, which the released code has as its default and then reads
            one expert per head (k = 1), whatever its own setting says. Ours reads k.
        query_norm: "none", as the released code; "batch": `MaskedBatchNorm` of the
            queries, which the paper is said to use (we had no text of it to check).
            It looks ahead and across sequences while training.
        separate_tables: every head has N * N experts of its own.
        input_norm: RMS norm of the input with a learned gain, as the released code
            offers; the model hands a memory a normalised stream already.
        gate: "none", or "sigmoid": the output times sigmoid(w . x + b). Ours.
        expert_dropout: on the activations of the experts, in [0, 1), while training.
        table_std: standard deviation of both tables; None: D^-1/2, so that the
            activations of a normalised input have unit variance at the start. The
            released code draws N(0, 1).
    """

    n_sub_keys: int = 1024
    key_width: int | None = None
    n_heads: int = 8
    k: int = 16
    half_k: int | None = None
    activation: str = "softmax"
    query_norm: str = "none"
    separate_tables: bool = False
    input_norm: bool = False
    gate: str = "none"
    expert_dropout: float = 0.0
    table_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            {
                "activation": ACTIVATIONS,
                "query_norm": QUERY_NORMS,
                "separate_tables": (False, True),
                "input_norm": (False, True),
            },
        )
        check_gate(self, self.gate)
        check_least(self, {"n_sub_keys": 1, "n_heads": 1, "k": 1})
        check_slots(self)
        if self.key_width is not None:
            check_least(self, {"key_width": 2})
            if self.key_width % 2:
                raise ConfigError(
                    "memories.key_width", self.key_width, "an even number"
                )
        if self.half_k is not None:
            check_least(self, {"half_k": 1})
            check_half_selection(
                self.half_k, self.k, self.n_sub_keys, "memories.half_k"
            )
        if self.separate_tables and self.n_rows > MAX_ROWS:
            raise ConfigError(
                "memories.separate_tables",
                True,
                f"False for {self.n_heads} heads of {self.n_sub_keys}^2 experts: "
                f"tables have at most {MAX_ROWS} rows (32-bit ids)",
            )
        check_rates(self, "expert_dropout")
        check_std(self, "table_std")

    @property
    def n_rows(self) -> int:
        """Rows R of either table."""
        return self.n_sub_keys**2 * (self.n_heads if self.separate_tables else 1)

    def width_of_keys(self, d_model: int) -> int:
        """Width of a whole key on a stream of width D."""
        return self.key_width or d_model // 2 * 2

    def check_width(self, d_model: int) -> None:
        if self.width_of_keys(d_model) < 2:
            raise ConfigError(
                "memories.key_width",
                self.key_width,
                f"given for a stream of width {d_model}",
            )

    def table_specs(self, d_model: int) -> dict[str, TableSpec]:
        """`down_table`, what experts multiply x by, and `up_table`, what they add."""
        std = d_model**-0.5 if self.table_std is None else self.table_std
        spec = TableSpec(self.n_rows, d_model, std, self.n_heads * self.k)
        return {"down_table": spec, "up_table": spec}


class Peer(nn.Module):
    """PEER on a stream.

    Parameters: `query` [D, H * key_width] without a bias (columns by head, half,
    place); `keys` [H, 2, N, C], N(0, 0.02^2); `down_table`, `up_table` [R, D], where
    head h begins at row h * N * N when tables are separate; with input_norm
    `input_gain` [D], from zero; `token_gate`; with query_norm "batch" `query_norm`, of
    which the collection "batch_stats" holds the running averages.

    Recorded slots are those of a head, 0 to N * N - 1, also when tables are separate.

    Attributes:
        sharding: how tables in mode "rows" are divided; None: not divided.

    Source: arXiv:2407.04153 Algorithm 1 and lucidrains/PEER-pytorch PEER.py. Differs:
    columns of the query stand by head first there by half, which is a matter of naming;
    a norm of a zero input has gradient 0. Initial weights of the query are those of
    `projection` instead of torch's uniform.
    """

    config: PeerConfig
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
        """The branch [B, T, D] that this memory adds to the stream.

        Args:
            x_BTD: the normalised stream.
            inputs: segments (0 is padding, left out of what is counted) and, when the
                tables are shared, the tables.
            train: apply the dropouts (needs the rng "dropout" when one is positive).
            drop: drop the read of every sequence.
        """
        config, dtypes = self.config, self.dtypes
        d_model = x_BTD.shape[-1]
        config.check_width(d_model)
        tables = own_tables(
            self,
            config,
            config.table_specs(d_model),
            inputs.tables,
            dtypes,
            self.sharding,
        )
        normed_BTD = self._normed(x_BTD) if config.input_norm else x_BTD
        queries = self._queries(normed_BTD, inputs.segments_BT > 0, train)
        mesh = None if self.sharding is None else self.sharding.mesh
        search = partial(dot_search, k=config.k, half_k=config.half_k)
        slots_BTHK, weights_BTHK = weigh_slots(
            self,
            over_batch(mesh, search, (queries,), (self._keys(d_model),)),
            inputs.segments_BT,
            activation=config.activation,  # pyright: ignore[reportArgumentType]
        )
        if config.separate_tables:
            first_H1 = jnp.arange(config.n_heads, dtype=jnp.int32)[:, None]
            slots_BTHK = slots_BTHK + first_H1 * config.n_sub_keys**2
        flat = (*slots_BTHK.shape[:2], -1)
        dropout = nn.Dropout(config.expert_dropout, deterministic=not train)
        found_BTD = expert_read(
            self,
            tables["down_table"],
            tables["up_table"],
            slots_BTHK.reshape(flat),
            weights_BTHK.reshape(flat),
            normed_BTD,
            drop=dropout,
        )
        gate_BT = token_gate(config.gate, x_BTD, dtypes)
        return join(
            self, config, found_BTD, gate_BT, x_BTD, dtypes, train=train, drop=drop
        )

    def _normed(self, x_BTD: Array) -> Array:
        """x / |x| * sqrt(D) * (1 + gain), in the dtype of x."""
        d_model = x_BTD.shape[-1]
        gain_D = self.param(
            "input_gain", nn.initializers.zeros, (d_model,), self.dtypes.params
        )
        unit_BTD = half_l2_normalize(x_BTD.astype(self.dtypes.accumulation))
        return (unit_BTD * d_model**0.5 * (1 + gain_D)).astype(x_BTD.dtype)

    def _queries(self, x_BTD: Array, mask_BT: Array, train: bool) -> Array:
        """The halves [B, T, H, 2, C] of the queries."""
        config, dtypes = self.config, self.dtypes
        width = config.width_of_keys(x_BTD.shape[-1])
        query = projection("query", config.n_heads * width, dtypes)
        q = query(x_BTD.astype(dtypes.compute))
        if config.query_norm == "batch":
            norm = MaskedBatchNorm(param_dtype=dtypes.params, name="query_norm")
            q = norm(q, mask_BT, train=train)
        return q.reshape(*x_BTD.shape[:-1], config.n_heads, 2, width // 2)

    def _keys(self, d_model: int) -> Array:
        """The sub-keys [H, 2, N, C], float32 or wider."""
        config = self.config
        return sub_keys(
            self,
            n_heads=config.n_heads,
            n_sub_keys=config.n_sub_keys,
            key_width=config.width_of_keys(d_model),
            init="normal",
            std=KEY_STD,
            dtypes=self.dtypes,
        )
