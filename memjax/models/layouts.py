"""Which rows of which tables the memories of a model read.

What: the row layout of every block whose memory is addressed by tokens; what a token
    reads of each table.
Why: model, costs, measurements and the optimizer's tables ask for it without a model.
When not: the hashes themselves; those are of `ops`.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from memjax.errors import ConfigError
from memjax.layers.engram import EngramConfig
from memjax.layers.memory import TableSpec
from memjax.layers.token_rows import TokenRows
from memjax.models.config import ModelConfig
from memjax.models.memories import hashed, placed
from memjax.ops.hashed_rows import Layout
from memjax.ops.ngram_layout import ngram_layouts

# Config fields that the layout knows by another name.
_FIELDS = {"seed": "hash_seed", "layer_ids": "layers"}


@lru_cache(maxsize=64)
def layouts(config: ModelConfig) -> dict[int, Layout]:
    """The row layout of every block whose memory is addressed by tokens.

    Engram's primes are distinct over the layers of one memory, as published, unless
    they share a table: then all have the layout of its first layer. The layouts of
    other memories are the same in all their layers.
    """
    found: dict[int, Layout] = {}
    for i, memory in enumerate(config.memories):
        if isinstance(memory, TokenRows):
            layout = memory.row_layout(config.vocab_size)
            found |= dict.fromkeys(memory.layers, layout)
            continue
        if not isinstance(memory, EngramConfig):
            continue
        shares = memory.shared_table is not None
        try:
            of_memory = ngram_layouts(
                vocab_size=config.n_hashed_ids(memory),
                pad_id=config.pad_id(memory),
                orders=memory.orders,
                n_heads=memory.n_heads,
                rows_per_head=memory.rows_per_head,
                layer_ids=memory.layers[:1] if shares else memory.layers,
                seed=memory.hash_seed,
            )
            found |= {cold.layer_id: memory.layout_of(cold) for cold in of_memory}
            if shares:
                found |= dict.fromkeys(memory.layers, found[memory.layers[0]])
        except ConfigError as error:
            name = error.field.removeprefix("memories.")
            name = _FIELDS.get(name, name)
            field = f"model.memories.{i}.{name}"
            raise ConfigError(field, error.value, error.allowed) from None
    return found


def check_rows(
    config: ModelConfig, rows: Mapping[int, Any] | None, allowed: bool = True
) -> Mapping[int, Any]:
    """The given rows by layer; ConfigError for those that nothing would read."""
    if rows and not allowed:
        raise ConfigError("rows", f"of layers {sorted(rows)}", "None with a cache")
    for layer in rows or ():
        if layer not in layouts(config):
            raise ConfigError("rows", layer, f"one of {sorted(layouts(config))}")
    return rows or {}


class TableReads(NamedTuple):
    """What a token reads of one table.

    Attributes:
        rows: rows read, by all layers that share it.
        width: W of a row.
        weighed: whether the rows are summed with weights, or taken as they are.
        mode: of the table, such as "rows".
        layers: that read it, ascending.
        spec: the table.
        kernel: of `ops.bag_kernels`, for its reads and the sums of its gradients.
    """

    rows: int
    width: int
    weighed: bool
    mode: str
    layers: tuple[int, ...]
    spec: TableSpec
    kernel: str = "auto"


def table_reads(config: ModelConfig) -> dict[str, TableReads]:
    """{path of a table: what a token reads of it}."""
    found: dict[str, TableReads] = {}
    for layer in range(config.n_layers + 1):
        for memory, name in placed(config.memories, layer):
            if isinstance(memory, EngramConfig):
                specs = memory.specs(layouts(config)[layer].n_rows)
            else:
                specs = memory.table_specs(config.d_model)
            owner = f"block_{layer}/{name}" if layer < config.n_layers else name
            if memory.shared_table is not None:
                owner = f"shared_{memory.shared_table}"
            for table, spec in specs.items():
                path = f"{owner}/{table}"
                before = found.get(path)
                found[path] = TableReads(
                    spec.reads + (before.rows if before else 0),
                    spec.width,
                    not hashed(memory),
                    memory.table_mode,
                    (*(before.layers if before else ()), layer),
                    spec,
                    memory.kernel,
                )
    return found
