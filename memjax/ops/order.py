"""What must be computed before what.

What: `wait_for`, a value that the compiler cannot have before others.
Why: a table is written in place only if all its reads come first, and XLA, which drops
    barriers before it decides about copies, copies the whole table where it sees no
    order: one weighted read whose weights are learned is enough.
When not: order that data dictates anyway.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def wait_for(value: jax.Array, others: Any) -> jax.Array:
    """`value`, bit by bit, after all arrays of the tree `others` were computed.

    Args:
        value: any array; what is computed from it comes after `others` too.
        others: floating arrays, finite or not; others are left out.

    Cost: one read of `others`.
    """
    low_bits = [
        jnp.max(
            lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32) & 1,
            initial=0,
        )
        for leaf in map(jnp.asarray, jax.tree.leaves(others))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if not low_bits:
        return value
    # Never true, which the compiler does not know.
    other = jnp.max(jnp.stack(low_bits)) > 1
    return jnp.where(other, jnp.zeros_like(value), value)
