"""Building and calling one memory layer, for the tests of the product-key family.

What: inputs, variables and calls of a layer with `read`, and its gradients by rows.
Why: the layers have one call, so their tests need it once.
When not: what a layer computes; that is in its own test.
"""

from dataclasses import fields
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from memjax.layers.memory import MemoryConfig, MemoryInputs
from memjax.layers.precision import Dtypes, PrecisionConfig
from memjax.layers.record import METRICS
from memjax.layers.table import READS

FLOAT32 = Dtypes.of(PrecisionConfig())
BFLOAT16 = Dtypes.of(PrecisionConfig(compute="bfloat16", tables="bfloat16"))
D = 6


def inputs_of(x_BTD: Any, n_padding: int = 0) -> MemoryInputs:
    """One document a sequence; the last positions are padding."""
    places = jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), x_BTD.shape[:2])
    real = places < x_BTD.shape[1] - n_padding
    return MemoryInputs(real.astype(jnp.int32), places.astype(jnp.int32))


def stream(n_tokens: int = 3, width: int = D) -> jax.Array:
    return jax.random.normal(jax.random.key(2), (2, n_tokens, width))


def start(module: nn.Module, x_BTD: Any) -> Any:
    """Initial variables."""

    @jax.jit
    def init(x_BTD: Any) -> Any:
        return module.init(jax.random.key(0), x_BTD, inputs_of(x_BTD), method="read")

    return {
        name: tree for name, tree in init(x_BTD).items() if name not in (METRICS, READS)
    }


def shapes(module: nn.Module) -> Any:
    """Shapes of the parameters, without a computation."""
    x_BTD = jax.ShapeDtypeStruct((2, 3, D), jnp.float32)

    def init(x_BTD: Any) -> Any:
        return module.init(jax.random.key(0), x_BTD, inputs_of(x_BTD), method="read")

    return jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype.name),
        jax.eval_shape(init, x_BTD)["params"],
    )


def call(
    module: nn.Module, variables: Any, x_BTD: Any, n_padding: int = 0, **options: Any
) -> tuple[jax.Array, Any]:
    """Branch and records."""
    rngs = {"dropout": jax.random.key(5)} if options.get("train") else None

    @jax.jit
    def apply(variables: Any, x_BTD: Any) -> Any:
        out, state = module.apply(
            variables,
            x_BTD,
            inputs_of(x_BTD, n_padding),
            method="read",
            mutable=[METRICS],
            rngs=rngs,
            **options,
        )
        return out, state[METRICS]

    return apply(variables, x_BTD)


def shaken(variables: Any) -> Any:
    """Variables far from their start, so that biases and gains count."""

    def shake(path: Any, leaf: jax.Array) -> jax.Array:
        seed = jax.random.key(len(jax.tree_util.keystr(path)))
        scale = 0.3 if leaf.ndim < 2 else 0.1
        return leaf + scale * jax.random.normal(seed, leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(shake, variables)


def as_float64(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def own_fields(config: type[MemoryConfig]) -> set[str]:
    """Names of the options that a config adds."""
    return {f.name for f in fields(config)} - {f.name for f in fields(MemoryConfig)}
