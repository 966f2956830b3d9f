"""A model that goes on from where it stood: its cache, made, reset and used.

What: `decoder`, the model with a cache; `init_cache` and `reset_rows`; `check_decodes`,
    what has none.
Why: a further token must cost a pass over that token, not over the text before it.
When not: training and scoring of whole texts; a cache only costs there.
"""

from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError, ShapeError
from memjax.layers.decode_piece import CACHE
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.models.config import ModelConfig
from memjax.models.layouts import layouts

Model = TypeVar("Model", bound=nn.Module)
PLACE = "place"


def check_decodes(config: ModelConfig) -> None:
    """ConfigError for a model whose rows cannot go on from a cache.

    That is one with fast weights in the state "shared": a chunk of theirs is one of the
    whole batch, so that no row could go on without the others.
    """
    for i, memory in enumerate(config.memories):
        if isinstance(memory, FastWeightConfig) and memory.state == "shared":
            raise ConfigError(
                f"model.memories.{i}.state",
                memory.state,
                "'document' with a cache: chunks of a shared memory are those of the "
                "whole batch, whose rows could not go on by themselves",
            )


def n_history(config: ModelConfig) -> int:
    """Ids before a token that its n-grams need."""
    orders = [layout.max_order for layout in layouts(config).values()]
    if config.experts is not None and config.experts.routing == "bigram":
        orders.append(2)
    return max(orders, default=1) - 1


def decoder(model: Model, cache_tokens: int) -> Model:
    """`model` with a cache of `cache_tokens` tokens a row.

    Raises:
        ConfigError: cache_tokens < 1, or as `check_decodes`.
    """
    if cache_tokens < 1:
        raise ConfigError("cache_tokens", cache_tokens, "an integer >= 1")
    check_decodes(model.config)  # pyright: ignore[reportAttributeAccessIssue]
    return model.clone(cache_tokens=cache_tokens)


def init_cache(model: nn.Module, n_batch: int) -> dict[str, Any]:
    """The cache of `n_batch` rows without a token: all zeros.

    Args:
        model: a `LanguageModel` with `cache_tokens`, as `decoder` makes it.

    Cost: no pass of the model is run. For each block it holds 2 * n_kv_heads * head
        width entries a token in the compute dtype; for a short convolution the (K - 1)
        * dilation inputs before; for fast weights the rows that the document wrote, at
        most H * k of width W a token.

    Raises:
        ConfigError: the model has no cache.
    """
    if getattr(model, "cache_tokens", None) is None:
        raise ConfigError("cache_tokens", None, "an integer; see models.decode.decoder")
    tokens = jax.ShapeDtypeStruct((n_batch, 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(model.init, key, tokens)[CACHE]
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def reset_rows(cache: dict[str, Any], rows_B: Array) -> dict[str, Any]:
    """The cache with the rows where `rows_B` (bool) is True empty, for other texts.

    Nothing of the old text is read again, by no layer: the number of documents goes on,
    and what a layer keeps counts for the document with its number only.

    Cost: a few numbers a row; keys and values stay until they are overwritten.

    Raises:
        ShapeError: not one flag a row.
    """
    place = dict(cache[PLACE])
    if rows_B.shape != place["length"].shape:
        raise ShapeError("rows_B", rows_B.shape, place["length"].shape)
    for name in ("length", "segment"):
        place[name] = jnp.where(rows_B, 0, place[name])
    return {**cache, PLACE: place}
