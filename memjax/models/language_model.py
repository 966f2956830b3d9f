"""The language model: a decoder whose blocks may read memories.

What: tokens -> logits; which block reads which table, and how branches are joined.
Why: one small backbone, so that what differs between runs is the memory.
When not: losses, sampling and evaluation take `apply` as a function.
"""

from collections.abc import Iterator
from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError
from memjax.layers.block import Block
from memjax.layers.engram import Engram, EngramConfig
from memjax.layers.norm import RMSNorm
from memjax.layers.precision import Dtypes
from memjax.layers.record import METRICS
from memjax.models.config import ModelConfig
from memjax.ops.ngram_hash import NgramLayout, ngram_layouts, ngram_rows
from memjax.parallel.row_sharding import RowSharding

# Config fields that the layout knows by another name.
_FIELDS = {"seed": "hash_seed", "layer_ids": "layers"}


@lru_cache(maxsize=64)
def layouts(config: ModelConfig) -> dict[int, NgramLayout]:
    """The n-gram layout of every block that reads a hashed table, by block index.

    Primes are distinct over the layers of one memory, as published.
    """
    found: dict[int, NgramLayout] = {}
    for i, memory in enumerate(config.memories):
        try:
            of_memory = ngram_layouts(
                vocab_size=config.vocab_size,
                pad_id=config.pad_id(memory),
                orders=memory.orders,
                n_heads=memory.n_heads,
                rows_per_head=memory.rows_per_head,
                layer_ids=memory.layers,
                seed=memory.hash_seed,
            )
        except ConfigError as error:
            name = _FIELDS.get(error.field, error.field)
            field = f"model.memories.{i}.{name}"
            raise ConfigError(field, error.value, error.allowed) from None
        found |= {layout.layer_id: layout for layout in of_memory}
    return found


def runs(config: ModelConfig) -> Iterator[tuple[int, int, EngramConfig | None]]:
    """(first block, number of blocks, memory) of each run of equal blocks.

    Blocks with a memory stand alone, since each owns a table of its own size.
    """
    reading = {layer: memory for memory in config.memories for layer in memory.layers}
    start = 0
    while start < config.n_layers:
        end = start + 1
        if start not in reading and config.scan_layers:
            while end < config.n_layers and end not in reading:
                end += 1
        yield start, end - start, reading.get(start)
        start = end


class LanguageModel(nn.Module):
    """Decoder language model, tokens [B, T] -> logits [B, T, V].

    Parameters of a single block are under `block_<i>`, those of a scanned run of
    blocks i..j under `blocks_<i>_<j>` with the layer axis in front; tables are the
    leaves called `table`, in mode "rows" in the collection "tables" under the same
    path.

    Attributes:
        config: the model.
        table_sharding: how tables in mode "rows" are divided; None: not divided.
    """

    config: ModelConfig
    table_sharding: RowSharding | None = None

    @nn.compact
    def __call__(
        self,
        tokens_BT: Array,
        segments_BT: Array | None = None,
        positions_BT: Array | None = None,
        *,
        train: bool = False,
        drop_memory: bool = False,
    ) -> Array:
        """Logits of the next token.

        Args:
            tokens_BT: int32 ids in [0, V); an id outside gives NaN logits.
            segments_BT: int32 document number inside the row, 0 for padding; None:
                one document. Nothing looks across a segment.
            positions_BT: int32 positions inside the document; None: 0..T-1.
            train: dropout on (needs the rng "dropout" when a rate is positive).
            drop_memory: measure the backbone alone, all memory gates 0.

        Returns:
            Logits, float32 (or wider under 64-bit mode). In the "probability"
            arrangement they are log-probabilities of the mixture.
        """
        config, dtypes = self.config, Dtypes.of(self.config.precision)
        if segments_BT is None:
            segments_BT = jnp.ones_like(tokens_BT)
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(
                jnp.arange(tokens_BT.shape[1]), tokens_BT.shape
            )
        embedding_VD = self.param(
            "embedding",
            nn.initializers.normal(config.d_model**-0.5),
            (config.vocab_size, config.d_model),
            dtypes.params,
        )
        h_BTD = embedding_VD.at[tokens_BT].get(
            mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
        ) * (config.d_model**0.5)
        h_BTD = h_BTD.astype(dtypes.compute)
        for start, length, memory in runs(config):
            h_BTD = self._run(
                start,
                length,
                memory,
                h_BTD,
                tokens_BT,
                segments_BT,
                positions_BT,
                train,
                drop_memory,
            )
        logits_BTV = self._head("head", "final_norm", h_BTD, embedding_VD)
        if config.arrangement != "probability" or drop_memory:
            return logits_BTV
        return self._mixture(logits_BTV, h_BTD, tokens_BT, segments_BT, train)

    def _memory(self, layer: int, memory: EngramConfig, name: str | None) -> Engram:
        return Engram(
            config=memory,
            n_rows=layouts(self.config)[layer].n_rows,
            dtypes=Dtypes.of(self.config.precision),
            sharding=self.table_sharding,
            parent=None if name is None else self,
            name=name,
        )

    def _rows(self, layer: int, tokens_BT: Array, segments_BT: Array) -> Array:
        return ngram_rows(
            tokens_BT, layouts(self.config)[layer], segments_BT=segments_BT
        )

    def _run(
        self,
        start: int,
        length: int,
        memory: EngramConfig | None,
        h_BTD: Array,
        tokens_BT: Array,
        segments_BT: Array,
        positions_BT: Array,
        train: bool,
        drop_memory: bool,
    ) -> Array:
        config = self.config
        block = Block
        if config.remat:
            # Inside a scan the compiler cannot undo it, and guarding costs time.
            block = nn.remat(block, static_argnums=(5, 6), prevent_cse=length == 1)
        options = {
            "n_heads": config.n_heads,
            "n_kv_heads": config.n_kv_heads,
            "d_ff": config.d_ff,
            "window": config.window,
            "rope_theta": config.rope_theta,
            "norm_eps": config.norm_eps,
            "dropout": config.dropout,
            "out_scale": (2 * config.n_layers) ** -0.5,
            "three_branch": config.arrangement == "three_branch",
            "dtypes": Dtypes.of(config.precision),
        }
        rows_BTC = None
        if memory is not None:
            options["memory"] = self._memory(start, memory, None)
            rows_BTC = self._rows(start, tokens_BT, segments_BT)
        arguments = (segments_BT, positions_BT, rows_BTC, train, drop_memory)
        if length == 1:
            return block(name=f"block_{start}", **options)(h_BTD, *arguments)

        def body(module: Block, carry: Array, _: None) -> tuple[Array, None]:
            return module(carry, *arguments), None

        scanned = nn.scan(
            body,
            variable_axes={"params": 0, METRICS: 0},
            split_rngs={"params": True, "dropout": True},
            length=length,
        )
        module = block(name=f"blocks_{start}_{start + length - 1}", **options)
        return scanned(module, h_BTD, None)[0]

    def _head(self, head: str, norm: str, h_BTD: Array, tied_VD: Array | None) -> Array:
        config, dtypes = self.config, Dtypes.of(self.config.precision)
        h_BTD = RMSNorm(
            eps=config.norm_eps,
            param_dtype=dtypes.params,
            accumulation=dtypes.accumulation,
            name=norm,
        )(h_BTD)
        if config.tie_embeddings and tied_VD is not None:
            weight_VD = tied_VD
        else:
            weight_VD = self.param(
                head,
                nn.initializers.normal(1 / config.d_model),
                (config.vocab_size, config.d_model),
                dtypes.params,
            )
        logits_BTV = jnp.einsum(
            "btd,vd->btv",
            h_BTD,
            weight_VD.astype(dtypes.compute),
            preferred_element_type=dtypes.accumulation,
        )
        return logits_BTV.astype(jnp.promote_types(dtypes.accumulation, jnp.float32))

    def _mixture(
        self,
        logits_BTV: Array,
        h_BTD: Array,
        tokens_BT: Array,
        segments_BT: Array,
        train: bool,
    ) -> Array:
        (memory,) = self.config.memories
        layer = self.config.n_layers
        read_BTD = self._memory(layer, memory, "memory").branch(
            h_BTD,
            self._rows(layer, tokens_BT, segments_BT),
            segments_BT=segments_BT,
            token_mask_BT=segments_BT > 0,
            train=train,
        )
        memory_BTV = self._head("memory_head", "memory_norm", read_BTD, None)
        share = self.config.memory_share
        return jnp.logaddexp(
            jnp.log(share) + jax.nn.log_softmax(memory_BTV),
            jnp.log1p(-share) + jax.nn.log_softmax(logits_BTV),
        )
