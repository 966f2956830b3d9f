"""The keys of a product-key memory, as parameters of the module that searches them.

What: `sub_keys`, two codebooks a head; `flat_keys`, one key a slot.
Why: each reference draws them by another rule; here the rule is a word.
When not: comparing queries with keys is `ops.product_keys`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError
from memjax.layers.precision import Dtypes

KEY_INITS = (
    "uniform_half",
    "uniform_full",
    "gaussian",
    "normal",
    "truncated_normal",
    "binary",
)
MAX_BINARY_BITS = 30


def sub_keys(
    module: nn.Module,
    *,
    n_heads: int,
    n_sub_keys: int,
    key_width: int,
    init: str = "uniform_half",
    std: float = 1.0,
    normalized: bool = False,
    shared: bool = False,
    learned: bool = True,
    dtypes: Dtypes,
) -> Array:
    """Keys [H, 2, N, C] of the compact method that calls this, C = key_width / 2.

    Args:
        module: their owner. It gets the parameter `keys` [H, 2, N, C], or [N, C] when
            shared; `fixed_keys` of the same shape when they are not learned.
        n_heads, n_sub_keys: H and N.
        key_width: width of a whole key, even.
        init: "uniform_half": U(-a, a), a = C^-1/2 (arXiv:1907.05242, its code);
            "uniform_full": a = key_width^-1/2 (arXiv:2412.09764); "gaussian": N(0, 1);
            "normal": N(0, std^2); "truncated_normal": the same, cut at two deviations
            and widened again to std; "binary": key i has the sign of bit j of i in
            place j and the size key_width^-1/2, so that N must be 2^C.
        std: of "normal" and "truncated_normal".
        normalized: every initial sub-key gets Euclidean length 1.
        shared: one codebook for both halves and all heads.
        learned: False: no gradient reaches them, and the name tells an optimizer.

    Returns:
        [H, 2, N, C] in the stored dtype, at least float32. Shared keys are broadcast,
        so their gradient is the sum over heads and halves.

    Raises:
        ConfigError: unknown init, odd key_width, or binary keys of another number.

    Source: facebookresearch/XLM memory.py and utils.py (arXiv:1907.05242). Differs:
    the reference seeds numpy by head and half, so that all its memories start with the
    same keys; ours come from the module's own "params" rng.
    """
    if key_width < 2 or key_width % 2:
        raise ConfigError("memories.key_width", key_width, "an even number >= 2")
    width = key_width // 2
    shape = (n_sub_keys, width)
    if not shared:
        shape = (n_heads, 2, *shape)
    bound = (width if init == "uniform_half" else key_width) ** -0.5
    values = _initializer(init, bound, std, normalized)
    keys = _declare(module, shape, init, values, learned, dtypes)
    return jnp.broadcast_to(keys, (n_heads, 2, n_sub_keys, width))


def flat_keys(
    module: nn.Module,
    *,
    n_heads: int,
    n_slots: int,
    key_width: int,
    init: str = "uniform_full",
    std: float = 1.0,
    normalized: bool = False,
    shared: bool = False,
    learned: bool = True,
    dtypes: Dtypes,
) -> Array:
    """Keys [H, S, key_width], one a slot: the baseline without product keys.

    As `sub_keys`; the parameter has shape [H, S, key_width], or [S, key_width] when
    shared. "uniform_half" and "uniform_full" are one and the same here, a =
    key_width^-1/2, and binary keys need S = 2^key_width.
    """
    shape = (n_slots, key_width)
    if not shared:
        shape = (n_heads, *shape)
    values = _initializer(init, key_width**-0.5, std, normalized)
    keys = _declare(module, shape, init, values, learned, dtypes)
    return jnp.broadcast_to(keys, (n_heads, n_slots, key_width))


def check_key_init(init: str, n_keys: int, width: int) -> None:
    """ConfigError for an unknown init, or when binary keys are not 2^width many."""
    if init not in KEY_INITS:
        raise ConfigError("memories.key_init", init, f"one of {KEY_INITS}")
    if init == "binary" and (width > MAX_BINARY_BITS or n_keys != 2**width):
        raise ConfigError(
            "memories.key_init",
            init,
            f"binary for 2^{width} keys of width {width}, and there are {n_keys}",
        )


def _initializer(
    init: str, bound: float, std: float, normalized: bool
) -> nn.initializers.Initializer:
    def entries(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        if init == "binary":
            bits = jnp.arange(shape[-2])[:, None] >> jnp.arange(shape[-1]) & 1
            signs = jnp.where(bits == 1, 1, -1).astype(dtype)
            return jnp.broadcast_to(bound * signs, shape)
        if init.startswith("uniform"):
            return jax.random.uniform(key, shape, dtype, -bound, bound)
        if init == "truncated_normal":
            # 0.8796 is the deviation of a standard normal cut at two.
            cut = jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)
            return cut * (std / 0.87962566103423978)
        deviation = 1.0 if init == "gaussian" else std
        return deviation * jax.random.normal(key, shape, dtype)

    def draw(key: Any, shape: Any, dtype: Any = jnp.float32) -> Array:
        values = entries(key, tuple(shape), jnp.promote_types(dtype, jnp.float32))
        if normalized:
            values /= jnp.linalg.norm(values, axis=-1, keepdims=True)
        return values.astype(dtype)

    return draw


def _declare(
    module: nn.Module,
    shape: tuple[int, ...],
    init: str,
    values: nn.initializers.Initializer,
    learned: bool,
    dtypes: Dtypes,
) -> Array:
    check_key_init(init, *shape[-2:])
    name = "keys" if learned else "fixed_keys"
    stored = module.param(name, values, shape, dtypes.params)
    wide = jnp.asarray(stored, jnp.promote_types(stored.dtype, jnp.float32))
    return wide if learned else jax.lax.stop_gradient(wide)
