"""Clipping by the norm of a whole group of gradients.

What: `clip_by_norm`, one factor for all leaves, and the norm it measures.
Why: a limit of 0 with a zero gradient, or a huge bfloat16 one, must not be NaN.
When not: clipping row by row or value by value.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves, float32 (wider for wider leaves); 0 if none.

    Squares are summed after division by the largest entry, so the norm of tiny or
    huge gradients neither vanishes nor overflows. Cost: two reads of the tree.
    """
    leaves = [
        jnp.asarray(x).astype(jnp.promote_types(x.dtype, jnp.float32))
        for x in jax.tree.leaves(tree)
    ]
    peaks = [jnp.max(jnp.abs(x), initial=0.0) for x in leaves]
    peak = jnp.zeros((), jnp.float32)
    for one in peaks:
        peak = jnp.maximum(peak, one)
    scale = jnp.where((peak > 0) & jnp.isfinite(peak), peak, 1)
    total = jnp.zeros((), scale.dtype)
    for x in leaves:
        total = total + jnp.sum(jnp.square(x / scale))
    return scale * jnp.sqrt(total)


def clip_by_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale all leaves by min(1, max_norm / norm); dtypes are kept.

    A zero gradient stays zero whatever the limit, and a limit of 0 gives zeros.
    A gradient that is not finite is passed on as NaN, so that training stops.

    Args:
        max_norm: largest Euclidean norm over all leaves, at least 0.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        norm = global_norm(updates)
        limit = jnp.asarray(max_norm, norm.dtype)
        factor = jnp.where(norm > limit, limit / jnp.where(norm > 0, norm, 1), 1.0)
        factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)

        def scale(update: jax.Array) -> jax.Array:
            wide = update.astype(jnp.promote_types(update.dtype, jnp.float32))
            return (wide * factor).astype(update.dtype)

        return jax.tree.map(scale, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
