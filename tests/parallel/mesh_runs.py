"""Three steps of a tiny model on any mesh.

What: `run`, from an experiment's parts to losses, the state and the compiled step.
Why: several tests look at the same few programs, which take seconds to compile.
When not: the loop, data and files; `tests/test_run_mesh.py` goes through those.
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
    layers=(0,), n_heads=2, rows_per_head=50, row_width=4, table_mode="rows"
)
PRODUCT_KEYS = ProductKeyConfig(
    layers=(1,), n_sub_keys=8, key_width=8, n_heads=2, k=3, table_mode="rows"
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


class Run(NamedTuple):
    """Losses of the steps, the state after them, its parts, text of the program."""

    losses: list[float]
    state: Any
    parts: Parts
    program: str


def abstract(parts: Parts) -> Any:
    return abstract_state(parts.init_params, transform_of(parts), **_options(parts))


def transform_of(parts: Parts) -> Any:
    return build_optimizer(parts.experiment.optim, parts.dense_labels, N_STEPS)


def _options(parts: Parts) -> dict[str, Any]:
    return {
        "mesh": parts.mesh,
        "ema": parts.ema,
        "tables": parts.tables,
        "placement": parts.placement,
    }


def step_of(parts: Parts) -> Any:
    """The compiled step."""
    like = abstract(parts)
    step = make_train_step(
        parts.training_loss,
        transform_of(parts),
        accumulate_steps=parts.experiment.train.accumulate_steps,
        update_ema=parts.ema.update if parts.ema else None,
        tables=parts.tables,
        mesh=parts.mesh,
        shardings=jax.tree.map(lambda x: x.sharding, like),
    )
    return step.lower(like, global_batch(parts.mesh, batch(0))).compile()


def parts_on(mesh: MeshConfig, n_devices: int, **train: Any) -> Parts:
    settings = experiment(mesh, **train).validate(n_devices)
    return Parts(settings, make_mesh(mesh, jax.devices()[:n_devices]))


def go_on(parts: Parts, step: Any, state: Any, numbers: range) -> Run:
    losses = []
    for number in numbers:
        state, metrics = step(state, global_batch(parts.mesh, batch(number)))
        losses.append(float(metrics["loss"]))
    return Run(losses, state, parts, step.as_text())


@cache
def run(mesh: MeshConfig, n_devices: int = 8, accumulate_steps: int = 1) -> Run:
    """All steps from the start."""
    parts = parts_on(mesh, n_devices, accumulate_steps=accumulate_steps)
    state = init_state(parts.init_params, transform_of(parts), **_options(parts))
    return go_on(parts, step_of(parts), state, range(N_STEPS))
