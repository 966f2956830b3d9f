"""Engram: a gated read of hashed n-gram rows, in its two published forms.

What: rows of one table, concatenated, projected to keys and one value; a gate per
token and branch from the agreement of key and stream.
Why: the hash family of memories; both forms are checked against recorded numbers.
When not: hashing is `ops.ngram_hash`; this module takes row ids.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from memjax.arrays import check_shape
from memjax.errors import ConfigError, ShapeError
from memjax.layers.decode_piece import Piece, before_piece
from memjax.layers.join import join
from memjax.layers.memory import (
    MemoryConfig,
    MemoryInputs,
    TableSpec,
    check_least,
    check_orders,
    own_tables,
)
from memjax.layers.norm import BranchGains, BranchNorm
from memjax.layers.precision import Dtypes
from memjax.layers.projection import projection
from memjax.layers.record import record
from memjax.layers.table import Table
from memjax.ops.gates import GATE_KINDS, gate_of, normalized_dot
from memjax.ops.hot_tier import HotLayout
from memjax.ops.ngram_layout import NgramLayout, ngram_layouts
from memjax.ops.short_conv import reach, short_conv
from memjax.parallel.row_sharding import RowSharding

FORMS = ("demo", "v41")
CONV_INITS = ("zero", "uniform")


@dataclass(frozen=True, kw_only=True)
class EngramConfig(MemoryConfig):
    """Options of an Engram memory, beside those of `MemoryConfig`.

    Attributes:
        form: "demo" (arXiv:2601.07372 and its demo: biased projections, normalised
            keys, short convolution) or "v41" (arXiv:2609.19969: one bias-free
            projection to keys and value, fused norm gains, no convolution).
        orders: n-gram orders, ascending. The published models use 2..N.
        n_heads: hash heads per order.
        rows_per_head: rows of one head; each head gets the next unused prime from
            there on. A tuple gives one size per order.
        row_width: width W of a table row.
        hash_seed: seed of the hash multipliers.
        n_token_classes: V', how many classes the tokenizer's ids fall into when the
            n-grams are to be made of classes (case and outer white space gone; see
            `data.compressed_vocab`); None: of the ids themselves.
        pad_id: id, or class where there are classes, that stands for "before the
            start"; None: the last one, which is the separator's.
        gate: one of `ops.gates.GATE_KINDS`.
        norm_eps: eps of the key and query norms. The demo takes the dtype's machine
            epsilon (this default, for float32), V4.1 1e-20: with that, a table of
            zeros has gradients of 1e10.
        kernel_size, dilation: of the short convolution (form "demo"); dilation None
            means the largest order; kernel_size 0 leaves the convolution out.
        conv_norm_eps: eps of the norm before the convolution.
        conv_init: "zero" (the paper: identity at the start) or "uniform" (the
            demo's torch default, +-1/sqrt(kernel_size)).
        table_std: standard deviation of the normal initialiser of the table.
        n_branches: M, residual streams that share table and value: 1, or all streams of
            a model with hyper-connections.

    With a `shared_table` all layers have the layout of the first and read one table, as
    in arXiv:2601.16531. Memories that share it must hash alike, from one first layer.
    """

    normed_input: ClassVar[bool] = False
    host_table: ClassVar[bool] = True

    form: str = "demo"
    orders: tuple[int, ...] = (2, 3)
    n_heads: int = 8
    rows_per_head: int | tuple[int, ...] = 4096
    row_width: int = 32
    hash_seed: int = 0
    n_token_classes: int | None = None
    pad_id: int | None = None
    gate: str = "signed_sqrt"
    norm_eps: float = 1.1920929e-07
    kernel_size: int = 4
    dilation: int | None = None
    conv_norm_eps: float = 1e-5
    conv_init: str = "zero"
    table_std: float = 0.02
    n_branches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, allowed in (
            ("form", FORMS),
            ("gate", GATE_KINDS),
            ("conv_init", CONV_INITS),
        ):
            if getattr(self, field) not in allowed:
                raise ConfigError(
                    f"memories.{field}", getattr(self, field), f"one of {allowed}"
                )
        check_orders(self.orders)
        if list(self.orders) != sorted(set(self.orders)) or not self.orders:
            raise ConfigError("memories.orders", self.orders, "ascending orders")
        sizes = self.rows_per_head
        if not isinstance(sizes, int | tuple):
            raise ConfigError("memories.rows_per_head", sizes, "an integer, or a tuple")
        if isinstance(sizes, tuple) and len(sizes) != len(self.orders):
            raise ConfigError(
                "memories.rows_per_head",
                sizes,
                f"one size, or one for each of the {len(self.orders)} orders",
            )
        for field, least in (
            ("n_heads", 1),
            ("row_width", 1),
            ("kernel_size", 0),
            ("n_branches", 1),
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"memories.{field}", value, f"an integer >= {least}")
        n_classes = self.n_token_classes
        if n_classes is not None and not (isinstance(n_classes, int) and n_classes > 0):
            raise ConfigError(
                "memories.n_token_classes", n_classes, "None or an integer >= 1"
            )
        if self.dilation is not None:
            check_least(self, {"dilation": 1})
        for field in ("norm_eps", "conv_norm_eps", "table_std"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ConfigError(
                    f"memories.{field}", getattr(self, field), "a finite number >= 0"
                )

    @property
    def n_columns(self) -> int:
        """Hash columns C, rows read per token."""
        return len(self.orders) * self.n_heads

    def table_widths(self, d_model: int) -> dict[str, int]:
        """{name: width of a row} of the tables."""
        del d_model
        return {"table": self.row_width}

    def table_specs(self, d_model: int) -> dict[str, TableSpec]:
        """The tables of the first layer: with `shared_table`, of all layers."""
        (layout,) = ngram_layouts(
            vocab_size=1,  # the number of rows does not depend on it
            pad_id=0,
            orders=self.orders,
            n_heads=self.n_heads,
            rows_per_head=self.rows_per_head,
            layer_ids=self.layers[:1],
        )
        return self.specs(layout.n_rows)

    def table_spec(self, n_rows: int) -> TableSpec:
        """The table, whose rows R the hash layout decides."""
        return TableSpec(n_rows, self.row_width, self.table_std, self.n_columns)

    def specs(self, n_rows: int) -> dict[str, TableSpec]:
        """{name: table} of all tables, for a hashed one of R rows."""
        return {"table": self.table_spec(n_rows)}

    def layout_of(self, layout: NgramLayout) -> NgramLayout | HotLayout:
        """What the rows of a layer follow from, given the layout of its hash."""
        return layout


def _conv_init(kind: str, n_taps: int) -> nn.initializers.Initializer:
    if kind == "zero":
        return nn.initializers.zeros
    bound = n_taps**-0.5
    return lambda *given: jax.random.uniform(*given, minval=-bound, maxval=bound)


class Engram(nn.Module):
    """Gated n-gram memory on one or several residual streams.

    `__call__` returns stream + branch, `branch` what is added; `read` is the same for a
    block, which hands every memory the same inputs. Parameters: `table`
    [R, W] (in mode "rows" a variable of the collection "tables") and, with form
    "demo", `value` [C*W, D] + bias, `key_m` likewise for each
    branch, gains `key_norm`, `query_norm`, `conv_norm` [M, D], `conv` [K, M*D]; with
    form "v41" `kv` [C*W, (M+1)*D] (keys branch by branch, the value last) and gains
    `query_weight`, `key_weight` [M, D]. Modes other than "sum" add `dense` [D, D].
    Gates are computed in the accumulation dtype.

    Attributes:
        n_rows: rows R of the table.
        n_columns: row ids C per token; None takes `config.n_columns`.
        sharding: how a table in mode "rows" is divided; None: not divided.

    Sources: class Engram of deepseek-ai/Engram engram_demo_v1.py and of
    DeepSeek-V4.1-Flash inference/engram.py. Differs: segments stop the convolution,
    and the read can be mixed with a dense path.
    """

    config: EngramConfig
    n_rows: int
    dtypes: Dtypes
    n_columns: int | None = None
    sharding: RowSharding | None = None

    def __call__(self, hidden: Array, rows_BTC: Array, **options: Any) -> Array:
        """hidden + branch(...), in the dtype of `hidden`."""
        return hidden + self.branch(hidden, rows_BTC, **options)

    def read(
        self,
        x_BTD: Array,
        inputs: MemoryInputs,
        *,
        train: bool = False,
        drop: bool = False,
    ) -> Array:
        """`branch` for the inputs of a block; padding has gate 0."""
        return self.branch(
            x_BTD,
            inputs.rows_BTC,
            segments_BT=inputs.segments_BT,
            token_mask_BT=inputs.segments_BT > 0,
            tables=inputs.tables,
            piece=inputs.piece,
            train=train,
            drop=drop,
        )

    @nn.compact
    def branch(
        self,
        hidden: Array,
        rows_BTC: Array | None,
        *,
        segments_BT: Array | None = None,
        token_mask_BT: Array | None = None,
        tables: dict[str, Table] | None = None,
        piece: Piece | None = None,
        train: bool = False,
        drop: bool = False,
    ) -> Array:
        """The branch to be added to the stream.

        Args:
            hidden: [B, T, D], or [B, T, M, D] when the config has branches.
            rows_BTC: int32 row ids in [0, R); see `ops.ngram_hash`. Ids outside are
                a bug of the caller: their read is NaN, never another row.
            segments_BT: int document numbers; the convolution stays inside them.
            token_mask_BT: bool; False sets the gate to 0.
            tables: {"table": the table} when it is shared; None: its own.
            piece: where rows go on from a cache; needs `segments_BT`, its documents.
                The last inputs of the convolution are then kept in the collection
                "cache".
            train: apply memory dropout (needs the rng "dropout").
            drop: drop the read of every sequence (to measure the backbone alone).

        Returns:
            Same shape and dtype as `hidden`.
        """
        config, n_branches = self.config, self.config.n_branches
        h_BTMD = hidden if hidden.ndim == 4 else hidden[:, :, None, :]
        n_batch, n_tokens, got_branches, d_model = h_BTMD.shape
        if got_branches != n_branches:
            raise ConfigError(
                "memories.n_branches", n_branches, f"{got_branches}, as the stream has"
            )
        columns = self.columns()
        if rows_BTC is None:
            raise ShapeError("rows_BTC", (), (n_batch, n_tokens, columns))
        check_shape("rows_BTC", rows_BTC, (n_batch, n_tokens, columns))
        found = own_tables(
            self,
            config,
            config.specs(self.n_rows),
            tables,
            self.dtypes,
            self.sharding,
        )
        rows_BTCW = self.retrieve(found, rows_BTC, token_mask_BT)
        e_BTE = rows_BTCW.reshape(n_batch, n_tokens, -1).astype(self.dtypes.compute)
        record(self, "rows", e_BTE)
        form = self._demo if config.form == "demo" else self._v41
        score_BTM, value_BTD = form(h_BTMD, e_BTE)
        gate_BTM = gate_of(config.gate, score_BTM)
        if token_mask_BT is not None:
            gate_BTM = jnp.where(token_mask_BT[..., None], gate_BTM, 0)
        convolve = self._convolution(d_model, segments_BT, piece)
        out_BTMD = join(
            self,
            config,
            value_BTD,
            gate_BTM,
            h_BTMD,
            self.dtypes,
            train=train,
            drop=drop,
            refine=convolve,
        )
        return out_BTMD.reshape(hidden.shape)

    def columns(self) -> int:
        """Row ids per token."""
        return self.n_columns or self.config.n_columns

    def retrieve(
        self, tables: dict[str, Table], rows_BTC: Array, token_mask_BT: Array | None
    ) -> Array:
        """Rows [B, T, C, W] of the table."""
        del token_mask_BT
        return tables["table"].gather(self, rows_BTC)

    def _demo(self, h_BTMD: Array, e_BTE: Array) -> tuple[Array, Array]:
        d_model = h_BTMD.shape[-1]
        value_BTD = projection("value", d_model, self.dtypes, use_bias=True)(e_BTE)
        gains_MD = self._gains("key_norm", d_model) * self._gains("query_norm", d_model)
        keys = [
            projection(f"key_{m}", d_model, self.dtypes, use_bias=True)(e_BTE)
            for m in range(self.config.n_branches)
        ]
        return self._scores(h_BTMD, keys, gains_MD), value_BTD

    def _v41(self, h_BTMD: Array, e_BTE: Array) -> tuple[Array, Array]:
        n_branches, d_model = h_BTMD.shape[-2:]
        acc, stored = self.dtypes.accumulation, self.dtypes.params
        kv_BTE = projection("kv", (n_branches + 1) * d_model, self.dtypes)(e_BTE)
        query_MD, key_MD = (
            self.param(name, nn.initializers.ones, (n_branches, d_model), stored)
            for name in ("query_weight", "key_weight")
        )
        gains_MD = query_MD.astype(acc) * key_MD.astype(acc)
        *keys, value_BTD = jnp.split(kv_BTE, n_branches + 1, axis=-1)
        return self._scores(h_BTMD, keys, gains_MD), value_BTD

    def _gains(self, name: str, d_model: int) -> Array:
        gains_MD = BranchGains(
            self.config.n_branches, param_dtype=self.dtypes.params, name=name
        )(d_model)
        return gains_MD.astype(self.dtypes.accumulation)

    def _scores(self, h_BTMD: Array, keys: list[Array], gains_MD: Array) -> Array:
        """[B, T, M], branch by branch; see `BranchNorm`."""
        acc, eps = self.dtypes.accumulation, self.config.norm_eps
        scores = [
            normalized_dot(h_BTMD[:, :, m].astype(acc), key.astype(acc), gain_D, eps)
            for m, (key, gain_D) in enumerate(zip(keys, gains_MD, strict=True))
        ]
        return jnp.stack(scores, axis=-1) * h_BTMD.shape[-1] ** -0.5

    def _convolution(
        self, d_model: int, segments_BT: Array | None, piece: Piece | None
    ) -> Callable[[Array, int], Array]:
        """(gated [B, T, D], branch) -> that, plus its normalised convolution."""
        config = self.config
        if config.form != "demo" or config.kernel_size == 0:
            return lambda gated_BTD, branch: gated_BTD
        weight_KC = self.param(
            "conv",
            _conv_init(config.conv_init, config.kernel_size),
            (config.kernel_size, config.n_branches * d_model),
            self.dtypes.params,
        )
        norm = BranchNorm(
            config.n_branches,
            eps=config.conv_norm_eps,
            param_dtype=self.dtypes.params,
            accumulation=self.dtypes.accumulation,
            name="conv_norm",
        )
        dilation = config.dilation or max(config.orders)

        def convolve(gated_BTD: Array, branch: int) -> Array:
            u_BTD, before = norm(gated_BTD, branch), None
            if piece is not None:
                n_before = reach(config.kernel_size, dilation)
                name = f"conv_input_{branch}"
                before = before_piece(self, name, u_BTD, n_before, piece)
            first = branch * d_model
            weight_KD = weight_KC[:, first : first + d_model].astype(u_BTD.dtype)
            return gated_BTD + short_conv(
                u_BTD,
                weight_KD,
                dilation=dilation,
                segments_BT=segments_BT,
                before=before,
            )

        return convolve
