"""A memory that learns the text it reads: fast-weight product keys in a block.

What: queries, values and gates of the stream; the memory; how its read meets the
    token's own value.
Why: what a document says stays at hand beyond the attention window, without a
    parameter for it.
When not: what all documents share belongs in a trained table; see `product_key`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError
from memjax.layers.decode_piece import CACHE, Piece
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.layers.join import join
from memjax.layers.memory import MemoryInputs, own_tables
from memjax.layers.norm import RMSNorm
from memjax.layers.precision import Dtypes
from memjax.layers.projection import projection
from memjax.layers.record import record
from memjax.layers.sub_keys import sub_keys
from memjax.ops.fast_weight_chunk import FastWeights, Reads
from memjax.ops.fast_weight_documents import (
    DocumentTrace,
    advance,
    fast_weight_documents,
)
from memjax.ops.fast_weight_memory import DocumentState, initial_state
from memjax.ops.fast_weights import fast_weight_shared, wide_dtype
from memjax.parallel.row_sharding import RowSharding

FAST_WEIGHTS = "fast_weights"
EPS = 1e-6


def z_score(x: Array) -> Array:
    """(x - mean) / (std + 1e-6) over the last axis, std with n - 1.

    In float32 or wider. Equal entries give 0, with gradient 0 through the deviation.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    apart = wide - jnp.mean(wide, axis=-1, keepdims=True)
    var = jnp.sum(apart * apart, axis=-1, keepdims=True) / (x.shape[-1] - 1)
    std = jnp.where(var > 0, jnp.sqrt(jnp.where(var > 0, var, 1)), 0)
    return apart / (std + EPS)


def l2_norm(x: Array) -> Array:
    """x / sqrt(|x|^2 + 1e-6) over the last axis, in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + EPS)


class FastWeightMemory(nn.Module):
    """Fast-weight product keys on a stream.

    Parameters: `query` [D, H * key_width], `value` [D, W], `token_gate`
    [D, gate_outputs] and `out` [W, D], each with a bias, and the gains of the RMS norms
    before them, `query_norm` and so on; `keys` [H, 2, N, C], U(+-key_width^-1/2), and
    `table` [N * N, W], N(0, 1 / W), called `fixed_keys` and `fixed_table` where they
    are not learned. With a shared state those two are `keys` and `values` of the
    collection "fast_weights" instead. Modes other than "sum" add `dense`. Rows that go
    on from a cache keep their document's `memory` there, a `DocumentState`.

    With h the normalised stream, q = query(h), v = value(h) z-scored and
    g = sigmoid(mean of token_gate(h)), the memory reads r for q, and later writes
    v_{t+1} under q_t; the branch is out(g * r + (1 - g) * v), the mix normalised. In
    modes other than "sum" the same g is the gate of the combinator.

    Records `gate`, `slots`, `weights`, `non_finite_scores`, and of the inner updates
    `inner_loss` (mean over pairs, without the factor 1/2) and `address_loss` (mean over
    chunks); 0 where nothing was written.

    Source: arXiv:2601.00671 and its released code. Differs: the state is explicit and,
    unless asked otherwise, one for each document; gains are stored as they are, not
    less 1.
    """

    config: FastWeightConfig
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
            x_BTD: the stream, not normalised.
            inputs: the segments are the documents; 0 is padding.
            train: apply memory dropout (needs the rng "dropout"), and let a shared
                state change where its collection is mutable.
            drop: drop the read of every sequence.

        Raises:
            ConfigError: a shared state where rows go on from a cache: its chunks are
                those of the whole batch, so rows could not advance by themselves.
        """
        config, dtypes = self.config, self.dtypes
        q = self._linear("query", x_BTD, config.n_heads * config.key_width)
        v_BTW = self._linear("value", x_BTD, config.value_width)
        score = self._linear("token_gate", x_BTD, config.gate_outputs)
        gate_BT = jax.nn.sigmoid(jnp.mean(score, axis=-1))
        q = self._normed_query(q)
        if config.target_zscore:
            v_BTW = z_score(v_BTW)
        weigh = gate_BT if config.gated_loss else None
        if config.state == "document":
            out_BTW, reads = self._documents(q, v_BTW, weigh, inputs)
        elif inputs.piece is not None:
            raise ConfigError("memories.state", "shared", "'document' with a cache")
        else:
            out_BTW, reads = self._shared(q, v_BTW, weigh, inputs.segments_BT, train)
        self._record_reads(reads, inputs.segments_BT)
        if config.fuse == "convex":
            g = gate_BT[..., None]
            out_BTW = g * out_BTW + (1 - g) * v_BTW
        else:
            out_BTW = out_BTW + v_BTW
        out_BTW = out_BTW.astype(dtypes.compute)
        found_BTD = self._linear("out", out_BTW, x_BTD.shape[-1])
        outer = jnp.ones_like(gate_BT) if config.mode == "sum" else gate_BT
        branch = join(
            self, config, found_BTD, outer, x_BTD, dtypes, train=train, drop=drop
        )
        record(self, "gate", gate_BT)
        return branch

    def _linear(self, name: str, x: Array, features: int) -> Array:
        """A biased linear map of the RMS-normalised x, in the accumulation dtype."""
        normed = RMSNorm(
            eps=self.config.norm_eps,
            param_dtype=self.dtypes.params,
            accumulation=self.dtypes.accumulation,
            name=f"{name}_norm",
        )(x)
        linear = projection(name, features, self.dtypes, use_bias=True)
        return linear(normed.astype(self.dtypes.compute)).astype(
            self.dtypes.accumulation
        )

    def _normed_query(self, q: Array) -> Array:
        kind = self.config.query_norm
        if kind == "none":
            return q
        halves = q.reshape(*q.shape[:-1], 2, -1)
        halves = l2_norm(halves) if kind == "l2" else z_score(halves)
        return halves.reshape(q.shape)

    def _documents(
        self, q: Array, v: Array, gate: Array | None, inputs: MemoryInputs
    ) -> tuple[Array, Reads]:
        config = self.config
        learned = config.initial == "learned"
        keys_HXNC = sub_keys(
            self,
            n_heads=config.n_heads,
            n_sub_keys=config.n_sub_keys,
            key_width=config.key_width,
            init="uniform_full",
            learned=learned,
            dtypes=self.dtypes,
        )
        specs = config.table_specs(q.shape[-1])
        tables = own_tables(self, config, specs, None, self.dtypes, self.sharding)
        values_SW = tables[config.table_name].stored
        if not learned:
            values_SW = jax.lax.stop_gradient(values_SW)
        initial = FastWeights(keys_HXNC, values_SW)
        if inputs.piece is None:
            out, trace = fast_weight_documents(
                initial, q, v, gate, inputs.segments_BT, config.options
            )
        else:
            out, trace = self._advance(initial, q, v, gate, inputs.piece)
        n_chunks = jnp.sum(trace.written_BM)
        n_pairs = n_chunks * trace.losses_BMP.shape[-1]
        self._record_losses(trace.losses_BMP, n_pairs, trace.address_BM, n_chunks)
        return out, trace.reads

    def _advance(
        self, initial: FastWeights, q: Array, v: Array, gate: Array | None, piece: Piece
    ) -> tuple[Array, DocumentTrace]:
        """Read the next tokens of documents whose memory is in the cache."""
        options = self.config.options

        def nothing() -> DocumentState:
            """Zeros: document 0 is no document, so the first one forgets them."""
            dtype = wide_dtype(initial, q, v)
            state = initial_state(initial, len(q), piece.n_places, options, dtype)
            return jax.tree.map(jnp.zeros_like, state)

        memory = self.variable(CACHE, "memory", nothing)
        out, trace, memory.value = advance(
            initial, memory.value, q, v, gate, piece.documents_BT, options
        )
        return out, trace

    def _shared(
        self, q: Array, v: Array, gate: Array | None, segments_BT: Array, train: bool
    ) -> tuple[Array, Reads]:
        config = self.config
        dtype = jnp.promote_types(self.dtypes.params, jnp.float32)
        bound, width = config.key_width**-0.5, config.value_width

        def draw_keys(shape: tuple[int, ...]) -> Array:
            key = self.make_rng("params")
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        def draw_values(shape: tuple[int, ...]) -> Array:
            return width**-0.5 * jax.random.normal(
                self.make_rng("params"), shape, dtype
            )

        n = config.n_sub_keys
        shape = (config.n_heads, 2, n, config.key_width // 2)
        keys = self.variable(FAST_WEIGHTS, "keys", draw_keys, shape)
        values = self.variable(FAST_WEIGHTS, "values", draw_values, (n * n, width))
        mask = segments_BT > 0 if config.mask_padding else None
        out, after, trace = fast_weight_shared(
            FastWeights(keys.value, values.value), q, v, gate, config.options, mask=mask
        )
        changes = train and self.is_mutable_collection(FAST_WEIGHTS)
        if changes and not self.is_initializing():
            keys.value = jax.lax.stop_gradient(after.keys_HXNC).astype(dtype)
            values.value = jax.lax.stop_gradient(after.values_SW).astype(dtype)
        self._record_losses(
            trace.losses_BP,
            jnp.asarray(trace.losses_BP.size),
            trace.address_M,
            jnp.asarray(trace.address_M.size),
        )
        return out, trace.reads

    def _record_losses(
        self, losses: Array, n_pairs: Array, address: Array, n_chunks: Array
    ) -> None:
        record(self, "inner_loss", jnp.sum(losses) / jnp.maximum(n_pairs, 1))
        record(self, "address_loss", jnp.sum(address) / jnp.maximum(n_chunks, 1))

    def _record_reads(self, reads: Reads, segments_BT: Array) -> None:
        spoilt_BTH = jnp.isnan(reads.scores).any(-1) & (segments_BT > 0)[..., None]
        record(self, "slots", reads.slots)
        record(self, "weights", reads.weights)
        record(self, "non_finite_scores", jnp.sum(spoilt_BTH, dtype=jnp.int32))
