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

from memjax.layers.record import METRICS
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel, layouts
from memjax.models.parameters import abstract_params, labels, split_tables
from memjax.ops.look_back import look_backs
from memjax.ops.ngram_hash import NgramLayout, host_ngram_rows

LossFn = Callable[..., tuple[Array, Any]]
QUANTILES = (0.05, 0.5, 0.95)


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


def collision_frac(
    tokens_BT: np.ndarray, segments_BT: np.ndarray, layout: NgramLayout
) -> float:
    """Part of the distinct n-grams that share their row with another distinct one.

    Averaged over hash columns, among the n-grams of this batch alone, so it is a lower
    bound of the rate on the corpus. Windows that reach before a document's start count
    as n-grams with the pad id. Padding tokens do not count; without tokens it is 0.
    """
    real_BT = segments_BT > 0
    if not real_BT.any():
        return 0.0
    rows_BTC = host_ngram_rows(tokens_BT, layout, segments_BT=segments_BT)
    looks = look_backs(tokens_BT, layout.max_order, segments_BT=segments_BT)
    seen = [np.where(blocked, layout.pad_id, token) for token, blocked in looks]
    colliding = []
    for i, order in enumerate(layout.orders):
        grams = np.stack([x[real_BT] for x in seen[:order]], axis=-1)
        distinct, first = np.unique(grams, axis=0, return_index=True)
        for head in range(layout.n_heads):
            rows = rows_BTC[real_BT][first, i * layout.n_heads + head]
            _, inverse, counts = np.unique(
                rows, return_inverse=True, return_counts=True
            )
            colliding.append(np.sum(counts[inverse] > 1) / len(distinct))
    return float(np.mean(colliding))


def make_health(
    model: LanguageModel, loss_fn: LossFn
) -> Callable[[Any, dict[str, Any]], dict[str, float]]:
    """A function (params, batch) -> health metrics of the model's memories.

    Args:
        model: the model.
        loss_fn: (params, batch, key, drop_memory=bool) -> (summed nats, {"weight"}).

    Returns:
        Metrics, `<name>/layer_<i>` where they belong to a block: those of `usage`;
        collision_frac; gate_q05, gate_q50, gate_q95; attention_rms, feed_forward_rms,
        memory_rms and stream_rms (see `layers.block.Block`); and over the model
        memory_share, the tables' part of all parameters; backbone_grad_norm and
        backbone_grad_norm_without_memory, norms of the gradient of the mean loss with
        respect to everything but tables, with the memory in place and with every gate
        at 0.

    Cost: two forward and backward passes over the batch and a pass on the host.
    """
    config = model.config

    @jax.jit
    def forward(params: Any, batch: dict[str, Any]) -> dict[str, Array]:
        _, state = model.apply(
            split_tables(params, config),
            batch["tokens"],
            batch["segments"],
            batch["positions"],
            mutable=[METRICS],
        )
        real = batch["segments"] > 0
        found: dict[str, Array] = {}
        for path, value in jax.tree_util.tree_leaves_with_path(state[METRICS]):
            names = [str(part.key) for part in path]
            if names[-1].endswith("_rms"):
                first = int(names[0].split("_")[1])
                for i, rms in enumerate(jnp.atleast_1d(value)):
                    found[f"{names[-1]}/layer_{first + i}"] = rms
            if names[-1] == "gate":
                layer = _layer(names[0], config)
                gates = jnp.where(real[..., None], value, jnp.nan)
                for q, at in zip(
                    QUANTILES, jnp.nanquantile(gates, jnp.array(QUANTILES)), strict=True
                ):
                    found[f"gate_q{round(100 * q):02d}/layer_{layer}"] = at
        return found

    @jax.jit
    def gradient_norms(params: Any, batch: dict[str, Any]) -> dict[str, Array]:
        leaves, tree = jax.tree.flatten(params)
        is_table = [kind == "table" for kind in jax.tree.leaves(labels(params))]
        dense = [x for x, t in zip(leaves, is_table, strict=True) if not t]

        def mean_nats(dense: list[Array], drop_memory: bool) -> Array:
            rest = iter(dense)
            merged = [
                x if t else next(rest) for x, t in zip(leaves, is_table, strict=True)
            ]
            nats, aux = loss_fn(
                tree.unflatten(merged),
                batch,
                jax.random.key(0),
                drop_memory=drop_memory,
            )
            return nats / jnp.maximum(aux["weight"], 1)

        norms = {}
        for name, drop in (("", False), ("_without_memory", True)):
            grads = jax.grad(mean_nats)(dense, drop)
            total = sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in grads)
            norms[f"backbone_grad_norm{name}"] = jnp.sqrt(total)
        return norms

    def health(params: Any, batch: dict[str, Any]) -> dict[str, float]:
        values = dict(forward(params, batch))
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
        for layer, layout in layouts(config).items():
            rows_BTC = host_ngram_rows(tokens, layout, segments_BT=segments)
            measured = usage(rows_BTC[segments > 0], layout.n_rows)
            measured["collision_frac"] = collision_frac(tokens, segments, layout)
            found |= {f"{name}/layer_{layer}": x for name, x in measured.items()}
        return found

    return health


def _whole(array: Any) -> np.ndarray:
    """All rows on the host; a collective call when other processes hold some."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _layer(module: str, config: ModelConfig) -> int:
    """The block that a top-level module name stands for; the head's memory is last."""
    return config.n_layers if module == "memory" else int(module.split("_")[1])
