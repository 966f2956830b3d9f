"""What the memories of a model recorded in a forward pass, by memory.

What: `apply_recording`, the forward pass that keeps records; `memory_records`, those of
    the memories; `slot_tables`, what the recorded slots count in.
Why: health during training and measurements of a finished run read the same records.
When not: what is recorded is decided by the layers; see layers.record.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax import Array

from memjax.data.row_ids import given_rows
from memjax.evaluate.usage import UsageCounter
from memjax.layers.record import METRICS
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.layouts import layouts
from memjax.models.memories import hashed, placed
from memjax.models.parameters import split_variables
from memjax.ops.hashed_rows import HashLayout
from memjax.ops.hot_tier import HotLayout
from memjax.ops.ngram_window import WindowLayout

_MODULE = re.compile(r"memory(_\d+)?")


class SlotTable(NamedTuple):
    """Slots of a memory: how many a head has, and whether each head has its own."""

    n_slots: int
    separate_heads: bool

    def counter(self, n_heads: int) -> UsageCounter:
        """An empty counter of its slots."""
        separate = self.separate_heads
        return UsageCounter(self.n_slots, n_heads, separate_heads=separate)


def apply_recording(
    model: LanguageModel, params: Any, batch: Mapping[str, Any], **options: Any
) -> tuple[Array, Any]:
    """(logits, collection METRICS) without dropout; `options` are the model's."""
    logits_BTV, state = model.apply(
        split_variables(params, model.config),
        batch["tokens"],
        batch["segments"],
        batch["positions"],
        rows=given_rows(batch),
        mutable=[METRICS],
        **options,
    )
    return logits_BTV, state.get(METRICS, {})


def memory_name(layer: int, module: str) -> str:
    """ "layer_3", or "layer_3/memory_0" where a block has several memories."""
    return f"layer_{layer}" + ("" if module == "memory" else f"/{module}")


def memory_records(metrics: Any, config: ModelConfig) -> dict[str, dict[str, Array]]:
    """{memory: {record: value}} of all that the memories recorded themselves.

    A memory goes by its block, as `memory_name` says; that of the head counts as block
    n_layers. Works inside jit.
    """
    found: dict[str, dict[str, Array]] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(metrics):
        names = [str(part.key) for part in path]
        modules = [name for name in names[:-1] if _MODULE.fullmatch(name)]
        if modules:
            in_block = names[0].startswith("block_")
            layer = int(names[0].split("_")[1]) if in_block else config.n_layers
            found.setdefault(memory_name(layer, modules[0]), {})[names[-1]] = value
    return found


def hashed_layouts(config: ModelConfig) -> dict[str, HashLayout]:
    """{memory: its layout} of the memories that are hashed.

    Of one with a hot tier that of its cold table, as if every token read that.
    """
    found: dict[str, HashLayout] = {}
    for layer, layout in layouts(config).items():
        cold = layout.cold if isinstance(layout, HotLayout) else layout
        for memory, module in placed(config.memories, layer):
            if hashed(memory) and not isinstance(cold, WindowLayout):
                found[memory_name(layer, module)] = cold
    return found


def slot_tables(config: ModelConfig) -> dict[str, SlotTable]:
    """{memory: its slots} of the memories that are not hashed."""
    found = {}
    for layer in range(config.n_layers + 1):
        for memory, module in placed(config.memories, layer):
            if hashed(memory):
                continue
            specs: Any = memory.table_specs(config.d_model)
            n_rows = max(spec.n_rows for spec in specs.values())
            separate = getattr(memory, "separate_tables", False)
            if separate:
                n_rows //= memory.n_heads
            found[memory_name(layer, module)] = SlotTable(n_rows, separate)
    return found
