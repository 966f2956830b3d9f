"""The memories that a model can carry, and what follows from where they sit.

What: the union of memory configs, the module of each, which block reads what, and the
    tables that are shared.
Why: everything else treats memories alike; a new kind is one line in `KINDS`.
When not: options and mathematics of a memory; those are its layer's.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn

from memjax.errors import ConfigError
from memjax.layers.byte_engram import ByteEngramConfig
from memjax.layers.engram import Engram, EngramConfig
from memjax.layers.fast_weight import FastWeightMemory
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.layers.hot_engram import HotEngram, HotEngramConfig
from memjax.layers.memory import PLACES, MemoryConfig, TableSpec
from memjax.layers.memory_plus import MemoryPlus, MemoryPlusConfig
from memjax.layers.ngram_embedding import NgramEmbedding, NgramEmbeddingConfig
from memjax.layers.ngram_keys import NgramKeys, NgramKeysConfig
from memjax.layers.peer import Peer, PeerConfig
from memjax.layers.precision import Dtypes
from memjax.layers.product_key import ProductKeyMemory
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.layers.token_rows import TokenRows
from memjax.ops.hashed_rows import Layout
from memjax.parallel.row_sharding import RowSharding

Memory: TypeAlias = (
    EngramConfig
    | ProductKeyConfig
    | MemoryPlusConfig
    | PeerConfig
    | FastWeightConfig
    | NgramKeysConfig
    | ByteEngramConfig
    | NgramEmbeddingConfig
    | HotEngramConfig
)

KINDS: Mapping[type[MemoryConfig], type[nn.Module]] = {
    EngramConfig: Engram,
    ProductKeyConfig: ProductKeyMemory,
    MemoryPlusConfig: MemoryPlus,
    PeerConfig: Peer,
    FastWeightConfig: FastWeightMemory,
    NgramKeysConfig: NgramKeys,
    ByteEngramConfig: Engram,
    NgramEmbeddingConfig: NgramEmbedding,
    HotEngramConfig: HotEngram,
}

# Engrams that share a table must find the same rows.
_HASH_FIELDS = (
    "orders",
    "n_heads",
    "rows_per_head",
    "hash_seed",
    "n_token_classes",
    "pad_id",
    "basis",
    "hot_rows",
    "hot_file",
)


class Placed(NamedTuple):
    """One memory at one block.

    Attributes:
        config: of the memory.
        name: of its module in the block: "memory", or "memory_<i>" with the index
            into the model's memories where a block has several.
    """

    config: Memory
    name: str


def placed(memories: tuple[Memory, ...], layer: int) -> tuple[Placed, ...]:
    """The memories of block `layer`, in the order in which they act."""
    here = [(i, memory) for i, memory in enumerate(memories) if layer in memory.layers]
    here.sort(key=lambda found: PLACES.index(found[1].place))
    return tuple(
        Placed(memory, "memory" if len(here) == 1 else f"memory_{i}")
        for i, memory in here
    )


def hashed(memory: Memory) -> bool:
    """Whether its rows are hashes of n-grams, computed from the tokens."""
    return isinstance(memory, EngramConfig | NgramEmbeddingConfig)


def reads_tokens(memory: Memory) -> bool:
    """Whether it is handed row ids that follow from the tokens, hashed or not."""
    return isinstance(memory, EngramConfig | TokenRows)


def looks_back(memory: Memory) -> bool:
    """Whether its read of a token needs what it did for the tokens before."""
    if isinstance(memory, EngramConfig):
        return memory.form == "demo" and memory.kernel_size > 0
    return isinstance(memory, FastWeightConfig)


def n_branches(memory: Memory) -> int:
    """Residual streams that it reads and writes by itself."""
    return memory.n_branches if isinstance(memory, EngramConfig) else 1


def carried_state(memories: tuple[Memory, ...]) -> list[str]:
    """A line for the log for each memory that carries what it read to later batches."""
    return [
        f"model.memories.{i}.state = 'shared': its fast weights are carried from step "
        "to step and mix the sequences of a batch, so scores depend on the order of "
        "the data and on how it is batched"
        for i, memory in enumerate(memories)
        if isinstance(memory, FastWeightConfig) and memory.state == "shared"
    ]


def shared_tables(
    memories: tuple[Memory, ...], d_model: int
) -> dict[str, tuple[Memory, dict[str, TableSpec]]]:
    """{name: (a memory that reads it, its tables)} of the tables that are shared.

    Raises:
        ConfigError: two memories ask for different tables under one name.
    """
    found: dict[str, tuple[Memory, dict[str, TableSpec]]] = {}
    for i, memory in enumerate(memories):
        name = memory.shared_table
        if name is None:
            continue
        wanted = (memory, memory.table_specs(d_model))
        first = found.setdefault(name, wanted)
        if _asks_for(*first) != _asks_for(*wanted):
            raise ConfigError(
                f"model.memories.{i}.shared_table",
                f"{name} with {_asks_for(*wanted)}",
                f"tables equal to the first of that name, {_asks_for(*first)}",
            )
    return found


def _asks_for(memory: MemoryConfig, specs: Mapping[str, TableSpec]) -> str:
    sizes = ", ".join(
        f"{name} {spec.n_rows} x {spec.width} ({spec.init}, std {spec.std:.6g})"
        for name, spec in specs.items()
    )
    words = [sizes, f"mode {memory.table_mode}, kernel {memory.kernel}"]
    if isinstance(memory, EngramConfig):
        hash_of = {name: getattr(memory, name, None) for name in _HASH_FIELDS}
        words += [f"{name} {value}" for name, value in hash_of.items()]
        if not isinstance(memory, TokenRows):
            words.append(f"first layer {memory.layers[0]}")
    return ", ".join(words)


def memory_module(
    memory: Memory,
    dtypes: Dtypes,
    sharding: RowSharding | None,
    layout: Layout | None,
    **where: Any,
) -> nn.Module:
    """The Linen module of a memory; `where` is its name and parent."""
    options = where
    if layout is not None:
        options = {**where, "n_rows": layout.n_rows}
    return KINDS[type(memory)](
        config=memory, dtypes=dtypes, sharding=sharding, **options
    )
