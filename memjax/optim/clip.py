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

    Entries below 1e-19 count as 0 and above 1e19 give infinity, as their squares
    do in float32. Cost: one read of the tree.
    """
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(tree):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        total = total + jnp.sum(jnp.square(wide))
    return jnp.sqrt(total)


def clip_factor(norm: jax.Array, max_norm: float) -> jax.Array:
    """min(1, max_norm / norm); 0 for a limit of 0, NaN unless the norm is finite."""
    limit = jnp.asarray(max_norm, norm.dtype)
    longest = jnp.maximum(norm, limit)
    factor = jnp.where(longest > 0, limit / jnp.where(longest > 0, longest, 1), 0)
    return jnp.where(jnp.isfinite(norm), factor, jnp.nan)


def clip_by_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale all leaves by min(1, max_norm / norm); dtypes are kept.

    A zero gradient stays zero whatever the limit, and a limit of 0 gives zeros.
    A gradient that is not finite is passed on as NaN, so that training stops.

    Args:
        max_norm: largest Euclidean norm over all leaves, at least 0.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        factor = clip_factor(global_norm(updates), max_norm)

        def scale(update: jax.Array) -> jax.Array:
            wide = update.astype(jnp.promote_types(update.dtype, jnp.float32))
            return (wide * factor).astype(update.dtype)

        return jax.tree.map(scale, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
