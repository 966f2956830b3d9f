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
    u_BTC: Array,
    weight_KC: Array,
    *,
    dilation: int,
    segments_BT: Array | None = None,
    before: tuple[Array, Array] | None = None,
) -> Array:
    """Depthwise causal convolution followed by SiLU.

    Args:
        u_BTC: float input, any channel count C.
        weight_KC: one row a tap; the LAST row multiplies the current token
            (cross-correlation, as in torch).
        dilation: tokens between taps, >= 1.
        segments_BT: int document numbers; a tap that looks into another segment
            contributes 0, exactly as before the start of the sequence.
        before: for a sequence in pieces, the inputs [B, R, C] before this piece, R =
            (K - 1) * dilation of them (`reach`), and their segments [B, R]; needs
            `segments_BT`. None: the sequence starts here.

    Returns:
        [B, T, C] in the promoted dtype of input and weight. T may be shorter than
        the reach (K - 1) * dilation.

    Raises:
        ConfigError: dilation < 1, `before` without segments. ShapeError: channels
            differ, or `before` is not that long.

    Cost: K multiply-adds per entry, K - 1 shifted reads of the input.
    Source: arXiv:2601.07372 eq. 5; class ShortConv of deepseek-ai/Engram
    engram_demo_v1.py, whose two-sided padding cut to the first T tokens equals
    padding on the left. Segments are ours: the source never resets.
    """
    if dilation < 1:
        raise ConfigError("dilation", dilation, "an integer >= 1")
    n_taps, n_channels = weight_KC.shape
    check_shape("u_BTC", u_BTC, (None, None, n_channels))
    n_batch, n_tokens, _ = u_BTC.shape
    past = None
    if before is not None:
        if segments_BT is None:
            raise ConfigError("segments_BT", None, "segments when `before` is given")
        n_past = reach(n_taps, dilation)
        check_shape("before", before[0], (n_batch, n_past, n_channels))
        check_shape("before", before[1], (n_batch, n_past))
        past = (
            jnp.concatenate([before[0].astype(u_BTC.dtype), u_BTC], axis=1),
            jnp.concatenate([before[1], segments_BT], axis=1),
        )
    total = weight_KC[n_taps - 1] * u_BTC
    for tap in range(n_taps - 1):
        shift = (n_taps - 1 - tap) * dilation
        if past is None and shift >= n_tokens:
            continue
        moved, of_BT = _shifted(u_BTC, segments_BT, shift, past)
        if of_BT is not None:
            moved = jnp.where((of_BT == segments_BT)[..., None], moved, 0)
        total = total + weight_KC[tap] * moved
    return jax.nn.silu(total)


def reach(n_taps: int, dilation: int) -> int:
    """How many tokens back the first tap looks."""
    return max(n_taps - 1, 0) * dilation


def _shifted(
    u_BTC: Array,
    segments_BT: Array | None,
    shift: int,
    past: tuple[Array, Array] | None,
) -> tuple[Array, Array | None]:
    """The inputs `shift` tokens before, and their segments."""
    if past is not None:
        n_tokens = u_BTC.shape[1]
        start = past[0].shape[1] - n_tokens - shift
        moved, of_BT = (x[:, start : start + n_tokens] for x in past)
        return moved, of_BT
    moved = jnp.pad(u_BTC[:, :-shift], ((0, 0), (shift, 0), (0, 0)))
    if segments_BT is None:
        return moved, None
    return moved, jnp.pad(
        segments_BT[:, :-shift], ((0, 0), (shift, 0)), constant_values=-1
    )
