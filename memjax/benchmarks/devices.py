"""Memory of a whole training step on each of 1, 2, 4 and 8 devices.

What: `entries`: the step of a model with a large n-gram memory, compiled for simulated
    devices, tables divided over the mesh axis "table" or dense weights over "fsdp".
Why: what does not shrink with the devices decides how far a model can grow.
When not: a run of one's own; `memjax show FILE --mesh ...` plans it.

Nothing is run or allocated: the bytes are those the compiler sets aside on one device,
and have no noise.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from memjax.benchmarks.entry import Entry, Session, ask, open_program
from memjax.benchmarks.figure import Figure
from memjax.benchmarks.process import Program
from memjax.build.parts import Parts
from memjax.data.config import DataConfig
from memjax.experiment import Experiment
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.optim.build import build_optimizer
from memjax.optim.config import OptimConfig
from memjax.parallel.logical_axes import BATCH_AXES
from memjax.parallel.mesh import MeshConfig, make_mesh
from memjax.report.plan import bytes_text
from memjax.train.state import TrainState, abstract_state
from memjax.train.step import make_train_step

COUNTS = (1, 2, 4, 8)
BATCH_FIELDS = ("tokens", "segments", "positions", "targets", "weights")


def entries(short: bool) -> list[Entry]:
    """Each count of devices, by tables and by dense weights."""
    counts = (1, 2) if short else COUNTS
    made = []
    for axis in ("table", "fsdp"):
        for n_devices in counts[axis == "fsdp" :]:  # on one they are the same
            measure = partial(_measure, axis, n_devices, short)
            made.append(Entry(name=f"devices/{axis}/{n_devices}", measure=measure))
    return made


def experiment(axis: str, n_devices: int, short: bool) -> Experiment:
    """Four blocks of width 512, a table of 2 M rows x 64, 8 x 512 tokens a step.

    The table has lazy Adam. Sinkhorn by rows would have the tables of its dense step,
    which ordinary steps do not touch, among what the compiler sets aside.
    """
    rows, d_model, context = (1000, 32, 16) if short else (500_000, 512, 512)
    memory = EngramConfig(
        layers=(0,) if short else (1,),
        orders=(3,) if short else (3, 4, 5, 6),
        n_heads=1,
        rows_per_head=rows,
        row_width=16 if short else 64,
        table_mode="rows",
    )
    model = ModelConfig(
        n_layers=1 if short else 4,
        d_model=d_model,
        n_heads=4,
        n_kv_heads=4,
        d_ff=2 * d_model,
        memories=(memory,),
    )
    return Experiment(
        name="devices",
        model=model,
        data=DataConfig(context=context, batch_size=8, eval_stride=context),
        optim=OptimConfig(table_optimizer="lazy_adam"),
        mesh=dataclasses.replace(MeshConfig(data=1), **{axis: n_devices}),
    )


class CompiledStep:
    """The training step of `experiment`, compiled for simulated devices."""

    def __init__(self, axis: str, n_devices: int, short: bool) -> None:
        self._experiment = experiment(axis, n_devices, short)
        self._devices = jax.devices()[:n_devices]
        self._mesh = make_mesh(self._experiment.mesh, self._devices)
        self._parts = Parts(self._experiment, self._mesh)

    def describe(self) -> dict[str, Any]:
        """The devices."""
        return {"devices": len(self._devices), "backend": jax.default_backend()}

    def memory(self) -> dict[str, int]:
        """Bytes on one device.

        Returns:
            As `state`; "temp_bytes", what the step sets aside beside it;
            "device_bytes", state, batch and these.
        """
        found = self._compiled().memory_analysis()
        assert found is not None
        return self.state() | {
            "temp_bytes": int(found.temp_size_in_bytes),
            "device_bytes": int(
                found.argument_size_in_bytes
                + found.output_size_in_bytes
                - found.alias_size_in_bytes
                + found.temp_size_in_bytes
            ),
        }

    def state(self) -> dict[str, int]:
        """Bytes on one device that do not need a compiler.

        Returns:
            "state_bytes", parameters, optimizer's state and the rest of a train state;
            "tables_bytes", of them tables and their optimizer's state.
        """
        state = self._state()
        _, tables = self._parts.split(state.params)
        return {
            "state_bytes": _bytes(state),
            "tables_bytes": _bytes((tables, state.table_state)),
        }

    @property
    def _transform(self) -> Any:
        config = self._experiment
        labels = self._parts.dense_labels
        return build_optimizer(config.optim, labels, config.train.n_steps)

    def _state(self) -> TrainState:
        parts = self._parts
        return abstract_state(
            parts.init_params,
            self._transform,
            self._mesh,
            ema=parts.ema,
            tables=parts.tables,
            model_state=parts.model_state,
            placement=parts.placement,
        )

    def _compiled(self) -> Any:
        data, state = self._experiment.data, self._state()
        step: Any = make_train_step(
            self._parts.training_loss,
            self._transform,
            tables=self._parts.tables,
            mesh=self._mesh,
            shardings=jax.tree.map(lambda x: x.sharding, state),
        )
        split = NamedSharding(self._mesh, PartitionSpec(BATCH_AXES))
        batch = {
            name: jax.ShapeDtypeStruct(
                (data.batch_size, data.context),
                jnp.float32 if name == "weights" else jnp.int32,
                sharding=split,
            )
            for name in BATCH_FIELDS
        }
        return step.lower(state, batch).compile()


def program(axis: str, n_devices: int, short: bool) -> Program:
    """The worker with as many simulated devices as are needed, and the real CPUs."""
    return Program(
        target="memjax.benchmarks.devices:CompiledStep",
        arguments={"axis": axis, "n_devices": n_devices, "short": short},
        name=f"the step on {n_devices} devices",
        variables={"JAX_NUM_CPU_DEVICES": str(n_devices), "JAX_PLATFORMS": "cpu"},
    )


def _measure(axis: str, n_devices: int, short: bool, session: Session) -> Figure:
    session.say(f"devices/{axis}/{n_devices}")
    with open_program(session, program(axis, n_devices, short)) as worker:
        worker.answer()
        found = ask(worker, "memory")
    text = {name: bytes_text(n) for name, n in found.items()}
    note = (
        f"{text['device_bytes']} on each device: state {text['state_bytes']} "
        f"(tables with their optimizer's state {text['tables_bytes']}), temporaries "
        f"{text['temp_bytes']}"
    )
    return Figure(notes=(note,), more=found)


def _bytes(tree: Any) -> int:
    """Of the part on one device."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )
