"""Parameters for tests without running the initialisers.

What: `filled(config)`, normal numbers in every leaf of the model's parameter tree.
Why: compiling the random draws of an init takes longer than all a test does.
When not: tests of the initialisers themselves.
"""

import jax
import jax.numpy as jnp
import numpy as np

from memjax.models.parameters import abstract_params


def filled(config, seed=0):
    """Every leaf normal, of standard deviation 0.3, gains around 1."""
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        values = 0.3 * rng.normal(size=leaf.shape)
        values += path[-1].key in ("scale", "w_attn", "w_mem", "w_ffn")
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, abstract_params(config))
