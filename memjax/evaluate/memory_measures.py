"""Usage and trust of a model's memories over a whole split.

What: `measure`: usage by head, gate quantiles, loss by gate and by n-gram frequency
    with and without the memories, collisions of hashed tables, the gradient's division.
Why: a held-out score does not say whether a memory is read, trusted where it helps, or
    taking the backbone's gradient.
When not: during training, on one batch; see memory_health.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from memjax.data.document_pieces import document_pieces
from memjax.data.store import TokenStore
from memjax.errors import ConfigError
from memjax.evaluate.bits_per_byte import token_nats
from memjax.evaluate.collisions import CollisionCounter
from memjax.evaluate.gradient_share import make_gradient_share
from memjax.evaluate.loss_buckets import (
    frequency_buckets,
    gate_buckets,
    mean_losses,
    quantiles,
)
from memjax.evaluate.memory_records import (
    apply_recording,
    hashed_layouts,
    memory_records,
    slot_tables,
)
from memjax.evaluate.ngram_counts import NgramCounts
from memjax.evaluate.usage import UsageCounter
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel

Batch = dict[str, Any]
RECORDS = ("gate", "slots", "weights", "non_finite_scores")


def measure(
    model: LanguageModel,
    params: Any,
    batches: Iterable[Batch],
    *,
    gradients: Callable[[Any, Any, Array], Any],
    train_stores: Sequence[TokenStore],
    train_batch: Batch,
    order: int = 3,
) -> dict[str, Any]:
    """Measure the memories of a model; plain data.

    Each token of the batches counts once, where it is a scored target, its loss beside
    the gate and the slots of the position that predicts it. "Without" is the same
    forward pass with every memory dropped, so with several memories a gain is that of
    all of them together.

    Args:
        model: with at least one memory.
        params: of the model.
        batches: evaluation batches of one process.
        gradients: of a training step; see `gradient_share.make_gradient_share`.
        train_stores: what the model was trained on, each counted once.
        train_batch: for the gradient.
        order: n of the n-grams whose frequency is looked up: the n newest tokens that
            the model sees when it predicts, as a hashed memory reads them.

    Returns:
        loss: n_tokens, share (1), nats, nats_without, gain, over all tokens;
        frequency: order, exact, buckets (`loss_buckets.frequency_buckets`);
        memories: {memory: gate {quantiles, buckets} where it has a gate; usage {"all",
        "0", ..} (`usage.usage_metrics`) and non_finite_scores where it records slots;
        collisions (`CollisionCounter.columns`) where it is hashed}; gradient_share
        (`gradient_share.make_gradient_share`).

    Raises:
        ConfigError: a model without memories, or an order below 1.

    Cost: two forward passes over the batches, a training step and a pass over the
        training text; on the host 16 bytes per token and memory, beside what the
        counters take.
    """
    config = model.config
    if not config.memories:
        raise ConfigError("model.memories", (), "at least one memory to be measured")
    counts = NgramCounts(order, config.vocab_size)
    collisions = {
        name: CollisionCounter(layout)
        for name, layout in hashed_layouts(config).items()
    }
    for store in train_stores:
        for ids, segments in document_pieces(store):
            counts.add(ids, segments)
            for counter in collisions.values():
                counter.add(model.hashed_ids(ids, counter.layout), segments)
    scored = _Scored(config, counts)
    forward = _forward(model)
    for batch in batches:
        scored.add(batch, jax.device_get(forward(params, batch)))
    found = scored.result()
    for name, counter in collisions.items():
        found["memories"].setdefault(name, {})["collisions"] = counter.columns()
    share = make_gradient_share(gradients)(params, train_batch)
    return {**found, "gradient_share": share}


def _forward(model: LanguageModel) -> Callable[[Any, Batch], dict[str, Any]]:
    """Losses of a batch and what its memories recorded, nothing of the size of V."""

    @jax.jit
    def forward(params: Any, batch: Batch) -> dict[str, Any]:
        logits_BTV, metrics = apply_recording(model, params, batch)
        without_BTV, _ = apply_recording(model, params, batch, drop_memory=True)
        found = {
            memory: {name: _plain(values[name]) for name in RECORDS if name in values}
            for memory, values in memory_records(metrics, model.config).items()
        }
        return {
            "nats": token_nats(logits_BTV, batch["targets"]),
            "nats_without": token_nats(without_BTV, batch["targets"]),
            "memories": found,
        }

    return forward


def _plain(value: Array) -> Array:
    """In a dtype that numpy knows."""
    return value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value


class _Scored:
    """What the scored tokens said, batch by batch."""

    def __init__(self, config: ModelConfig, counts: NgramCounts) -> None:
        self._slots = slot_tables(config)
        self._counts = counts
        self._tokens: dict[str, list[np.ndarray]] = {}
        self._usage: dict[str, UsageCounter] = {}
        self._non_finite: dict[str, int] = {}

    def add(self, batch: Batch, found: dict[str, Any]) -> None:
        tokens, segments, weights = (
            np.asarray(batch[name]) for name in ("tokens", "segments", "weights")
        )
        scored = weights > 0
        self._keep("nats", found["nats"][scored])
        self._keep("nats_without", found["nats_without"][scored])
        self._keep("counts", self._counts.of(tokens, segments)[scored])
        for name, memory in found["memories"].items():
            if "gate" in memory:
                gate = memory["gate"][scored]
                # One trust per token: the mean over branches of the stream.
                self._keep(f"gate/{name}", gate.reshape(len(gate), -1).mean(axis=-1))
            if "slots" in memory:
                slots = memory["slots"]
                if name not in self._usage:
                    n_heads = slots.shape[-2]
                    self._usage[name] = self._slots[name].counter(n_heads)
                self._usage[name].add(slots, memory["weights"], scored)
            spoilt = int(memory.get("non_finite_scores", 0))
            self._non_finite[name] = self._non_finite.get(name, 0) + spoilt

    def _keep(self, name: str, values: np.ndarray) -> None:
        self._tokens.setdefault(name, []).append(values)

    def result(self) -> dict[str, Any]:
        tokens = {name: np.concatenate(parts) for name, parts in self._tokens.items()}
        nats, without = tokens["nats"], tokens["nats_without"]
        total = mean_losses(np.arange(len(nats)), nats, without)
        memories: dict[str, dict[str, Any]] = {name: {} for name in self._non_finite}
        for name, memory in memories.items():
            if f"gate/{name}" in tokens:
                gates = tokens[f"gate/{name}"]
                buckets = gate_buckets(gates, nats, without)
                memory["gate"] = {"quantiles": quantiles(gates), "buckets": buckets}
            if name in self._usage:
                counter = self._usage[name]
                heads = {str(h): one for h, one in enumerate(counter.by_head())}
                memory["usage"] = {"all": counter.summary(), **heads}
                memory["non_finite_scores"] = self._non_finite[name]
        return {
            "loss": total,
            "frequency": {
                "order": self._counts.order,
                "exact": self._counts.exact,
                "buckets": frequency_buckets(tokens["counts"], nats, without),
            },
            "memories": memories,
        }
