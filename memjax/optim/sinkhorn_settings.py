"""Arguments that both forms of Sinkhorn momentum by rows share.

What: `SinkhornSettings`, checked when made, and the factor of an update.
Why: two optimizers that are compared must read their arguments alike.
When not: the dense transform; see `sinkhorn_momentum`.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from memjax.arrays import DTYPES
from memjax.errors import ConfigError
from memjax.ops.sinkhorn import check_balance_arguments
from memjax.ops.split import Split
from memjax.optim.row_write import RowWriter


@dataclass(frozen=True)
class SinkhornSettings:
    """Checked arguments; those of `sinkhorn_momentum` mean the same here.

    Attributes:
        owner: name of the optimizer, for messages.
        learning_rate: a number, or a schedule from step to number.
        gamma, beta, n_iterations, tau, eps, norm: as in `sinkhorn_momentum`.
        momentum_dtype: dtype (name) of the momentum of the whole table.
        writer: how rows are written.

    Raises:
        ConfigError: an argument is out of range.
    """

    owner: str
    learning_rate: optax.ScalarOrSchedule
    gamma: float = 0.18
    beta: float = 0.95
    n_iterations: int = 11
    tau: float = 1e-3
    eps: float = 1e-20
    norm: str = "l2"
    momentum_dtype: Any = "float32"
    writer: RowWriter = field(default_factory=RowWriter)

    def __post_init__(self) -> None:
        check_balance_arguments(
            n_iterations=self.n_iterations, norm=self.norm, field=self.owner
        )
        self.check_range("gamma", self.gamma)
        self.check_range("beta", self.beta, 1)
        self.check_range("tau", self.tau)
        self.check_range("eps", self.eps)
        if self.momentum_dtype not in [*DTYPES, *map(jnp.dtype, DTYPES.values())]:
            raise ConfigError(
                f"{self.owner}.momentum_dtype",
                self.momentum_dtype,
                f"one of {sorted(DTYPES)}",
            )

    def check_range(self, name: str, value: Any, end: float = float("inf")) -> None:
        """ConfigError unless 0 <= value < end."""
        if not 0 <= value < end:
            upper = "" if end == float("inf") else f" and below {end}"
            raise ConfigError(
                f"{self.owner}.{name}", value, f"a number from 0 up{upper}"
            )

    def rate(self, step: jax.Array, width: int, split: Split) -> jax.Array:
        """What a balanced update is multiplied by, with its sign, float32.

        `width` counts the columns at hand.
        """
        rate = self.learning_rate
        rate = rate(step) if callable(rate) else rate
        if split.column_axis is not None:
            width = width * lax.axis_size(split.column_axis)
        factor = width**0.5 if self.norm == "l2" else float(width)
        return jnp.asarray(rate, jnp.float32) * jnp.float32(-self.gamma * factor)
