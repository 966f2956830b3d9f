"""Held-out bits per byte.

What: sums -log2 p over the scored targets of evaluation batches, divided by bytes.
Why: the one number that models with any tokenizer and any memory are judged by.
When not: which windows score which bytes is decided by the data pipeline.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Batch = dict[str, Any]
ApplyFn = Callable[[Any, Batch], Array]


def token_nats(logits_BTV: Array, targets_BT: Array) -> Array:
    """-ln p(target) per token, [B, T], float32 or wider.

    Log-probabilities may be given as logits: their log-softmax is themselves.
    """
    wide = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    picked_BT = jnp.take_along_axis(wide, targets_BT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(wide, axis=-1) - picked_BT


@dataclass(frozen=True)
class Score:
    """A held-out score: nats summed over `n_tokens` scored targets."""

    nats: float
    n_tokens: int

    def bpb(self, bytes_per_token: float) -> float:
        """Bits per byte of the text behind the targets; NaN when nothing was scored.

        With `bytes_per_token` = bytes of the text / its targets this is exact for the
        whole text, and an estimate for a part of it.
        """
        if self.n_tokens == 0:
            return math.nan
        return self.nats / (math.log(2) * self.n_tokens * bytes_per_token)


def make_scorer(apply_fn: ApplyFn) -> Callable[[Any, Batch], tuple[Array, Array]]:
    """A jitted (params, batch) -> (sum of nats, number of targets) over weights > 0."""

    @jax.jit
    def scorer(params: Any, batch: Batch) -> tuple[Array, Array]:
        nats_BT = token_nats(apply_fn(params, batch), batch["targets"])
        weights_BT = batch["weights"]
        return jnp.sum(jnp.where(weights_BT > 0, nats_BT * weights_BT, 0)), jnp.sum(
            weights_BT > 0
        )

    return scorer


def score(
    scorer: Callable[[Any, Batch], tuple[Array, Array]],
    params: Any,
    batches: Iterable[Batch],
) -> Score:
    """Run `scorer` over all batches; sums of batches are added in float64 on the host.

    Two batches are on the devices at a time: the sums of one are fetched when the next
    was begun.

    Args:
        scorer: from `make_scorer`; make it once, it compiles once per batch shape.
        params: what the apply function takes.
        batches: evaluation batches; targets with weight 0 do not count.
    """
    fetched, begun = [], []
    for batch in batches:
        begun.append(scorer(params, batch))
        if len(begun) > 1:
            fetched.append(jax.device_get(begun.pop(0)))
    fetched += jax.device_get(begun)
    return Score(
        nats=math.fsum(float(nats) for nats, _ in fetched),
        n_tokens=sum(int(count) for _, count in fetched),
    )
