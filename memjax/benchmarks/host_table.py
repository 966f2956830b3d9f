"""A training step with its table in host memory or in a file, against the device.

What: `entries`: the quickstart's step with the table in the three places, by turns.
Why: rows come and go while steps run, which must cost next to nothing.
When not: what a larger table costs; `docs/host_tables.md` has the bytes.
"""

import dataclasses
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax

from memjax.benchmarks.contender import Contender, Ready
from memjax.benchmarks.entry import Entry, Session, ask, open_program
from memjax.benchmarks.figure import Figure, Target
from memjax.benchmarks.process import Program
from memjax.build.host_tables import open_host_tables
from memjax.build.parts import Parts
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.pipeline import train_batches
from memjax.experiment import Experiment
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.optim.build import build_optimizer
from memjax.optim.config import OptimConfig
from memjax.parallel.mesh import MeshConfig, global_batch, make_mesh
from memjax.train.config import TrainConfig
from memjax.train.host_tables import HostTables
from memjax.train.state import init_state
from memjax.train.step import make_train_step

PLACES = ("device", "memory", "file")
OPTIMIZERS = ("adagrad", "sinkhorn_momentum")


def entries(short: bool) -> list[Entry]:
    """Adagrad with as few slots as a step needs, and the quickstart's optimizer."""
    return [
        Entry(
            name=f"host_table/{optimizer}",
            measure=partial(_measure, optimizer, short),
        )
        for optimizer in OPTIMIZERS
    ]


def experiment(optimizer: str, place: str, short: bool) -> Experiment:
    """The quickstart's model and batch; its table has ten times as many rows."""
    sizes = (200_000, 500_000, 1_000_000, 2_000_000)
    memory = EngramConfig(
        layers=(1,),
        orders=(3, 4, 5, 6),
        n_heads=1,
        rows_per_head=tuple(size // 10 for size in sizes) if short else sizes,
        row_width=32,
        mode="interpolate",
        cap=0.5,
        kernel_size=0,
        table_mode="rows" if place == "device" else "host",
    )
    model = ModelConfig(
        n_layers=2 if short else 3,
        d_model=32 if short else 128,
        n_heads=2,
        n_kv_heads=2,
        d_ff=32 if short else 352,
        scan_layers=False,
        memories=(memory,),
    )
    context = 32 if short else 256
    data = DataConfig(
        corpora=(CorpusConfig(name="kjv"),),
        context=context,
        batch_size=8,
        eval_stride=context,
    )
    slots = None
    if optimizer == "adagrad" and place != "device":
        slots = 3 * data.batch_size * context * 4
    return Experiment(
        name="host_table",
        model=model,
        data=data,
        optim=OptimConfig(learning_rate=3e-3, table_optimizer=optimizer),
        train=TrainConfig(
            host_tables="memory" if place == "device" else place, host_slots=slots
        ),
        mesh=MeshConfig(data=1),
    )


def contender(optimizer: str, place: str, short: bool) -> Contender:
    """Trains one step a call."""
    return Contender("jax", partial(_made, experiment(optimizer, place, short)))


def _made(experiment: Experiment) -> Ready:
    scratch = tempfile.TemporaryDirectory(prefix="memjax-host-table-")
    if experiment.train.host_tables == "file":
        train = dataclasses.replace(experiment.train, host_tables=scratch.name)
        experiment = dataclasses.replace(experiment, train=train)
    mesh = make_mesh(experiment.mesh, jax.devices()[:1])
    parts = Parts(experiment, mesh)
    transform = build_optimizer(
        experiment.optim, parts.dense_labels, experiment.train.n_steps
    )
    state = init_state(parts.init_params, transform, mesh, tables=parts.tables)
    step = make_train_step(
        parts.training_loss, transform, tables=parts.tables, mesh=mesh
    )
    batches = train_batches(experiment.data, row_ids=parts.row_ids)
    tables = open_host_tables(parts, Path(scratch.name))
    host = HostTables(tables, mesh, batches) if tables else None
    if host is not None:
        host.fill()
        host.start(state)

    def run() -> None:
        nonlocal state
        if host is None:
            batch = global_batch(mesh, next(batches))
        else:
            state, _ = host.settle(state)
            batch, state = host.next(state)
        state, metrics = step(state, batch)
        if host is not None:
            host.started()
        jax.block_until_ready((state, metrics))

    run.scratch = scratch  # pyright: ignore[reportFunctionMemberAccess]
    return Ready(variants={"step": run})


def _measure(optimizer: str, short: bool, session: Session) -> Figure:
    found: dict[str, list[float]] = {place: [] for place in PLACES}
    need = 1 << 30 if short else 3 << 30
    programs = {
        place: Program(
            target="memjax.benchmarks.host_table:contender",
            arguments={"optimizer": optimizer, "place": place, "short": short},
            name=f"host_table/{optimizer} {place}",
            need_bytes=need,
        )
        for place in PLACES
    }
    with (
        open_program(session, programs["device"]) as device,
        open_program(session, programs["memory"]) as memory,
        open_program(session, programs["file"]) as file,
    ):
        workers = dict(zip(PLACES, (device, memory, file), strict=True))
        calls = 2
        for place, worker in workers.items():
            worker.answer()
            session.say(f"host_table/{optimizer}: {place}")
            ask(worker, "start")
            calls = session.calls(min(ask(worker, "choose").values()))
        for _ in range(session.n_turns):
            for place, worker in workers.items():
                found[place] += ask(worker, "seconds", calls)
    ms: dict[str, Any] = {
        place: 1e3 * statistics.median(taken) for place, taken in found.items()
    }
    return Figure(
        ours_ms=ms["memory"],
        ours_min_ms=1e3 * min(found["memory"]),
        calls=len(found["memory"]),
        target=Target(of="slower", sign="<=", value=1.1),
        more={
            "device_ms": ms["device"],
            "file_ms": ms["file"],
            "slower": ms["memory"] / ms["device"],
            "file_slower": ms["file"] / ms["device"],
        },
    )
