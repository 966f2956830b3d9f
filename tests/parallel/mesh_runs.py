"""Three steps of a tiny model on any mesh.

What: `program`, the compiled step of an experiment on a mesh; `run`, losses and state.
Why: several tests look at the same few programs, which take seconds to compile.
When not: the loop, its data and its files; other tests go through those.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from memjax.build.parts import Parts
from memjax.data.config import DataConfig
from memjax.experiment import Experiment
from memjax.layers.engram import EngramConfig
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.models.config import ModelConfig
from memjax.optim.build import build_optimizer
from memjax.optim.config import OptimConfig
from memjax.parallel.mesh import MeshConfig, global_batch, make_mesh
from memjax.train.config import TrainConfig
from memjax.train.state import abstract_state, init_state
from memjax.train.step import make_train_step

N_STEPS, ROWS, CONTEXT = 3, 16, 8
ENGRAM = EngramConfig(
    form="v41",
    layers=(0,),
    n_heads=2,
    rows_per_head=50,
    row_width=4,
    table_std=0.3,
    norm_eps=1e-6,
    table_mode="rows",
)
PRODUCT_KEYS = ProductKeyConfig(
    layers=(1,),
    place="instead_of_feed_forward",
    n_sub_keys=8,
    key_width=8,
    n_heads=1,
    k=2,
    table_mode="rows",
)


def experiment(mesh: MeshConfig, **train: Any) -> Experiment:
    return Experiment(
        name="mesh",
        model=ModelConfig(
            n_layers=2,
            d_model=16,
            n_heads=4,
            n_kv_heads=2,
            d_ff=32,
            scan_layers=False,
            memories=(ENGRAM, PRODUCT_KEYS),
        ),
        data=DataConfig(
            batch_size=ROWS,
            context=CONTEXT,
            eval_stride=CONTEXT,
            eval_batch_size=ROWS,
        ),
        optim=OptimConfig(
            schedule="constant", ema_decay=0.9, table_optimizer="adagrad"
        ),
        train=TrainConfig(n_steps=N_STEPS, **train),
        mesh=mesh,
    )


def batch(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    tokens = rng.integers(97, 101, (ROWS, CONTEXT + 1)).astype(np.int32)
    at = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), (ROWS, CONTEXT))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": np.ones_like(at),
        "positions": np.ascontiguousarray(at),
        "weights": np.ones(at.shape, np.float32),
    }


class Program(NamedTuple):
    """What a mesh needs to train: parts, shapes of the state, the compiled step."""

    parts: Parts
    abstract: Any
    step: Any


class Run(NamedTuple):
    """Losses of the steps, and the state after them."""

    losses: list[float]
    state: Any


def parts_on(mesh: MeshConfig, n_devices: int, **train: Any) -> Parts:
    settings = experiment(mesh, **train).validate(n_devices)
    return Parts(settings, make_mesh(mesh, jax.devices()[:n_devices]))


def _state(make: Any, parts: Parts) -> Any:
    transform = build_optimizer(parts.experiment.optim, parts.dense_labels, N_STEPS)
    return make(
        parts.init_params,
        transform,
        parts.mesh,
        ema=parts.ema,
        tables=parts.tables,
        placement=parts.placement,
    )


@cache
def program(mesh: MeshConfig, n_devices: int = 8, accumulate_steps: int = 1) -> Program:
    parts = parts_on(mesh, n_devices, accumulate_steps=accumulate_steps)
    like = _state(abstract_state, parts)
    step = make_train_step(
        parts.training_loss,
        build_optimizer(parts.experiment.optim, parts.dense_labels, N_STEPS),
        accumulate_steps=accumulate_steps,
        update_ema=parts.ema.update if parts.ema else None,
        tables=parts.tables,
        mesh=parts.mesh,
        shardings=jax.tree.map(lambda x: x.sharding, like),
    )
    found = step.lower(like, global_batch(parts.mesh, batch(0))).compile()
    return Program(parts, like, found)


def go_on(found: Program, state: Any, numbers: range) -> Run:
    losses = []
    for number in numbers:
        placed = global_batch(found.parts.mesh, batch(number))
        state, metrics = found.step(state, placed)
        losses.append(float(metrics["loss"]))
    return Run(losses, state)


@cache
def run(mesh: MeshConfig, n_devices: int = 8, accumulate_steps: int = 1) -> Run:
    """All steps from the start."""
    found = program(mesh, n_devices, accumulate_steps)
    if mesh.table > 1:  # padded tables
        return go_on(found, _state(init_state, found.parts), range(N_STEPS))
    shardings = jax.tree.map(lambda x: x.sharding, found.abstract)
    return go_on(found, jax.device_put(_first(), shardings), range(N_STEPS))


@cache
def _first() -> Any:
    """The state at step 0, on the host."""
    return jax.device_get(_state(init_state, parts_on(MeshConfig(), 1)))
