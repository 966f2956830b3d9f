"""`--debug`: any experiment in seconds.

What: `shrink(experiment)`, the same structure with tiny sizes and few steps.
Why: a typo in a day-long run shows in seconds, in the same code on the same path.
When not: judging a model; the figures of a shrunk run mean nothing.
"""

import math
from dataclasses import fields, replace
from typing import Any

from memjax.experiment.definition import Experiment
from memjax.layers.cross_attention import CedConfig
from memjax.layers.experts import ExpertsConfig
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.models.config import ModelConfig
from memjax.models.memories import Memory
from memjax.parallel.logical_axes import BATCH_AXES
from memjax.parallel.mesh import MeshConfig
from memjax.train.config import TrainConfig

N_STEPS = 6
_D_MODEL = 32
# Sizes of memories; what is None stays so, and a tuple is capped one by one.
_LARGEST = {
    "n_heads": 2,
    "n_branches": 2,
    "rows_per_head": 64,
    "hot_rows": 64,
    "row_width": 8,
    "n_sub_keys": 16,
    "key_width": 8,
    "k": 4,
    "value_width": 16,
    "hidden_sizes": 16,
    "chunk": 8,
    "lookahead": 4,
    "modulo_rows": 16,
    "half_k": 4,
    "code_width": 4,
}
_WIDTHS = ("key_width", "value_width")
# What may have to divide over mesh.table; so many times as large there.
_DIVIDED = ("n_heads", "row_width", "value_width")


def shrink(experiment: Experiment) -> Experiment:
    """The experiment with tiny widths, tables, context and a few steps.

    Kept: vocabulary, which memories there are, their forms and modes, how many
    distinct blocks they sit in, optimizers and rates, corpora, mesh, precision. A tiny
    experiment may grow a little: sizes are set rather than capped where that keeps the
    parts fitting to each other.
    """
    shards = math.prod(max(getattr(experiment.mesh, name), 1) for name in BATCH_AXES)
    rows = experiment.train.accumulate_steps * shards * -(-8 // shards)
    context = min(experiment.data.context, 64)
    shrunk = replace(
        experiment,
        model=_shrink_model(experiment.model, experiment.mesh),
        data=replace(
            experiment.data,
            context=context,
            batch_size=rows,
            eval_stride=context,
            eval_batch_size=shards * -(-64 // shards),
        ),
        train=_shrink_train(experiment.train),
        optim=replace(
            experiment.optim, warmup_steps=min(experiment.optim.warmup_steps, 2)
        ),
    )
    return shrunk.validate()


def _shrink_model(model: ModelConfig, mesh: MeshConfig) -> ModelConfig:
    tensor, table = max(mesh.tensor, 1), max(mesh.table, 1)
    used = sorted({layer for memory in model.memories for layer in memory.layers})
    if model.arrangement == "probability":  # its memory sits after the last block
        n_layers = 2
        moved = dict.fromkeys(used, n_layers)
    else:
        n_layers = max(2, len(used) + 1)
        moved = {layer: rank for rank, layer in enumerate(used)}
    return replace(
        model,
        n_layers=n_layers,
        d_model=_D_MODEL,
        n_heads=2 * tensor,
        n_kv_heads=tensor if model.n_kv_heads < model.n_heads else 2 * tensor,
        d_ff=64,
        experts=None if model.experts is None else _shrink_experts(model.experts),
        expert_layers=_shrink_expert_layers(model, moved, n_layers),
        ced=None if model.ced is None else _shrink_ced(model.ced, n_layers),
        hyper=None
        if model.hyper is None
        else replace(model.hyper, n_streams=min(model.hyper.n_streams, 2)),
        starve_window=None
        if model.starve_window is None
        else min(model.starve_window, 8),
        window=None if model.window is None else min(model.window, 16),
        memories=tuple(
            _shrink_memory(memory, moved, model.d_model, table)
            for memory in model.memories
        ),
    )


def _shrink_expert_layers(
    model: ModelConfig, moved: dict[int, int], n_layers: int
) -> tuple[int, ...] | None:
    if model.expert_layers is None:
        return None
    replaced = {
        moved[layer]
        for memory in model.memories
        if memory.place == "instead_of_feed_forward"
        for layer in memory.layers
    }
    kept = {min(layer, n_layers - 1) for layer in model.expert_layers} - replaced
    return tuple(sorted(kept)) or (n_layers - 1,)  # the last block has no memory


def _shrink_ced(ced: CedConfig, n_layers: int) -> CedConfig:
    window = ced.local_window
    return replace(
        ced,
        first_decoder=min(ced.first_decoder, n_layers - 1),
        local_window=None if window is None else min(window, 8),
    )


def _shrink_experts(experts: ExpertsConfig) -> ExpertsConfig:
    top_k = min(experts.top_k, 2)
    n_experts = min(experts.n_experts, 4)
    return replace(
        experts,
        top_k=top_k,
        n_experts=max(n_experts // top_k, 1) * top_k,
        d_ff=min(experts.d_ff, 16),
        shared_d_ff=min(experts.shared_d_ff, 16),
    )


def _shrink_memory(
    memory: Memory, moved: dict[int, int], d_model: int, parts: int
) -> Memory:
    small: dict[str, Any] = {"layers": tuple(moved[layer] for layer in memory.layers)}
    for field in fields(memory):
        largest, value = _LARGEST.get(field.name), getattr(memory, field.name)
        if largest is None or value is None:
            continue
        largest *= parts if field.name in _DIVIDED else 1
        if field.name in _WIDTHS and value == d_model:
            small[field.name] = _D_MODEL  # it may have to stay that of the stream
        elif isinstance(value, tuple):
            small[field.name] = tuple(min(size, largest) for size in value)
        else:
            small[field.name] = min(value, largest)
    if isinstance(memory, ProductKeyConfig) and memory.key_init == "binary":
        # A key for every pattern of signs.
        width = small.get("key_width", _D_MODEL)
        small["n_sub_keys"] = 2 ** (width if memory.flat else width // 2)
    return replace(memory, **small)


def _shrink_train(train: TrainConfig) -> TrainConfig:
    def period(steps: int | None) -> int | None:
        return None if steps is None else N_STEPS // 2

    return replace(
        train,
        n_steps=N_STEPS,
        eval_every=period(train.eval_every),
        max_eval_batches=2,
        save_every=period(train.save_every),
        log_every=1,
        health_every=period(train.health_every),
        profile_steps=None if train.profile_steps is None else (2, 4),
    )
