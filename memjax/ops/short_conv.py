"""Causal depthwise convolution with few taps, as shifted multiply-adds.

What: y_t = SiLU(sum_j w_j * u_{t - (K-1-j) * dilation}), per channel.
Why: grouped convolutions with thousands of groups are slow; K shifts are not.
When not: long kernels (K above about 16) want a real convolution.
"""

import jax
import jax.numpy as jnp
from jax import Array

from memjax.arrays import check_shape
from memjax.errors import ConfigError


def short_conv(
    u_BTC: Array, weight_KC: Array, *, dilation: int, segments_BT: Array | None = None
) -> Array:
    """Depthwise causal convolution followed by SiLU.

    Args:
        u_BTC: float input, any channel count C.
        weight_KC: one row a tap; the LAST row multiplies the current token
            (cross-correlation, as in torch).
        dilation: tokens between taps, >= 1.
        segments_BT: int document numbers; a tap that looks into another segment
            contributes 0, exactly as before the start of the sequence.

    Returns:
        [B, T, C] in the promoted dtype of input and weight. T may be shorter than
        the reach (K - 1) * dilation.

    Raises:
        ConfigError: dilation < 1. ShapeError: channels differ.

    Cost: K multiply-adds per entry, K - 1 shifted reads of the input.
    Source: arXiv:2601.07372 eq. 5; class ShortConv of deepseek-ai/Engram
    engram_demo_v1.py, whose two-sided padding cut to the first T tokens equals
    padding on the left. Segments are ours: the source never resets.
    """
    if dilation < 1:
        raise ConfigError("dilation", dilation, "an integer >= 1")
    n_taps, n_channels = weight_KC.shape
    check_shape("u_BTC", u_BTC, (None, None, n_channels))
    n_tokens = u_BTC.shape[1]
    total = weight_KC[n_taps - 1] * u_BTC
    for tap in range(n_taps - 1):
        shift = (n_taps - 1 - tap) * dilation
        if shift >= n_tokens:
            continue
        moved = jnp.pad(u_BTC[:, :-shift], ((0, 0), (shift, 0), (0, 0)))
        if segments_BT is not None:
            before = jnp.pad(
                segments_BT[:, :-shift], ((0, 0), (shift, 0)), constant_values=-1
            )
            moved = jnp.where((before == segments_BT)[..., None], moved, 0)
        total = total + weight_KC[tap] * moved
    return jax.nn.silu(total)
