"""Memory+: product keys with an output gate, over a table that layers can share.

What: one linear query, a softmax read per head, and what follows it: nothing, a
    projection, an input-dependent gate with projection, or experts.
Why: the product-key memory that was trained at scale (arXiv:2412.09764).
When not: query networks, other activations and other keys; see `product_key`.
"""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
from jax import Array

from memjax.errors import ConfigError
from memjax.layers.join import check_gate, join, token_gate
from memjax.layers.memory import (
    MemoryConfig,
    MemoryInputs,
    TableSpec,
    check_fields,
    check_least,
    own_tables,
)
from memjax.layers.norm import RMSNorm
from memjax.layers.precision import Dtypes
from memjax.layers.slot_read import (
    check_rates,
    check_slots,
    check_std,
    expert_read,
    weigh_slots,
)
from memjax.layers.sub_keys import sub_keys
from memjax.layers.table import Table
from memjax.ops.dot_search import dot_search
from memjax.ops.product_keys import half_l2_normalize
from memjax.parallel.over_batch import over_batch
from memjax.parallel.row_sharding import RowSharding

FORMS = ("swilu", "plain", "experts")
QUERY_NORMS = ("none", "query", "query_key")
QUERY_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MemoryPlusConfig(MemoryConfig):
    """Options of a Memory+, beside those of `MemoryConfig`.

    Attributes:
        n_sub_keys: N of each half; the table has N * N rows.
        key_width: width of a whole key, even.
        n_heads: H, each with its own keys. The release refuses 1, we do not.
        k: rows read per head, 1 to N * N.
        value_width: width W of a table row; None: that of the output. Not for experts,
            whose rows are as wide as the stream.
        form: what follows the read y. "swilu": W2 (y * silu(W1 x + b1)) + b2, the
            paper's Memory+; "plain": y, or W2 y + b2 when value_width is given;
            "experts": sum of w * gelu(x . U[i]) * V[i] over the rows i that were read,
            from two tables (the release's PEER variant).
        gate: "none", or "sigmoid": the output times sigmoid(w . x + b).
        query_bias: whether the query's linear map has a bias.
        query_norm: "none"; "query": RMS norm of the whole query, all heads together,
            with a learned gain; "query_key": every half query is RMS-normalised with a
            learned gain of its own and every sub-key scaled to length 1, so that
            scores of either half start with unit variance whatever the width. Section
            3.1.4 says that queries and keys were normalised where training needed it,
            and neither it nor the release defines how. "query" is what the released
            code of arXiv:2601.00671 does in its copy of this layer, "query_key" is our
            own definition. A gain on the keys too would be the same as one on the
            query.
        input_dropout, query_dropout, value_dropout: on x, the query and the output
            (before the gate), in [0, 1), while training.
        value_std: standard deviation of the initial rows; None: W^-1/2.
    """

    n_sub_keys: int = 1024
    key_width: int = 512
    n_heads: int = 4
    k: int = 32
    value_width: int | None = None
    form: str = "swilu"
    gate: str = "none"
    query_bias: bool = True
    query_norm: str = "none"
    input_dropout: float = 0.0
    query_dropout: float = 0.0
    value_dropout: float = 0.0
    value_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            {"form": FORMS, "query_norm": QUERY_NORMS, "query_bias": (False, True)},
        )
        check_gate(self, self.gate)
        check_least(self, {"n_sub_keys": 1, "key_width": 2, "n_heads": 1, "k": 1})
        check_slots(self)
        if self.key_width % 2:
            raise ConfigError("memories.key_width", self.key_width, "an even number")
        if self.value_width is not None:
            check_least(self, {"value_width": 1})
            if self.form == "experts":
                raise ConfigError(
                    "memories.value_width",
                    self.value_width,
                    "None when form = 'experts': rows are as wide as the stream",
                )
        check_rates(self, "input_dropout", "query_dropout", "value_dropout")
        check_std(self, "value_std")

    @property
    def projects(self) -> bool:
        """Whether the read is followed by the projection `value`."""
        plain = self.form == "plain" and self.value_width is not None
        return plain or self.form == "swilu"

    def table_specs(self, d_model: int) -> dict[str, TableSpec]:
        """`table`, or `down_table` and `up_table`, for an output of width D."""
        width = self.value_width or d_model
        std = width**-0.5 if self.value_std is None else self.value_std
        n_rows, reads = self.n_sub_keys**2, self.n_heads * self.k
        names = ("down_table", "up_table") if self.form == "experts" else ("table",)
        return {name: TableSpec(n_rows, width, std, reads) for name in names}


class MemoryPlus(nn.Module):
    """Memory+ on a stream.

    Parameters: `query` [D, H * key_width] (columns by head, half, place), Xavier
    uniform; `keys` [H, 2, N, C], U(+-key_width^-1/2); `table` [N * N, W], or
    `down_table` and `up_table` [N * N, D]; with a projection `value` [W, E] + bias,
    with form "swilu" `swilu` [D, W] + bias too, both N(0, 1 / E); `token_gate`; with
    query_norm its gain `query_norm`. Biases start at zero; the release never sets its.

    Attributes:
        sharding: how tables in mode "rows" are divided; None: not divided.
        out_width: width E of the output; None: that of the stream.

    Source: arXiv:2412.09764 and facebookresearch/memory lingua/product_key. Differs:
    k may exceed N; equal scores have a rule; what is handed down as a shared table is
    the model's business; modes other than "sum" add a dense path.
    """

    config: MemoryPlusConfig
    dtypes: Dtypes
    sharding: RowSharding | None = None
    out_width: int | None = None

    @nn.compact
    def read(
        self,
        x_BTD: Array,
        inputs: MemoryInputs,
        *,
        train: bool = False,
        drop: bool = False,
    ) -> Array:
        """The branch [B, T, E] that this memory adds to the stream.

        Args:
            x_BTD: the normalised stream.
            inputs: segments (0 is padding, left out of what is counted) and, when the
                table is shared, the tables.
            train: apply the dropouts (needs the rng "dropout" when one is positive).
            drop: drop the read of every sequence.
        """
        config, dtypes = self.config, self.dtypes
        out_width = self.out_width or x_BTD.shape[-1]

        def dropped(rate: float, values: Array) -> Array:
            return nn.Dropout(rate, deterministic=not train)(values)

        x_BTD = dropped(config.input_dropout, x_BTD)
        tables = own_tables(
            self,
            config,
            config.table_specs(out_width),
            inputs.tables,
            dtypes,
            self.sharding,
        )
        q_BTHXC, keys_HXNC = self._query(x_BTD), self._keys()
        q_BTHXC = dropped(config.query_dropout, q_BTHXC)
        mesh = None if self.sharding is None else self.sharding.mesh
        search = partial(dot_search, k=config.k)
        found = over_batch(mesh, search, (q_BTHXC,), (keys_HXNC,))
        slots_BTHK, weights_BTHK = weigh_slots(self, found, inputs.segments_BT)
        flat = (*slots_BTHK.shape[:2], -1)
        found_BTE = self._found(
            tables,
            slots_BTHK.reshape(flat),
            weights_BTHK.reshape(flat),
            x_BTD,
            out_width,
        )
        found_BTE = dropped(config.value_dropout, found_BTE)
        gate_BT = token_gate(config.gate, x_BTD, dtypes)
        return join(
            self, config, found_BTE, gate_BT, x_BTD, dtypes, train=train, drop=drop
        )

    def _dense(
        self, name: str, features: int, init: nn.initializers.Initializer, bias: bool
    ) -> nn.Dense:
        return nn.Dense(
            features,
            use_bias=bias,
            name=name,
            dtype=self.dtypes.compute,
            param_dtype=self.dtypes.params,
            kernel_init=init,
        )

    def _query(self, x_BTD: Array) -> Array:
        """The halves [B, T, H, 2, C] of the queries, in the accumulation dtype."""
        config = self.config
        q = self._dense(
            "query",
            config.n_heads * config.key_width,
            nn.initializers.xavier_uniform(),
            config.query_bias,
        )(x_BTD.astype(self.dtypes.compute)).astype(self.dtypes.accumulation)
        if config.query_norm == "query":
            q = self._norm(1)(q)
        halves = (config.n_heads, 2, config.key_width // 2)
        q_BTHXC = q.reshape(*x_BTD.shape[:-1], *halves)
        return self._norm(3)(q_BTHXC) if config.query_norm == "query_key" else q_BTHXC

    def _keys(self) -> Array:
        """The sub-keys [H, 2, N, C], float32 or wider."""
        config = self.config
        keys_HXNC = sub_keys(
            self,
            n_heads=config.n_heads,
            n_sub_keys=config.n_sub_keys,
            key_width=config.key_width,
            init="uniform_full",
            dtypes=self.dtypes,
        )
        normed = config.query_norm == "query_key"
        return half_l2_normalize(keys_HXNC) if normed else keys_HXNC

    def _norm(self, n_gain_axes: int) -> RMSNorm:
        return RMSNorm(
            eps=QUERY_NORM_EPS,
            n_gain_axes=n_gain_axes,
            param_dtype=self.dtypes.params,
            accumulation=self.dtypes.accumulation,
            name="query_norm",
        )

    def _found(
        self,
        tables: dict[str, Table],
        ids_BTK: Array,
        weights_BTK: Array,
        x_BTD: Array,
        out_width: int,
    ) -> Array:
        """What the read gives, of width E."""
        config, compute = self.config, self.dtypes.compute
        if config.form == "experts":
            down, up = tables["down_table"], tables["up_table"]
            return expert_read(self, down, up, ids_BTK, weights_BTK, x_BTD)
        y_BTW = tables["table"].bag(self, ids_BTK, weights_BTK)
        if not config.projects:
            return y_BTW
        init = nn.initializers.normal(out_width**-0.5)
        y_BTW = y_BTW.astype(compute)
        if config.form == "swilu":
            swilu = self._dense("swilu", y_BTW.shape[-1], init, True)
            y_BTW = y_BTW * jax.nn.silu(swilu(x_BTD.astype(compute)))
        return self._dense("value", out_width, init, True)(y_BTW)
