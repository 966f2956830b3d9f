"""Momentum plus Sinkhorn balancing, as an optax transform.

What: `scale_by_sinkhorn_momentum` (a direction) and the alias `sinkhorn_momentum`.
Why: one momentum buffer per table, and every row that is in play moves equally far.
When not: vectors and stacked matrices are refused; weights inside blocks want Muon.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from memjax.errors import ConfigError, ShapeError
from memjax.ops.sinkhorn import (
    check_balance_arguments,
    sinkhorn_balance,
    workspace_dtype,
)
from memjax.optim.rate import scale_by_rate


class SinkhornMomentumState(NamedTuple):
    """State of `scale_by_sinkhorn_momentum`: arrays only.

    Attributes:
        momentum: a tree like the parameters, in the accumulator's dtype.
    """

    momentum: Any


def scale_by_sinkhorn_momentum(
    beta: float = 0.95,
    n_iterations: int = 11,
    tau: float = 1e-3,
    eps: float = 1e-20,
    norm: str = "l2",
    accumulator_dtype: Any = None,
) -> optax.GradientTransformation:
    """Direction of Algorithm 1: momentum, look-ahead, mask, balance, unit RMS.

    Per table of R rows and W columns, with gradient G:

        M <- beta * M + (1 - beta) * G
        U  = beta * M + (1 - beta) * G        (Nesterov; no bias correction)
        update = sqrt(W) * balance(U)         (memjax.ops.sinkhorn)

    Every kept row of the update has RMS 1 ("l1": mean absolute value 1, from a
    factor W). Rows that never had a gradient, and rows whose momentum fell to tau
    of the mean, get exact zeros. The update is a direction of ascent without a
    learning rate: follow with a negative scale, as `sinkhorn_momentum` does.

    This is the dense form: the gradient has the shape of the table and every row
    is read at every step.

    Args:
        beta: decay of the momentum, 0 <= beta < 1.
        n_iterations: normalisations per step, odd so that rows come last. Static.
        tau: rows at or below tau times the mean row norm are left alone.
        eps: added to every norm.
        norm: "l2" (published) or "l1". Static.
        accumulator_dtype: dtype (name) of the momentum; None means the
            parameter's. Static.

    Returns:
        A transform over trees of two-dimensional parameters. Updates keep the
        gradient's dtype; arithmetic is float32, or wider for wider gradients.

    Raises:
        ConfigError: an argument is out of range.
        ShapeError: at `init`, naming the path of a parameter without two axes.

    Cost: one buffer like the parameters; time as in `balance_factors`.
    Source: arXiv:2609.19969 section 2.5, Algorithm 1. Differs: nothing but
        rounding. `optax.trace(nesterov=True)` is not the same look-ahead.
    """
    check_balance_arguments(
        n_iterations=n_iterations, norm=norm, field="sinkhorn_momentum"
    )
    _check_range("beta", beta, 0.0, 1.0)
    _check_range("tau", tau, 0.0, None)
    _check_range("eps", eps, 0.0, None)
    dtype = None if accumulator_dtype is None else jnp.dtype(accumulator_dtype)

    def init(params: Any) -> SinkhornMomentumState:
        jax.tree_util.tree_map_with_path(_check_table, params)
        return SinkhornMomentumState(
            jax.tree.map(lambda p: jnp.zeros_like(p, dtype=dtype), params)
        )

    def update(
        updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, SinkhornMomentumState]:
        del params
        jax.tree_util.tree_map_with_path(_check_table, updates)

        def blend(grad_RW: jax.Array, momentum_RW: jax.Array) -> jax.Array:
            work = workspace_dtype(jnp.promote_types(grad_RW.dtype, momentum_RW.dtype))
            rate = jnp.asarray(beta, work)
            return rate * momentum_RW.astype(work) + (1 - rate) * grad_RW.astype(work)

        # The look-ahead reads the unrounded momentum, so a bfloat16 buffer costs
        # one rounding a step and not two.
        momentum = jax.tree.map(blend, updates, state.momentum)
        ahead = jax.tree.map(blend, updates, momentum)

        def direction(ahead_RW: jax.Array, grad_RW: jax.Array) -> jax.Array:
            balanced_RW = sinkhorn_balance(
                ahead_RW, n_iterations=n_iterations, tau=tau, eps=eps, norm=norm
            )
            width = ahead_RW.shape[1]
            factor = width**0.5 if norm == "l2" else float(width)
            return (factor * balanced_RW).astype(grad_RW.dtype)

        return (
            jax.tree.map(direction, ahead, updates),
            SinkhornMomentumState(
                jax.tree.map(
                    lambda new, old: new.astype(old.dtype), momentum, state.momentum
                )
            ),
        )

    return optax.GradientTransformation(init, update)


def sinkhorn_momentum(
    learning_rate: optax.ScalarOrSchedule,
    gamma: float = 0.18,
    beta: float = 0.95,
    n_iterations: int = 11,
    tau: float = 1e-3,
    eps: float = 1e-20,
    norm: str = "l2",
    accumulator_dtype: Any = None,
) -> optax.GradientTransformation:
    """The whole table optimizer: W <- W - gamma * learning_rate * direction.

    Args:
        learning_rate: a number, or a schedule from step to number.
        gamma: RMS of a row's update at learning rate 1; 0.18 brings it to the
            size of an Adam update, so that rates carry over.
        beta: this and the rest as in `scale_by_sinkhorn_momentum`.

    No weight decay: chain `optax.add_decayed_weights` yourself if you must.
    Source: arXiv:2609.19969 section 2.5, Algorithm 1, step 6.
    """
    _check_range("gamma", gamma, 0.0, None)
    return optax.chain(
        scale_by_sinkhorn_momentum(
            beta=beta,
            n_iterations=n_iterations,
            tau=tau,
            eps=eps,
            norm=norm,
            accumulator_dtype=accumulator_dtype,
        ),
        scale_by_rate(learning_rate, factor=-gamma),
    )


def _check_range(name: str, value: Any, low: float, high: float | None) -> None:
    """ConfigError unless low <= value < high; values under a trace pass."""
    if isinstance(value, Tracer):
        return
    if not (value >= low and (high is None or value < high)):
        upper = "" if high is None else f" and below {high}"
        raise ConfigError(
            f"sinkhorn_momentum.{name}", value, f"a number of at least {low}{upper}"
        )


def _check_table(path: Any, leaf: Any) -> None:
    if jnp.ndim(leaf) != 2:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        raise ShapeError(
            f"parameter {name!r} of sinkhorn_momentum",
            tuple(jnp.shape(leaf)),
            "two axes (rows, width); give it another label",
        )
