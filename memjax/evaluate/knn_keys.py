"""Hidden states of a model as keys, and its losses beside them.

What: `make_key_forward`: batch -> the states that kNN-LM compares, and nats per token.
Why: the paper's key is inside the last block; the model hands out logits only.
When not: other activations; flax's capture_intermediates finds them, except in scanned
    blocks.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError
from memjax.evaluate.bits_per_byte import token_nats
from memjax.evaluate.memory_records import apply_recording
from memjax.layers.record import record
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.runs import runs

KEYS = ("feed_forward", "final")
_RECORD = "knn_key"


def key_module(config: ModelConfig, key: str) -> tuple[str, ...]:
    """Path of the norm whose output is the key.

    Args:
        key: "feed_forward", the input of the last block's feed-forward after its norm;
            where a memory stands instead of that feed-forward, the memory's input after
            its norm (of several, the first). "final": what the head reads.

    Raises:
        ConfigError: another key; or "feed_forward" where a memory that reads the stream
            without a norm stands in the place of the last feed-forward.

    Source: arXiv:1911.00172; in its release `--knn-keytype last_ffn_input`.
    """
    if key not in KEYS:
        raise ConfigError("knn.key", key, f"one of {KEYS}")
    if key == "final":
        return ("final_norm",)
    *_, (start, length, here) = runs(config)
    block = f"block_{start}"
    if length > 1:
        block = f"blocks_{start}_{start + length - 1}"
    instead = [one for one in here if one.config.place == "instead_of_feed_forward"]
    if config.arrangement == "three_branch" or not instead:
        return block, "feed_forward_norm"
    if not instead[0].config.normed_input:
        raise ConfigError(
            "knn.key",
            key,
            "'final' here: a memory without an input norm stands in the place of the "
            "last feed-forward",
        )
    return block, f"{instead[0].name}_input_norm"


def make_key_forward(
    model: LanguageModel, key: str
) -> Callable[[Any, Any], tuple[Array, Array]]:
    """A jitted (params, batch) -> (keys [B, T, D], nats of the targets [B, T]).

    Keys are float32, or wider where the model computes in that; no dropout. Raises as
    `key_module`.
    """
    path = key_module(model.config, key)

    def keep(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext):
        found = call(*args, **kwargs)
        if context.module.path == path and context.method_name == "__call__":
            record(context.module, _RECORD, found)
        return found

    @jax.jit
    def forward(params: Any, batch: Any) -> tuple[Array, Array]:
        with nn.intercept_methods(keep):
            logits_BTV, metrics = apply_recording(model, params, batch)
        for name in path:
            metrics = metrics[name]
        keys = metrics[_RECORD]
        if path[0].startswith("blocks_"):
            keys = keys[-1]  # of the layers that are scanned together, the last
        wide = jnp.promote_types(keys.dtype, jnp.float32)
        return keys.astype(wide), token_nats(logits_BTV, batch["targets"])

    return forward
