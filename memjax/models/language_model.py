"""The language model: a decoder whose blocks may read memories.

What: tokens -> logits; which block reads which table, and how branches are joined.
Why: one small backbone, so that what differs between runs is the memory.
When not: losses, sampling and evaluation take `apply` as a function.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from memjax.data.compressed_vocab import CompressedVocab
from memjax.errors import ConfigError
from memjax.layers.block import Block, Seat
from memjax.layers.cross_attention import HeadKeys, Source
from memjax.layers.decode_piece import CACHE, Piece, Place
from memjax.layers.memory import MemoryInputs
from memjax.layers.norm import RMSNorm
from memjax.layers.precision import Dtypes
from memjax.layers.record import LOSSES, METRICS
from memjax.models.config import ModelConfig
from memjax.models.decode import PLACE, check_decodes, n_history
from memjax.models.layouts import check_rows, layouts
from memjax.models.memories import (
    Memory,
    Placed,
    memory_module,
    n_branches,
    reads_tokens,
    shared_tables,
)
from memjax.models.runs import n_decoder_tokens, runs
from memjax.models.shared_tables import SharedTables
from memjax.ops.hash_routing import bigram_experts, table_experts
from memjax.ops.hashed_rows import Layout, hashed_rows
from memjax.ops.hyper_connections import collapse, expand, first_pre
from memjax.ops.token_classes import token_classes
from memjax.parallel.logical_axes import ActivationSharding, constrain
from memjax.parallel.row_sharding import RowSharding


class LanguageModel(nn.Module):
    """Decoder language model, tokens [B, T] -> logits [B, T, V].

    Parameters of a single block are under `block_<i>`, those of a scanned run of
    blocks i..j under `blocks_<i>_<j>` with the layer axis in front; tables are the
    leaves called `table` or `*_table`, in mode "rows" in the collection "tables" under
    the same path. Tables that layers share belong to the module `shared_<name>`.

    Attributes:
        config: the model.
        table_sharding: how tables in mode "rows" are divided; None: not divided.
        activations: how activations are divided over a mesh; None: not stated.
        classes: of the tokens, for memories whose `n_token_classes` is set.
        counts: how often each token occurs in training, for the routing "balanced".
        cache_tokens: S: rows go on from the collection "cache" (which must be mutable),
            which holds S tokens of each; see `models.decode`. None: rows are whole.
    """

    config: ModelConfig
    table_sharding: RowSharding | None = None
    classes: CompressedVocab | None = None
    counts: tuple[int, ...] | None = None
    cache_tokens: int | None = None
    activations: ActivationSharding | None = None

    @nn.nowrap
    def hashed_ids(self, tokens_BT: Any, layout: Layout) -> Any:
        """The ids that a layout of this model hashes: the tokens, or their classes.

        ConfigError when it wants classes and `classes` are not those.
        """
        n_ids, n_hashed = self.config.vocab_size, layout.vocab_size
        if n_hashed == n_ids:  # with as many classes as ids, each is its own
            return tokens_BT
        found = self.classes and (len(self.classes.table), self.classes.size)
        if self.classes is None or found != (n_ids, n_hashed):
            raise ConfigError("classes", found, f"{n_ids} ids in {n_hashed} classes")
        return token_classes(self.classes.table, tokens_BT)

    @nn.compact
    def __call__(
        self,
        tokens_BT: Array,
        segments_BT: Array | None = None,
        positions_BT: Array | None = None,
        *,
        train: bool = False,
        drop_memory: bool = False,
        last: int | None = None,
        rows: Mapping[int, Array] | None = None,
    ) -> Array:
        """Logits of the next token.

        Args:
            tokens_BT: int32 ids in [0, V); an id outside gives NaN logits.
            segments_BT: int32 document number inside the row, 0 for padding; None:
                one document. Nothing looks across a segment. With a cache, a row goes
                on with its document while the segment is that of the token before;
                padding may stand anywhere and changes nothing.
            positions_BT: int32 positions inside the document; None: 0..T-1, or with a
                cache, which allows no others, those of the rows' documents.
            train: dropout and starvation on (needs the rng "dropout" when a rate is
                positive), and running statistics and carried fast weights change when
                their collections "batch_stats" and "fast_weights" are mutable.
            drop_memory: measure the backbone alone, all memory gates 0.
            last: only the logits of so many last tokens, [B, last, V]. The decoder of a
                causal encoder-decoder then runs for no more tokens than these need.
            rows: {layer: int32 rows [B, T, C]} of memories that are addressed by tokens
                (`ops.hashed_rows.host_rows`); other layers hash the tokens here.

        Returns:
            Logits, float32 (or wider under 64-bit mode). In the "probability"
            arrangement they are log-probabilities of the mixture. With a cache, NaN for
            tokens beyond the S of their row.

        Raises:
            ConfigError: with a cache, positions, rows or train, or as `check_decodes`;
                rows of a layer without such a memory; `last` with a cache, or where a
                memory of the decoder looks back by itself.
        """
        config, dtypes = self.config, Dtypes.of(self.config.precision)
        if segments_BT is None:
            segments_BT = jnp.ones_like(tokens_BT)
        given, piece = check_rows(config, rows, self.cache_tokens is None), None
        if self.cache_tokens is not None:
            piece = self._piece(tokens_BT, segments_BT, positions_BT, train)
            tokens_BT, segments_BT = piece.tokens_BT, piece.documents_BT
            positions_BT = piece.positions_BT
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(
                jnp.arange(tokens_BT.shape[1]), tokens_BT.shape
            )
        embedding_VD = self._vectors("embedding", config.d_model**-0.5)
        used_VD = constrain(self.activations, embedding_VD, "vocab")
        h_BTD = used_VD.at[tokens_BT].get(
            mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
        ) * (config.d_model**0.5)
        h_BTD = constrain(self.activations, h_BTD.astype(dtypes.compute), "batch")
        starved_B = None
        if train and config.starve_prob > 0:
            starved_B = jax.random.bernoulli(
                self.make_rng("dropout"), config.starve_prob, tokens_BT.shape[:1]
            )
        shared = {
            name: SharedTables(
                memory=memory,
                d_model=config.d_model,
                dtypes=dtypes,
                sharding=self.table_sharding,
                name=f"shared_{name}",
            )()
            for name, (memory, _) in shared_tables(
                config.memories, config.d_model
            ).items()
        }

        n_run = n_decoder_tokens(config, last, tokens_BT.shape[1], piece is not None)

        def inputs_of(layer: int, memory: Memory) -> MemoryInputs:
            rows_BTC = None
            if reads_tokens(memory):
                rows_BTC = given.get(layer)
                if rows_BTC is None:
                    layout = layouts(config)[layer]
                    rows_BTC = self._rows(layout, tokens_BT, segments_BT, piece)
            tables = (
                None if memory.shared_table is None else shared[memory.shared_table]
            )
            if config.decodes(layer):
                rows_BTC, segments, positions = _last(
                    n_run, (rows_BTC, segments_BT, positions_BT)
                )
                return MemoryInputs(segments, positions, rows_BTC, tables, piece)
            return MemoryInputs(segments_BT, positions_BT, rows_BTC, tables, piece)

        expert_ids_BTK = self._expert_ids(tokens_BT, segments_BT, piece)
        places, source = (segments_BT, positions_BT, starved_B), None
        carried = self._expanded(h_BTD)
        for start, length, here in runs(config):
            if source is None and config.decodes(start):
                source = self._source(carried, segments_BT, positions_BT, piece)
                carried, expert_ids_BTK, places = _last(
                    n_run, (carried, expert_ids_BTK, (segments_BT, positions_BT))
                )
                places = (*places, starved_B)
            inputs = tuple(inputs_of(start, seated.config) for seated in here)
            ids = expert_ids_BTK if config.has_experts(start) else None
            arguments = (*places, ids, inputs, train, drop_memory, piece, source)
            carried = self._run(start, length, here, carried, arguments)
        h_BTD = _last(n_run if last is None else last, self._collapsed(*carried))
        tied_VD = embedding_VD if config.tie_embeddings else None
        logits_BTV = self._head("head", "final_norm", h_BTD, tied_VD)
        if config.arrangement == "probability" and not drop_memory:
            (memory,) = config.memories
            inputs = inputs_of(config.n_layers, memory)
            logits_BTV = self._mixture(logits_BTV, h_BTD, inputs, train)
        return logits_BTV if piece is None else piece.restored(logits_BTV)

    def _source(
        self,
        carried: tuple[Array, Array | None],
        segments_BT: Array,
        positions_BT: Array,
        piece: Piece | None,
    ) -> Source:
        """What the decoder's blocks look at."""
        config = self.config
        assert config.ced is not None
        stream_BTD = self._norm("source_norm", self._collapsed(*carried))
        shared = None
        if config.ced.share_kv:
            shared = HeadKeys(
                config.n_kv_heads,
                config.d_model // config.n_heads,
                config.rope_theta,
                Dtypes.of(config.precision),
                name="source",
            )(stream_BTD, positions_BT, piece)
        return Source(stream_BTD, segments_BT, positions_BT, shared)

    def _piece(
        self, tokens_BT: Array, segments_BT: Array, positions_BT: Any, train: bool
    ) -> Piece:
        """The tokens of this call, and where they stand in the rows of the cache."""
        if positions_BT is not None:
            raise ConfigError("positions_BT", "given", "None with a cache")
        if train:
            raise ConfigError("train", train, "False with a cache")
        check_decodes(self.config)
        assert self.cache_tokens is not None
        place = Place(self.cache_tokens, n_history(self.config), name=PLACE)
        return place(tokens_BT, segments_BT)

    def _rows(
        self, layout: Layout, ids_BT: Array, segments_BT: Array, piece: Piece | None
    ) -> Array:
        """Row ids [B, T, C] of the memories that are addressed by tokens."""
        before_BN = None if piece is None else piece.history(layout.max_order - 1)
        if not self.is_initializing():  # no parameter depends on the rows
            ids_BT = self.hashed_ids(ids_BT, layout)
            if before_BN is not None:
                before_BN = self.hashed_ids(before_BN, layout)
        return hashed_rows(
            layout, ids_BT, segments_BT=segments_BT, history_BN=before_BN
        )

    def _expert_ids(
        self, tokens_BT: Array, segments_BT: Array, piece: Piece | None
    ) -> Array | None:
        """int32 [B, T, K] where experts follow from the tokens, else None."""
        experts, n_ids = self.config.experts, self.config.vocab_size
        if experts is None or experts.routing == "learned":
            return None
        if experts.routing == "bigram":
            layout = experts.layout(n_ids, n_ids - 1)
            return bigram_experts(
                tokens_BT,
                layout,
                segments_BT=segments_BT,
                history_BN=None if piece is None else piece.history(1),
            )
        if self.is_initializing():  # no parameter depends on the choice
            return jnp.zeros((*tokens_BT.shape, experts.top_k), jnp.int32)
        return table_experts(experts.table(n_ids, self.counts), tokens_BT)

    def _memory(self, layer: int, memory: Memory, **where: Any) -> nn.Module:
        return memory_module(
            memory,
            Dtypes.of(self.config.precision),
            None if memory.table_mode in ("dense", "host") else self.table_sharding,
            layouts(self.config)[layer] if reads_tokens(memory) else None,
            **where,
        )

    def _expanded(self, h_BTD: Array) -> tuple[Array, Array | None]:
        """What the first block is handed: the stream, or M equal ones."""
        hyper = self.config.hyper
        if hyper is None:
            return h_BTD, None
        single = hyper.form == "single_pass"
        pre = first_pre(h_BTD, hyper.n_streams) if single else None
        return expand(h_BTD, hyper.n_streams), pre

    def _collapsed(self, stream: Array, pre: Array | None) -> Array:
        """One stream after the last block; without a `pre`, the sum of all."""
        if self.config.hyper is None:
            return stream
        return collapse(stream, jnp.ones(stream.shape[:-1]) if pre is None else pre)

    def _run(
        self,
        start: int,
        length: int,
        here: tuple[Placed, ...],
        carried: tuple[Array, Array | None],
        arguments: tuple[Any, ...],
    ) -> tuple[Array, Array | None]:
        config = self.config
        block = Block
        if config.remat:
            # Inside a scan the compiler cannot undo it, and guarding costs time.
            block = nn.remat(block, static_argnums=(7, 8), prevent_cse=length == 1)
        options = {
            "n_heads": config.n_heads,
            "n_kv_heads": config.n_kv_heads,
            "d_ff": config.d_ff,
            "window": config.window,
            "starve_window": config.starve_window,
            "rope_theta": config.rope_theta,
            "norm_eps": config.norm_eps,
            "dropout": config.dropout,
            "out_scale": (2 * config.n_layers) ** -0.5,
            "three_branch": config.arrangement == "three_branch",
            "hyper": config.hyper,
            "local_window": None if config.ced is None else config.ced.local_window,
            "experts": config.experts if config.has_experts(start) else None,
            "dtypes": Dtypes.of(config.precision),
            "activations": self.activations,
        }
        if here:
            options["memories"] = tuple(
                self._memory(start, seated.config, name=seated.name, parent=None)
                for seated in here
            )
            options["seats"] = tuple(
                Seat(
                    seated.name,
                    seated.config.place,
                    seated.config.normed_input,
                    all_streams=n_branches(seated.config) > 1,
                )
                for seated in here
            )
        if length == 1:
            return block(name=f"block_{start}", **options)(carried, *arguments)

        def body(module: Block, carry: Any, _: None) -> tuple[Any, None]:
            return module(carry, *arguments), None

        scanned = nn.scan(
            body,
            variable_axes={"params": 0, METRICS: 0, LOSSES: 0, CACHE: 0},
            split_rngs={"params": True, "dropout": True},
            length=length,
        )
        module = block(name=f"blocks_{start}_{start + length - 1}", **options)
        return scanned(module, carried, None)[0]

    def _norm(self, name: str, h_BTD: Array) -> Array:
        dtypes = Dtypes.of(self.config.precision)
        return RMSNorm(
            eps=self.config.norm_eps,
            param_dtype=dtypes.params,
            accumulation=dtypes.accumulation,
            name=name,
        )(h_BTD)

    def _vectors(self, name: str, std: float) -> Array:
        shape = (self.config.vocab_size, self.config.d_model)
        dtype = Dtypes.of(self.config.precision).params
        return self.param(name, nn.initializers.normal(std), shape, dtype)

    def _head(self, head: str, norm: str, h_BTD: Array, tied_VD: Array | None) -> Array:
        config, dtypes = self.config, Dtypes.of(self.config.precision)
        h_BTD = self._norm(norm, h_BTD)
        if tied_VD is None:
            tied_VD = self._vectors(head, 1 / config.d_model)
        logits_BTV = jnp.einsum(
            "btd,vd->btv",
            h_BTD,
            tied_VD.astype(dtypes.compute),
            preferred_element_type=dtypes.accumulation,
        )
        logits_BTV = constrain(self.activations, logits_BTV, "batch", None, "vocab")
        return logits_BTV.astype(jnp.promote_types(dtypes.accumulation, jnp.float32))

    def _mixture(
        self, logits_BTV: Array, h_BTD: Array, inputs: MemoryInputs, train: bool
    ) -> Array:
        (memory,) = self.config.memories
        if memory.normed_input:
            h_BTD = self._norm("memory_input_norm", h_BTD)
        module: Any = self._memory(self.config.n_layers, memory, name="memory")
        read_BTD = module.read(h_BTD, inputs, train=train)
        memory_BTV = self._head("memory_head", "memory_norm", read_BTD, None)
        share = self.config.memory_share
        return jnp.logaddexp(
            jnp.log(share) + jax.nn.log_softmax(memory_BTV),
            jnp.log1p(-share) + jax.nn.log_softmax(logits_BTV),
        )


def _last(n: int, tree: Any) -> Any:
    """The last n entries of the second axis of every array."""
    return jax.tree.map(lambda x: x[:, -n:], tree)
