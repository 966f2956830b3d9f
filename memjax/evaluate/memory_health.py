"""How the memories of a model are doing on one batch.

What: rows touched, usage and its entropy, collisions, gate quantiles, gradient norms.
Why: a memory that explains the targets shows here before held-out loss shows it: gates
saturate and the backbone's gradient dies.
When not: usage over a whole corpus or run; a batch is a small sample.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from memjax.evaluate.collisions import collision_frac
from memjax.evaluate.gradient_share import LossFn, make_backbone_norms
from memjax.evaluate.memory_records import (
    apply_recording,
    hashed_layouts,
    memory_records,
    slot_tables,
)
from memjax.models.language_model import LanguageModel
from memjax.models.parameters import abstract_params, labels
from memjax.ops.hashed_rows import host_hashed_rows

QUANTILES = (0.05, 0.5, 0.95)
SLOT_USAGE = (
    "used_pct",
    *(f"{figure}_{kind}" for figure in ("kl", "gini", "top90") for kind in "wu"),
)


def usage(rows: np.ndarray, n_rows: int) -> dict[str, float]:
    """Usage of a table by a set of reads.

    Args:
        rows: integer row ids of any shape, one per read.
        n_rows: rows of the table.

    Returns:
        rows_touched, distinct rows; usage_frac, their part of the table;
        usage_entropy_bits, entropy of the reads over rows, at most log2(rows_touched).
        No reads: all 0.
    """
    counts = np.unique(rows, return_counts=True)[1]
    share = counts / max(counts.sum(), 1)
    entropy = float(-np.sum(share * np.log2(share)))
    return {
        "rows_touched": float(len(counts)),
        "usage_frac": len(counts) / n_rows,
        "usage_entropy_bits": max(entropy, 0.0),
    }


def make_health(
    model: LanguageModel, loss_fn: LossFn
) -> Callable[[Any, dict[str, Any]], dict[str, float]]:
    """A function (params, batch) -> health metrics of the model's memories.

    Args:
        model: the model.
        loss_fn: (params, batch, key, drop_memory=bool) -> (summed nats, {"weight"}).

    Returns:
        Metrics, `<name>/layer_<i>` where they belong to a block, and
        `<name>/layer_<i>/memory_<j>` where that block has several memories.
        Of hashed memories: those of `usage`, and collision_frac.
        Of memories that select slots, all heads together: slot_used_pct, slot_kl_w,
        slot_gini_w, slot_top90_w and the same unweighted (`usage.usage_metrics`; left
        out where undefined).
        Of every memory: gate_q05, gate_q50, gate_q95 of its gate, and what it records
        as one number (non_finite_scores, losses of fast weights).
        Of every block: attention_rms, feed_forward_rms, memory_rms (by the name of the
        memory) and stream_rms; see `layers.block.Block`.
        Of the model: memory_share, the tables' part of all parameters;
        backbone_grad_norm and backbone_grad_norm_without_memory, norms of the gradient
        of the mean loss with respect to every parameter but tables, with the memory in
        place and with every gate at 0.

    Cost: two forward and backward passes over the batch and a pass on the host.
    """
    config = model.config

    @jax.jit
    def forward(params: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
        _, metrics = apply_recording(model, params, batch)
        real = batch["segments"] > 0
        found: dict[str, Array] = {}
        for path, value in jax.tree_util.tree_leaves_with_path(metrics):
            names = [str(part.key) for part in path]
            if names[-1].endswith("_rms"):
                first = int(names[0].split("_")[1])
                for i, rms in enumerate(jnp.atleast_1d(value)):
                    found[f"{names[-1]}/layer_{first + i}"] = rms
        reads: dict[str, tuple[Array, Array]] = {}
        for memory, records in memory_records(metrics, config).items():
            if "gate" in records:
                gates = records["gate"].reshape(*real.shape, -1)
                gates = jnp.where(real[..., None], gates, jnp.nan)
                for q, at in zip(
                    QUANTILES, jnp.nanquantile(gates, jnp.array(QUANTILES)), strict=True
                ):
                    found[f"gate_q{round(100 * q):02d}/{memory}"] = at
            if "slots" in records:
                weights = records["weights"].astype(jnp.float32)
                reads[memory] = (records["slots"], weights)
            for name, value in records.items():
                if value.ndim == 0:
                    found[f"{name}/{memory}"] = value
        return found, reads

    gradient_norms = make_backbone_norms(config, loss_fn)

    def health(params: Any, batch: dict[str, Any]) -> dict[str, float]:
        values, reads = forward(params, batch)
        if config.memories:
            values |= gradient_norms(params, batch)
        found = {name: float(value) for name, value in values.items()}
        # Not from params: a divided table is stored with padding.
        shapes = abstract_params(config)
        sizes = [
            (int(np.prod(leaf.shape, dtype=np.int64)), kind == "table")
            for leaf, kind in zip(
                jax.tree.leaves(shapes), jax.tree.leaves(labels(shapes)), strict=True
            )
        ]
        found["memory_share"] = sum(n for n, t in sizes if t) / sum(n for n, _ in sizes)
        tokens, segments = _whole(batch["tokens"]), _whole(batch["segments"])
        for memory, layout in hashed_layouts(config).items():
            ids = model.hashed_ids(tokens, layout)
            rows_BTC = host_hashed_rows(layout, ids, segments_BT=segments)
            measured = usage(rows_BTC[segments > 0], layout.n_rows)
            measured["collision_frac"] = collision_frac(ids, segments, layout)
            found |= {f"{name}/{memory}": x for name, x in measured.items()}
        for memory, arrays in reads.items():
            slots, weights = map(_whole, arrays)
            counter = slot_tables(config)[memory].counter(slots.shape[-2])
            counter.add(slots, weights, segments > 0)
            measured = counter.summary()
            found |= {
                f"slot_{name}/{memory}": float(measured[name])
                for name in SLOT_USAGE
                if np.isfinite(measured[name])
            }
        return found

    return health


def _whole(array: Any) -> np.ndarray:
    """All rows on the host; a collective call when other processes hold some."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
