"""Whole training steps of the quickstart: what its memory costs, and its compiling.

What: `entries`: the step with and without its memory in turns, tokens a second, the
    loader beside it; the seconds until a deep step can run, against a flat one.
Why: a memory that is fast alone can still be slow in a model.
When not: the memory alone; see `engram` and `table_rows`.
"""

import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from memjax.benchmarks.entry import Entry, Session, ask, open_program
from memjax.benchmarks.figure import Figure, Target
from memjax.benchmarks.process import Program
from memjax.build.parts import Parts
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.pipeline import train_batches
from memjax.data.prepare import prepare_text
from memjax.experiment import Experiment
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.optim.build import build_optimizer
from memjax.optim.config import OptimConfig
from memjax.parallel.mesh import global_batch, make_mesh
from memjax.train.state import init_state
from memjax.train.step import make_train_step

# A row that was read moves for about 160 steps: from then on as many leave as enter.
N_BATCHES = 160
DEPTHS = (2, 24)


def experiment(
    memory: bool, n_layers: int, short: bool, folder: Path | None = None
) -> Experiment:
    """The quickstart (`experiments/quickstart.py`) on the corpus in a folder."""
    rows = (20_000, 50_000, 100_000, 200_000)
    engram = EngramConfig(
        layers=(1,),
        orders=(3, 4, 5, 6),
        n_heads=1,
        rows_per_head=(64,) * 4 if short else rows,
        row_width=8 if short else 32,
        mode="interpolate",
        cap=0.5,
        kernel_size=0,
        table_mode="rows",
    )
    d_model, context = (16, 16) if short else (128, 256)
    return Experiment(
        name="quickstart",
        model=ModelConfig(
            n_layers=n_layers,
            d_model=d_model,
            n_heads=2,
            n_kv_heads=2,
            d_ff=32 if short else 352,
            scan_layers=n_layers != 3,
            memories=(engram,) if memory else (),
        ),
        data=DataConfig(
            corpora=(CorpusConfig(name=str(folder or "kjv")),),
            context=context,
            batch_size=2 if short else 8,
            eval_stride=context,
        ),
        optim=OptimConfig(learning_rate=3e-3, table_learning_rate=2e-2),
    )


def entries(short: bool) -> list[Entry]:
    """The overhead of the memory, and the compiler."""
    overhead = partial(_measure_overhead, short)
    compiling = partial(_measure_compiling, short)
    return [
        Entry(name="train_step/quickstart", measure=overhead),
        Entry(name="train_step/compile", measure=compiling),
    ]


class TrainStep:
    """The step of an experiment on made-up text, and the loader of its batches."""

    def __init__(self, memory: bool, n_layers: int, short: bool) -> None:
        self._arguments = (memory, n_layers, short)

    def describe(self) -> dict[str, Any]:
        """The device."""
        return {"backend": jax.default_backend()}

    def start(self) -> dict[str, float]:
        """Read batches, trace and compile; the seconds of each."""
        with tempfile.TemporaryDirectory(prefix="memjax-bench-") as name:
            folder = Path(name) / "store"
            (Path(name) / "text.txt").write_bytes(_text())
            prepare_text([Path(name) / "text.txt"], folder)
            found = experiment(*self._arguments, folder=folder)
            with train_batches(found.data) as batches:
                next(batches)
                begin = time.perf_counter()
                n_batches = 4 if found.model.d_model < 128 else N_BATCHES
                read = [next(batches) for _ in range(n_batches)]
                loader = (time.perf_counter() - begin) / n_batches
        mesh = make_mesh(found.mesh, jax.devices()[:1])
        parts = Parts(found, mesh)
        n_steps = found.train.n_steps
        transform = build_optimizer(found.optim, parts.dense_labels, n_steps)
        step: Any = make_train_step(
            parts.training_loss, transform, tables=parts.tables, mesh=mesh
        )
        self._state = init_state(
            parts.init_params, transform, mesh, tables=parts.tables
        )
        self._batches = [global_batch(mesh, batch) for batch in read]
        self._n_done = 0
        begin = time.perf_counter()
        traced = step.lower(self._state, self._batches[0])
        tracing = time.perf_counter() - begin
        self._step = traced.compile()
        compiling = time.perf_counter() - begin - tracing
        return {"loader": loader, "trace": tracing, "compile": compiling}

    def warm_up(self) -> None:
        """Every batch once."""
        for _ in self._batches:
            self._run()

    def seconds(self, n: int) -> list[float]:
        """Of n steps, after one that is not timed."""
        self._run()
        taken = []
        for _ in range(n):
            begin = time.perf_counter()
            self._run()
            taken.append(time.perf_counter() - begin)
        return taken

    def _run(self) -> None:
        batch = self._batches[self._n_done % len(self._batches)]
        self._n_done += 1
        self._state, metrics = self._step(self._state, batch)
        jax.block_until_ready((self._state, metrics))


def _text() -> bytes:
    """500 kB of words that are as frequent as in a text, in documents of a line."""
    draw = np.random.default_rng(0)
    letters = [bytes(draw.integers(97, 123, n)) for n in draw.integers(1, 9, 4000)]
    picked = np.minimum(draw.zipf(1.3, 100_000), len(letters)) - 1
    words = [letters[i] for i in picked]
    lines = [b" ".join(words[i : i + 100]) for i in range(0, len(words), 100)]
    return b"\n".join(lines)


def program(memory: bool, n_layers: int, short: bool) -> Program:
    """The worker of a step."""
    return Program(
        target="memjax.benchmarks.train_step:TrainStep",
        arguments={"memory": memory, "n_layers": n_layers, "short": short},
        name=f"the step of {n_layers} blocks",
        need_bytes=2**31,
    )


def _measure_overhead(short: bool, session: Session) -> Figure:
    session.say("train_step/quickstart")
    with ExitStack() as stack:
        workers = [
            stack.enter_context(open_program(session, program(memory, 3, short)))
            for memory in (True, False)
        ]
        started = []
        for worker in workers:
            worker.answer()
            started.append(ask(worker, "start"))
            ask(worker, "warm_up")
        n_calls = [session.calls(ask(w, "seconds", 1)[0]) for w in workers]
        times: list[list[float]] = [[], []]
        for _ in range(session.n_turns):
            for worker, n, taken in zip(workers, n_calls, times, strict=True):
                taken += [1e3 * seconds for seconds in ask(worker, "seconds", n)]
    ours, without = (statistics.median(taken) for taken in times)
    data = experiment(True, 3, short).data
    loader = 1e3 * started[0]["loader"]
    return Figure(
        ours_ms=ours,
        ours_min_ms=min(times[0]),
        calls=len(times[0]),
        target=Target(of="overhead", sign="<=", value=0.25),
        notes=(f"{ours / without - 1:.0%} more than without the memory",),
        more={
            "without_ms": without,
            "overhead": ours / without - 1,
            "tokens_s": 1e3 * data.batch_size * data.context / ours,
            "loader_ms": loader,
            "loader_part": loader / ours,
        },
    )


def _measure_compiling(short: bool, session: Session) -> Figure:
    taken = {}
    for n_layers in DEPTHS:
        session.say(f"train_step/compile, {n_layers} blocks")
        with open_program(session, program(True, n_layers, short)) as worker:
            worker.answer()
            found = ask(worker, "start")
            taken[n_layers] = found["trace"] + found["compile"]
    flat, deep = (taken[n] for n in DEPTHS)
    return Figure(
        ours_ms=1e3 * deep,
        target=Target(of="growth", sign="<=", value=3.0),
        more={"flat_ms": 1e3 * flat, "growth": deep / flat},
        notes=(f"tracing and compiling the step of {DEPTHS[1]} blocks",),
    )
