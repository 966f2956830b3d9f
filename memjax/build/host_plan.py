"""Tables on the host, as the state and the step see them.

What: `host_plans`, what the device holds of them; and `SlotTraining`, the functions of
    a `TableTraining` for a state that holds slots instead of tables.
Why: model, optimizer and step treat a table on the host as one with few rows.
When not: the rows that are not on the device; see `host_tables`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from memjax.data.row_ids import PREFIX
from memjax.errors import ConfigError
from memjax.experiment import Experiment
from memjax.layers.memory import TableSpec
from memjax.layers.table import TABLES
from memjax.models.layouts import table_reads
from memjax.optim.build_tables import CAPACITY_PER_READ
from memjax.optim.tables import TablesOptimizer

OPTIMIZERS, SLOTS = "optimizer", "slots"
GIVEN = "table:"
SPARE = 8
# Batches whose rows may be needed at once: a step, those it may overlap with, and the
# rows that enter.
_AT_REST, _IN_MOTION = 3, 5


class HostPlan(NamedTuple):
    """One table on the host.

    Attributes:
        spec: the table, [R, W].
        fields: of a batch, that hold rows of it.
        n_reads: U, most distinct rows that a training batch reads.
        n_slots: S, rows that the device holds.
    """

    spec: TableSpec
    fields: tuple[str, ...]
    n_reads: int
    n_slots: int


def host_plans(experiment: Experiment) -> dict[str, HostPlan]:
    """{path: plan} of the tables in mode "host".

    Raises:
        ConfigError: fewer slots are asked for than a step needs.
    """
    data, optim = experiment.data, experiment.optim
    tokens, found = data.batch_size * data.context, {}
    for path, read in table_reads(experiment.model).items():
        if read.mode != "host":
            continue
        n_rows = read.spec.n_rows
        n_reads = min(tokens * read.rows, n_rows)
        least, moving = _AT_REST * n_reads, 0
        settings = optim.table_settings(optim.rule_of(path))
        if settings.optimizer == "sinkhorn_momentum":
            moving = optim.table_capacity or CAPACITY_PER_READ * tokens * read.rows
            # The buffer is a whole number of blocks.
            least = _IN_MOTION * n_reads + moving + 65536 // read.width + 1
        wanted = experiment.train.host_slots
        if wanted is not None and wanted < min(least, n_rows):
            want = f"None, or at least {min(least, n_rows)} for {path}"
            raise ConfigError("train.host_slots", wanted, want)
        if wanted is None:
            wanted = max(least, moving + SPARE * n_reads)
        fields = tuple(f"{PREFIX}{layer}" for layer in read.layers)
        found[path] = HostPlan(read.spec, fields, n_reads, min(wanted, n_rows))
    return found


def slots_of_tables(params: Any, plans: Mapping[str, HostPlan]) -> Any:
    """Parameters with empty slots in place of the tables on the host."""
    flat: dict[str, Any] = dict(flatten_dict(params, sep="/"))
    for path, plan in plans.items():
        leaf = flat[path]
        flat[path] = jnp.zeros((plan.n_slots, *leaf.shape[1:]), leaf.dtype)
    return unflatten_dict(flat, sep="/")


def given_tables(variables: dict[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Variables with the tables that a batch brings along (`HostReader`)."""
    given = {
        name.removeprefix(GIVEN): table
        for name, table in batch.items()
        if name.startswith(GIVEN)
    }
    if not given:
        return variables
    flat = flatten_dict(variables.get(TABLES, {}), sep="/") | given
    return {**variables, TABLES: unflatten_dict(flat, sep="/")}


class SlotTraining(NamedTuple):
    """The functions of a `TableTraining` by those of an optimizer and of plans.

    With plans, the state is {"optimizer": {path: state}, "slots": {path: slot of each
    row of the batch}}; without, that of the optimizer.
    """

    optimizer: TablesOptimizer
    plans: Mapping[str, HostPlan]

    def init(self, tables: Any) -> dict[str, Any]:
        if not self.plans:
            return self.optimizer.init(tables)
        slots = {
            path: jnp.full(plan.n_reads, plan.n_slots, jnp.int32)
            for path, plan in self.plans.items()
        }
        return {OPTIMIZERS: self.optimizer.init(tables), SLOTS: slots}

    def read(self, tables: Any, state: dict[str, Any]) -> Any:
        """The tables as a batch reads them: its rows, one after the other."""
        if not self.plans:
            return tables
        flat: dict[str, Any] = dict(flatten_dict(tables, sep="/"))
        for path, slots_U in state[SLOTS].items():
            flat[path] = flat[path].at[slots_U].get(mode="fill", fill_value=0)
        return unflatten_dict(flat, sep="/")

    def apply(
        self, gradients: Any, state: dict[str, Any], tables: Any, scale: jax.Array
    ) -> tuple[Any, dict[str, Any], dict[str, jax.Array]]:
        if not self.plans:
            return self.optimizer.apply(gradients, state, tables, scale)
        tables, new, metrics = self.optimizer.apply(
            gradients, state[OPTIMIZERS], tables, scale, state[SLOTS]
        )
        return tables, {OPTIMIZERS: new, SLOTS: state[SLOTS]}, metrics

    def mean(self, tables: Any, state: dict[str, Any]) -> Any:
        state = state[OPTIMIZERS] if self.plans else state
        return self.optimizer.mean(tables, state)
