"""Runs of a table optimizer by rows, and of an optax transform on the same reads.

What: zipf reads, a regression on them, and both forms of training in one scan each.
Why: every table optimizer is compared with its dense form in the same way.
When not: layers and models; these read a bare table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from memjax.ops.row_gradient import RowGradient, unique_rows
from memjax.ops.rows import get_rows, load
from memjax.ops.split import Split
from memjax.optim.table_optimizer import TableOptimizer

N_ROWS, WIDTH = 80, 4

RATES = {
    "float": 0.01,
    "numpy": np.float32(0.01),
    "jax": jnp.float32(0.01),
    "schedule": lambda step: 0.01 / (1 + step),
}


class Reads(NamedTuple):
    """For every step: row ids [S, N] and targets [S, N, W]; some are no row."""

    ids: jax.Array
    targets: jax.Array


class Run(NamedTuple):
    """What a run leaves: the table and state at its end, the rest for every step."""

    table: np.ndarray
    state: Any
    losses: np.ndarray
    tables: np.ndarray
    metrics: Any


def zipf_reads(n_steps: int, n_reads: int = 12, seed: int = 0) -> Reads:
    """Zipf reads of rows 0 .. R - 6; the last five rows are never read."""
    rng = np.random.default_rng(seed)
    weight = 1.0 / np.arange(1, N_ROWS - 4) ** 1.1
    order = rng.permutation(N_ROWS - 5)
    ids = order[
        rng.choice(N_ROWS - 5, (n_steps, n_reads), p=weight / weight.sum())
    ].astype(np.int32)
    ids[:, 0] = N_ROWS  # outside
    targets = rng.standard_normal((n_steps, n_reads, WIDTH)).astype(np.float32)
    return Reads(jnp.asarray(ids), jnp.asarray(targets))


def first_table(seed: int = 1) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((N_ROWS, WIDTH)), jnp.float32)


def _loss(value: jax.Array, target: jax.Array) -> jax.Array:
    return 0.5 * jnp.sum((value - target) ** 2)


def run_rows(optimizer: TableOptimizer, table: jax.Array, reads: Reads) -> Run:
    """Train on the reads, by rows."""

    def step(carry: Any, read: Reads) -> Any:
        table, state = carry
        value = get_rows(table, read.ids).astype(jnp.float32)
        loss, cotangent = jax.value_and_grad(_loss)(value, read.targets)
        gradient = RowGradient(read.ids[:, None], None, cotangent)
        rows = unique_rows([gradient], *table.shape)
        table, state, metrics = optimizer.apply(rows, state, table)
        return (table, state), (loss, load(table), metrics)

    @jax.jit
    def run(table: jax.Array, reads: Reads) -> Any:
        return lax.scan(step, (table, optimizer.init(table)), reads)

    (table, state), (losses, tables, metrics) = run(table, reads)
    return Run(np.asarray(table), state, losses, np.asarray(tables), metrics)


def run_dense(
    transform: optax.GradientTransformation, table: jax.Array, reads: Reads
) -> Run:
    """Train on the reads, with gradients of the shape of the table."""

    def step(carry: Any, read: Reads) -> Any:
        table, state = carry

        def loss_of(table: jax.Array) -> jax.Array:
            value = table.at[read.ids].get(mode="fill", fill_value=0)
            return _loss(value, read.targets)

        loss, gradient = jax.value_and_grad(loss_of)(table)
        updates, state = transform.update(gradient, state, table)
        table = optax.apply_updates(table, updates)
        return (table, state), (loss, table, jnp.sqrt(jnp.sum(updates**2)))

    @jax.jit
    def run(table: jax.Array, reads: Reads) -> Any:
        return lax.scan(step, (table, transform.init(table)), reads)

    (table, state), (losses, tables, norms) = run(table, reads)
    return Run(
        np.asarray(table), state, losses, np.asarray(tables), {"update_norm": norms}
    )


def moved(run: Run, table: jax.Array) -> np.ndarray:
    """Bool [S, R]: the rows that a step changed."""
    before = np.concatenate([np.asarray(table)[None], run.tables[:-1]])
    return (run.tables != before).any(-1)


def feeder(optimizer: TableOptimizer) -> Callable[[jax.Array, Any, Any], Run]:
    """A compiled function of (table, gradients [S, R, W], rows that are read [S, R]).

    It applies the gradients of the marked rows, one step after the other.
    """

    def step(carry: Any, inputs: Any) -> Any:
        table, state = carry
        gradient, is_read = inputs
        n_rows = len(is_read)
        ids = jnp.where(is_read, jnp.arange(n_rows, dtype=jnp.int32), n_rows)
        rows = unique_rows([RowGradient(ids[:, None], None, gradient)], *table.shape)
        table, state, metrics = optimizer.apply(rows, state, table)
        return (table, state), (load(table), metrics)

    @jax.jit
    def run(table: jax.Array, gradients: jax.Array, read: jax.Array) -> Any:
        return lax.scan(step, (table, optimizer.init(table)), (gradients, read))

    def feed(table: jax.Array, gradients: Any, read: Any) -> Run:
        (table, state), (tables, metrics) = run(
            table, jnp.asarray(gradients), jnp.asarray(read)
        )
        return Run(np.asarray(table), state, np.zeros(0), np.asarray(tables), metrics)

    return feed


def feed_parts(
    optimizer: TableOptimizer,
    table: jax.Array,
    gradients: Any,
    read: Any,
    by: str,
    n_devices: int = 4,
) -> tuple[np.ndarray, Any]:
    """The same on a table divided "by" rows or columns: (table at the end, metrics).

    Rows are padded with zeros up to a multiple of the devices.
    """
    n_rows, width = table.shape
    split = Split(n_rows, "table" if by == "rows" else None, None)
    spec = P("table", None)
    if by == "columns":
        split, spec = Split(None, None, "table"), P(None, "table")

    def step(carry: Any, inputs: Any) -> Any:
        table, state = carry
        gradient, is_read = inputs
        ids = jnp.where(is_read, jnp.arange(n_rows, dtype=jnp.int32), -1)
        rows = unique_rows(
            [RowGradient(ids[:, None], None, gradient)], *table.shape, split=split
        )
        table, state, metrics = optimizer.apply(rows, state, table, split)
        return (table, state), metrics

    def run(table: jax.Array, gradients: jax.Array, read: jax.Array) -> Any:
        start = (table, optimizer.init(table, split))
        (table, _), metrics = lax.scan(step, start, (gradients, read))
        return table, metrics

    mesh = Mesh(np.array(jax.devices()[:n_devices]), ("table",))
    padded = jnp.pad(table, ((0, -n_rows % n_devices if by == "rows" else 0), (0, 0)))
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(spec, P(), P()),
        out_specs=(spec, P()),
        check_vma=False,
    )
    out, metrics = jax.jit(mapped)(padded, jnp.asarray(gradients), jnp.asarray(read))
    np.testing.assert_array_equal(out[n_rows:], 0)
    return np.asarray(out[:n_rows]), metrics


def some_gradients(
    n_steps: int, n_rows: int, width: int = WIDTH, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(gradients [S, R, W], read [S, R]): half of the rows in a step."""
    rng = np.random.default_rng(seed)
    read = rng.random((n_steps, n_rows)) < 0.5
    gradients = rng.standard_normal((n_steps, n_rows, width)) * read[..., None]
    return gradients.astype(np.float32), read


def types(tree: Any) -> Any:
    """Shape, dtype and weakness of every leaf: what a second compilation hangs on."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
