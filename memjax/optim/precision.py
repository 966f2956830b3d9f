"""Optimizer arithmetic in float32 around parameters of a narrower dtype.

What: `in_float32` wraps a transform; its state and arithmetic are float32.
Why: a bfloat16 second moment with decay 0.999 never changes, and a numpy rate
    silently widens bfloat16 updates.
When not: sinkhorn_momentum, which has a workspace of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transform, run on float32 copies of gradients and parameters.

    Updates come back in the gradient's dtype. float32 and wider leaves pass
    untouched. Cost: none inside jit, where the casts are fused; the state is
    float32, so twice the size it would have in bfloat16.

    Args:
        inner: a transform without extra arguments.
    """

    def widen(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jnp.asarray(x).astype(jnp.promote_types(x.dtype, jnp.float32)),
            tree,
        )

    def init(params: Any) -> Any:
        return inner.init(widen(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wide = None if params is None else widen(params)
        new, state = inner.update(widen(updates), state, wide)
        return jax.tree.map(lambda n, u: n.astype(u.dtype), new, updates), state

    return optax.GradientTransformation(init, update)
