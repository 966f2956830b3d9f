"""From selected slots to weights, and from slots to experts.

What: `weigh_slots`, weights and what is recorded of a selection; `expert_read`, a read
    of two tables whose rows are the in and out vectors of single-neuron experts.
Why: Memory+ and PEER differ in their queries and outputs, not in these.
When not: plain weighted sums of rows; `Table.bag` does those.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax.errors import ConfigError, ShapeError
from memjax.layers.record import record
from memjax.layers.table import Table
from memjax.ops.product_keys import Selection, check_selection, slot_count
from memjax.ops.read_weights import Activation, read_weights
from memjax.ops.row_dots import row_dots


def check_slots(config: Any) -> int:
    """Slots for a config with `n_sub_keys` and `k`; ConfigError if they do not fit."""
    try:
        n_slots = slot_count(config.n_sub_keys)
    except ConfigError as error:
        name = "memories.n_sub_keys"
        raise ConfigError(name, error.value, error.allowed) from None
    check_selection(config.k, n_slots, "memories.k")
    return n_slots


def check_rates(config: Any, *fields: str) -> None:
    """ConfigError for a dropout rate outside [0, 1)."""
    for field in fields:
        rate = getattr(config, field)
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"memories.{field}", rate, f"0 <= {field} < 1")


def check_std(config: Any, field: str) -> None:
    """ConfigError for a standard deviation that is neither None nor finite and >= 0."""
    std = getattr(config, field)
    if std is not None and not 0 <= std < float("inf"):
        raise ConfigError(f"memories.{field}", std, "None, or a finite number >= 0")


def weigh_slots(
    module: nn.Module,
    found: Selection,
    segments_BT: Array,
    *,
    activation: Activation = "softmax",
) -> tuple[Array, Array]:
    """Slots and their weights, [B, T, H, K].

    Records `slots`, `weights` and `non_finite_scores`, the number of (token, head)
    pairs at real positions (segment > 0) whose selection met a NaN or +inf.

    Args:
        module: the memory.
        found: what its search found, [B, T, H, K].
        activation: as in `ops.read_weights`, per head.
    """
    weights_BTHK = read_weights(found.scores, activation=activation)
    spoilt_BTH = jnp.isnan(found.scores).any(-1) & (segments_BT > 0)[..., None]
    record(module, "slots", found.slots)
    record(module, "weights", weights_BTHK)
    record(module, "non_finite_scores", jnp.sum(spoilt_BTH, dtype=jnp.int32))
    return found.slots, weights_BTHK


def expert_read(
    module: nn.Module,
    down: Table,
    up: Table,
    ids: Array,
    weights: Array,
    x: Array,
    *,
    drop: Callable[[Array], Array] = lambda hidden: hidden,
) -> Array:
    """sum over k of weights_k * gelu(x . down[ids_k]) * up[ids_k].

    Args:
        module: the memory that reads.
        down, up: tables of equally many rows; rows of `down` are as wide as `x`.
        ids: int32 [..., K].
        weights: float [..., K].
        x: [..., D].
        drop: applied to the activations [..., K].

    Returns:
        [..., W] in float32 or wider. GELU is the exact one, with erf.

    Cost: in mode "dense" as `ops.row_dots` and `embedding_bag`. In mode "rows" the rows
    of `down` are formed, [..., K, D], forward and backward: the gradient of a row there
    is handed out by read, and this read has as many values as rows.

    Source: arXiv:2407.04153 Algorithm 1; arXiv:2412.09764's release calls it its PEER
    variant.
    """
    if down.stored.shape[1] != x.shape[-1]:
        raise ShapeError(f"table {down.path}", down.stored.shape, ("R", x.shape[-1]))
    if down.mode == "dense":
        dots = row_dots(down.stored, ids, x, down.kernel)
    else:
        rows = down.gather(module, ids)
        wide = jnp.promote_types(jnp.result_type(rows, x), jnp.float32)
        dots = jnp.einsum(
            "...kd,...d->...k",
            rows.astype(wide),
            x.astype(wide),
            precision=lax.Precision.HIGHEST,
        )
    hidden = drop(jax.nn.gelu(dots, approximate=False))
    return up.bag(module, ids, weights * hidden)
