"""Sampling text from a model.

What: one token after another, each from a pass over that token where the model keeps
    what it has read, or else from a pass over the whole context.
Why: a look at what a run has learned, for any model and memory.
When not: serving many texts at once; see `models.decode`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from memjax.errors import ConfigError

LogitsFn = Callable[[Any, Array, Array], Array]


class Decoding(NamedTuple):
    """A model that goes on from a cache.

    Attributes:
        start: () -> the cache of one row that holds `context` tokens, empty.
        step: (params, cache, tokens_1T, segments_1T) -> (logits_1TV, cache).
    """

    start: Callable[[], Any]
    step: Callable[[Any, Any, Array, Array], tuple[Array, Any]]


def sample_token(
    logits_V: Array, key: Array, temperature: float, top_k: int | None
) -> Array:
    """One id from logits. temperature 0 takes the best (lowest id among equals)."""
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    if top_k is not None:
        best_K, ids_K = jax.lax.top_k(logits_V, top_k)
        return ids_K[jax.random.categorical(key, best_K / temperature)]
    return jax.random.categorical(key, logits_V / temperature).astype(jnp.int32)


def generate(
    logits_fn: LogitsFn,
    params: Any,
    prompt: np.ndarray,
    *,
    n_tokens: int,
    context: int,
    vocab_size: int,
    key: Array,
    temperature: float = 0.8,
    top_k: int | None = None,
    decoding: Decoding | None = None,
) -> np.ndarray:
    """Continue `prompt` by `n_tokens` ids.

    Args:
        logits_fn: (params, tokens_1T, segments_1T) -> logits_1TV, causal; segment 0
            marks the unused end of the buffer.
        params: handed through.
        prompt: int ids, at least one (the document separator starts a document); of
            a long prompt the last `context` ids are used.
        n_tokens: ids to draw, >= 0.
        context: window in tokens; when it is full the oldest id falls out.
        vocab_size: ids are below it.
        key: typed PRNG key; the same key gives the same ids.
        temperature: >= 0; 0 is greedy.
        top_k: draw among the best k only, 1 <= k <= vocab_size; None: among all.
        decoding: the same model with a cache. It is used where the whole text fits the
            context; a window that slides moves every token, so nothing could be kept.

    Returns:
        int32 [n_tokens], without the prompt.

    Raises:
        ConfigError: an option or a prompt id outside its range.

    Cost: n_tokens forward passes over `context` tokens. With `decoding`, one over the
    prompt (padded to a power of two, so that few lengths are compiled) and n_tokens - 1
    over one token, each of which attends to `context` places.
    """
    if temperature < 0:
        raise ConfigError("temperature", temperature, "a number >= 0")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ConfigError("top_k", top_k, f"1 <= top_k <= {vocab_size}")
    if n_tokens < 0:
        raise ConfigError("n_tokens", n_tokens, "an integer >= 0")
    prompt = np.asarray(prompt)
    if prompt.size == 0:
        raise ConfigError("prompt", [], "at least one token")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        bad = prompt[(prompt < 0) | (prompt >= vocab_size)][0]
        raise ConfigError("prompt", int(bad), f"ids from 0 to {vocab_size - 1}")
    kept = prompt[-context:].astype(np.int32)
    options: dict[str, Any] = {
        "n_tokens": n_tokens,
        "temperature": temperature,
        "top_k": top_k,
    }
    # The last token that is drawn is not read.
    if decoding is not None and 0 < n_tokens <= context - len(kept) + 1:
        width = min(context, 1 << (len(kept) - 1).bit_length())
        run = partial(_go_on, decoding=decoding)
    else:
        width, run = context, partial(_continue, logits_fn=logits_fn)
    buffer = np.zeros((1, width), np.int32)
    buffer[0, : len(kept)] = kept
    drawn = run(params, jnp.asarray(buffer), jnp.int32(len(kept)), key, **options)
    return np.asarray(drawn)


@partial(jax.jit, static_argnames=("logits_fn", "n_tokens", "temperature", "top_k"))
def _continue(
    params: Any,
    buffer_1T: Array,
    length: Array,
    key: Array,
    *,
    logits_fn: LogitsFn,
    n_tokens: int,
    temperature: float,
    top_k: int | None,
) -> Array:
    context = buffer_1T.shape[1]

    def draw(carry: tuple[Array, Array], step: Array) -> tuple[Any, Array]:
        buffer_1T, length = carry
        used_1T = (jnp.arange(context) < length)[None].astype(jnp.int32)
        logits_1TV = logits_fn(params, buffer_1T, used_1T)
        token = sample_token(
            logits_1TV[0, length - 1], jax.random.fold_in(key, step), temperature, top_k
        )
        full = length == context
        moved_1T = jnp.where(full, jnp.roll(buffer_1T, -1, axis=1), buffer_1T)
        at = jnp.where(full, context - 1, length)
        return (moved_1T.at[0, at].set(token), at + 1), token

    _, drawn = jax.lax.scan(draw, (buffer_1T, length), jnp.arange(n_tokens))
    return drawn


@partial(jax.jit, static_argnames=("decoding", "n_tokens", "temperature", "top_k"))
def _go_on(
    params: Any,
    buffer_1T: Array,
    length: Array,
    key: Array,
    *,
    decoding: Decoding,
    n_tokens: int,
    temperature: float,
    top_k: int | None,
) -> Array:
    """As `_continue`, for a text that fits; n_tokens >= 1."""

    def token_of(logits_V: Array, step: Array | int) -> Array:
        step_key = jax.random.fold_in(key, step)
        return sample_token(logits_V, step_key, temperature, top_k)

    def draw(carry: tuple[Any, Array], step: Array) -> tuple[Any, Array]:
        cache, token = carry
        one_11 = jnp.ones((1, 1), jnp.int32)
        logits_11V, cache = decoding.step(params, cache, token * one_11, one_11)
        token = token_of(logits_11V[0, 0], step)
        return (cache, token), token

    used_1T = (jnp.arange(buffer_1T.shape[1]) < length)[None].astype(jnp.int32)
    logits_1TV, cache = decoding.step(params, decoding.start(), buffer_1T, used_1T)
    first = token_of(logits_1TV[0, length - 1], 0)
    _, others = jax.lax.scan(draw, (cache, first), jnp.arange(1, n_tokens))
    return jnp.concatenate([first[None], others])
