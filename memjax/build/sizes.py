"""What an experiment will cost, before it is run.

What: `describe` (shapes, sizes, costs) and `check_memory`.
Why: the wrong size, or a table that cannot fit, shows before anything is allocated.
When not: measuring; `memjax.benchmarks` does that.
"""

import math
import os
from typing import Any

import jax

from memjax.build.host_plan import slots_of_tables
from memjax.build.parts import Parts
from memjax.errors import ConfigError
from memjax.experiment import Experiment
from memjax.models.parameters import cost
from memjax.ops.rows import value_dtype
from memjax.optim.build import build_optimizer


def describe(experiment: Experiment) -> dict[str, Any]:
    """Sizes, shapes and costs of an experiment, as plain data. Touches no device."""
    parts = Parts(experiment)
    sizes = cost(experiment.model, experiment.data.context)
    leaves = jax.tree_util.tree_leaves_with_path(parts.abstract)
    return {
        "params_dense": sizes.dense_params,
        "params_table": sizes.table_params,
        "bytes_dense": sizes.dense_bytes,
        "bytes_table": sizes.table_bytes,
        "on_host": {
            path: {"rows": plan.spec.n_rows, "slots": plan.n_slots}
            for path, plan in parts.host_plans.items()
        },
        "flops_per_token": sizes.flops_per_token,
        "table_bytes_per_token": sizes.table_bytes_per_token,
        "tokens_per_step": experiment.data.batch_size * experiment.data.context,
        "n_steps": experiment.train.n_steps,
        "shapes": {
            jax.tree_util.keystr(path, simple=True, separator="/"): {
                "shape": list(leaf.shape),
                "dtype": str(value_dtype(leaf)),
                "label": label,
            }
            for (path, leaf), label in zip(
                leaves, jax.tree.leaves(parts.labels), strict=True
            )
        },
    }


def check_memory(experiment: Experiment) -> None:
    """Raise ConfigError when parameters, gradients and momenta cannot fit in memory.

    Counted: each parameter, its gradient and the optimizer's state; against the memory
    of a device, or of this machine for a CPU. Only what is certain not to fit is
    refused; activations are not counted, and of tables on the host the slots alone.
    """
    parts = Parts(experiment)
    sizes = cost(experiment.model, experiment.data.context)
    transform = build_optimizer(
        experiment.optim, parts.dense_labels, experiment.train.n_steps
    )
    abstract = parts.abstract
    if parts.host_plans:
        abstract = jax.eval_shape(
            lambda params: slots_of_tables(params, parts.host_plans), abstract
        )
    dense, tables = parts.split(abstract)
    state = jax.tree.leaves(jax.eval_shape(transform.init, dense))
    needed = 2 * sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract)
    )
    if parts.tables is not None:
        # Tables by rows have no gradient of their size.
        needed -= sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tables)
        )
        state += jax.tree.leaves(jax.eval_shape(parts.tables.init, tables))
    needed += sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in state)
    available = _memory_bytes()
    if available is not None and needed > available:
        raise ConfigError(
            "model.memories",
            f"{sizes.table_params} table parameters",
            f"training needs at least {needed} bytes ({sizes.table_bytes} of them the "
            f"tables) and {available} are there; use fewer or narrower rows, or "
            "precision.tables = 'bfloat16'",
        )


def _memory_bytes() -> int | None:
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
            return None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")
