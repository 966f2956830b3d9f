"""One training run of tables under every optimizer, whole or in parts.

What: `train`, a few steps from fixed gradients, compiled once for all optimizers.
Why: whatever the parts, the numbers are the same; several tests look at one run.
When not: models; the gradients here are given.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from memjax.ops.row_gradient import RowGradient
from memjax.optim.row_write import RowWriter
from memjax.optim.sinkhorn_rows import sinkhorn_rows
from memjax.optim.sinkhorn_touched_rows import sinkhorn_touched_rows
from memjax.optim.table_optimizer import TableOptimizer, rowwise
from memjax.optim.tables import TableGroup, table_optimizer
from memjax.parallel.mesh import MeshConfig, make_mesh
from memjax.parallel.row_sharding import RowSharding

WIDTH, N_TOKENS, N_READ = 8, 8, 3
N_STEPS = 4


def optimizers() -> dict[str, TableOptimizer]:
    """One of each kind, by the name of its table."""
    return {
        "adagrad": rowwise(optax.adagrad(0.1)),
        "adam": rowwise(optax.adam(0.1), writer=RowWriter(ema_decay=0.9)),
        "sgd": rowwise(optax.sgd(0.1)),
        # Enough for the first two steps and too little for the third, in any parts.
        "sinkhorn": sinkhorn_rows(0.1, capacity=8, writer=RowWriter(ema_decay=0.9)),
        "sinkhorn_touched": sinkhorn_touched_rows(0.1),
    }


def mesh_of(n_parts: int, n_data: int = 1) -> jax.sharding.Mesh:
    devices = jax.devices()[: n_parts * n_data]
    return make_mesh(MeshConfig(data=n_data, table=n_parts), devices)


def sharding_of(n_parts: int, by: str, n_data: int = 1) -> RowSharding | None:
    """None for one part."""
    return None if n_parts == 1 else RowSharding(mesh_of(n_parts, n_data), by=by)


def first_table(n_rows: int) -> np.ndarray:
    rng = np.random.default_rng(n_rows)
    return rng.standard_normal((n_rows, WIDTH)).astype(np.float32)


def gradients_of(n_rows: int, step: int) -> RowGradient:
    """Reads of rows, of the padding that 8 parts need, and of no row at all.

    The third step reads many rows, the others three, each of another part.
    """
    rng = np.random.default_rng(step)
    rows = np.arange(n_rows) if step == 2 else np.array([0, n_rows // 2, n_rows - 1])
    ids = rng.choice(rows, (N_TOKENS, N_READ))
    ids[0] = [n_rows, n_rows + 1, n_rows + 2]
    ids[1] = [-1, 0, n_rows - 1]
    return RowGradient(
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(rng.standard_normal(ids.shape), jnp.float32),
        jnp.asarray(rng.standard_normal((N_TOKENS, WIDTH)), jnp.float32),
    )


class Run(NamedTuple):
    """Tables, states, means and metrics after the last step."""

    tables: dict[str, Any]
    state: dict[str, Any]
    means: dict[str, Any]
    metrics: dict[str, float]


@cache
def optimizer_of(n_rows: int, n_parts: int, by: str, n_data: int = 1) -> Any:
    """(the optimizer of the tables, its step compiled)."""
    kinds = optimizers()
    optimizer = table_optimizer(
        [TableGroup(f"^{name}$", kind) for name, kind in kinds.items()],
        sharding=sharding_of(n_parts, by, n_data),
        n_rows=dict.fromkeys(kinds, n_rows),
    )

    @jax.jit
    def step(tables: Any, state: Any, gradient: RowGradient) -> Any:
        gradients = dict.fromkeys(tables, (gradient,))
        return optimizer.apply(gradients, state, tables)

    return optimizer, step


def start(n_rows: int, n_parts: int, by: str, n_data: int = 1) -> tuple[Any, Any]:
    """(tables, state) before the first step."""
    optimizer, _ = optimizer_of(n_rows, n_parts, by, n_data)
    sharding = sharding_of(n_parts, by, n_data)
    table = first_table(n_rows)
    tables = {
        name: jnp.asarray(table) if sharding is None else sharding.place(table)
        for name in optimizers()
    }
    return tables, jax.jit(optimizer.init)(tables)


def go_on(
    tables: Any,
    state: Any,
    n_rows: int,
    n_parts: int,
    by: str,
    steps: range,
    n_data: int = 1,
) -> Run:
    optimizer, step = optimizer_of(n_rows, n_parts, by, n_data)
    metrics: dict[str, Any] = {}
    for number in steps:
        tables, state, metrics = step(tables, state, gradients_of(n_rows, number))
    means = jax.jit(optimizer.mean)(tables, state)
    return Run(tables, state, means, {k: float(v) for k, v in metrics.items()})


@cache
def train(n_rows: int, n_parts: int, by: str, n_data: int = 1) -> Run:
    """All steps from the start."""
    tables, state = start(n_rows, n_parts, by, n_data)
    return go_on(tables, state, n_rows, n_parts, by, range(N_STEPS), n_data)
