"""Learning rates: the schedules we offer and the transform that applies one.

What: `rate_schedule` (warm-up, then cosine, WSD or constant) and `scale_by_rate`.
Why: the rate that is logged and the rate that is applied are the same function.
When not: rates that depend on the loss; those want optax.contrib.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from memjax.errors import ConfigError

SCHEDULES = ("cosine", "wsd", "constant")


def rate_schedule(
    kind: str,
    peak: float,
    n_steps: int,
    *,
    warmup_steps: int = 0,
    decay_frac: float = 0.2,
    end_frac: float = 0.0,
    field: str = "optim",
) -> optax.Schedule:
    """Step -> learning rate, float32, usable inside and outside jit.

    Step t (from 0) of the warm-up has peak * (t + 1) / warmup_steps, so the first
    step already moves. After it "constant" stays at peak; "cosine" falls along
    half a cosine and reaches end_frac * peak at step n_steps; "wsd" stays at peak
    and falls linearly over the last ceil(decay_frac * n_steps) steps. From step
    n_steps on the rate stays at its end value.

    Args:
        kind: one of `SCHEDULES`.
        peak: the highest rate.
        n_steps: length of the run in optimizer steps, at least 1.
        warmup_steps: steps of linear warm-up.
        decay_frac: part of the run that "wsd" spends falling; "cosine" and
            "constant" do not read it.
        end_frac: last rate as a part of peak; "constant" does not read it.
        field: dotted name that stands before the argument in messages.

    Raises:
        ConfigError: kind is unknown, or warm-up and decay do not fit n_steps.

    Source: cosine, arXiv:1608.03983; warm-up, stable, decay, arXiv:2404.06395.
    """
    if kind not in SCHEDULES:
        raise ConfigError(f"{field}.schedule", kind, f"one of {list(SCHEDULES)}")
    if n_steps < 1:
        raise ConfigError("n_steps", n_steps, "at least 1")
    decay_steps = {
        "cosine": n_steps - warmup_steps,
        "wsd": math.ceil(decay_frac * n_steps),
        "constant": 0,
    }[kind]
    if warmup_steps + max(decay_steps, 0) > n_steps:
        raise ConfigError(
            f"{field}.warmup_steps",
            warmup_steps,
            f"at most the {n_steps} steps of the run less the steps of decay ({kind})",
        )

    def rate(step: Any) -> jax.Array:
        t = jnp.asarray(step, jnp.float32)
        left = jnp.clip((n_steps - t) / max(decay_steps, 1), 0.0, 1.0)
        if kind == "cosine":
            shape = end_frac + (1 - end_frac) * 0.5 * (1 - jnp.cos(jnp.pi * left))
        elif kind == "wsd":
            shape = end_frac + (1 - end_frac) * left
        else:
            shape = jnp.ones_like(t)
        warm = jnp.minimum((t + 1) / max(warmup_steps, 1), 1.0)
        return jnp.asarray(peak, jnp.float32) * jnp.minimum(warm, shape)

    return rate


class ScaleByRateState(NamedTuple):
    """State of `scale_by_rate`: the number of updates so far, int32."""

    count: jax.Array


def scale_by_rate(
    learning_rate: optax.ScalarOrSchedule, factor: float = -1.0
) -> optax.GradientTransformation:
    """Multiply updates by factor * learning_rate and keep their dtype.

    A rate given as python float, numpy scalar, jax scalar or schedule gives the
    same updates and the same state; `optax.scale` widens bfloat16 updates to
    float32 for the second and third. The product is formed in float32 or wider.

    Args:
        learning_rate: number, zero-dimensional array or schedule of the count.
        factor: constant that multiplies the rate; -1 descends.
    """

    def init(params: Any) -> ScaleByRateState:
        del params
        return ScaleByRateState(jnp.zeros((), jnp.int32))

    def update(
        updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, ScaleByRateState]:
        del params
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def scale(update: jax.Array) -> jax.Array:
            work = jnp.promote_types(update.dtype, jnp.float32)
            step = jnp.asarray(rate, work) * jnp.asarray(factor, work)
            return (step * update.astype(work)).astype(update.dtype)

        return (
            jax.tree.map(scale, updates),
            ScaleByRateState(jnp.asarray(optax.safe_increment(state.count))),
        )

    return optax.GradientTransformation(init, update)
