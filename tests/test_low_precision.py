"""The whole step in bfloat16: stored, multiplied and updated, without drifting."""

import dataclasses

import jax
import numpy as np

from memjax.build.parts import Parts
from memjax.experiment import Experiment
from memjax.layers.engram import EngramConfig
from memjax.layers.precision import PrecisionConfig
from memjax.models.config import ModelConfig
from memjax.optim.build import build_optimizer
from memjax.optim.config import OptimConfig
from memjax.parallel.mesh import MeshConfig, make_mesh
from memjax.train.state import init_state
from memjax.train.step import make_train_step

MODEL = ModelConfig(
    n_layers=1,
    d_model=16,
    n_heads=2,
    n_kv_heads=1,
    d_ff=16,
    memories=(
        EngramConfig(
            layers=(0,), n_heads=1, rows_per_head=31, row_width=8, mode="convex"
        ),
    ),
)


def bytes_batch():
    """Two rows of one sentence, as the data pipeline would give them."""
    text = np.frombuffer(b"in the beginning was the word, and the word was", np.uint8)
    tokens = np.stack([text[:-1], text[:-1]]).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": np.stack([text[1:], text[1:]]).astype(np.int32),
        "segments": np.ones_like(tokens),
        "positions": np.tile(np.arange(tokens.shape[1], dtype=np.int32), (2, 1)),
        "weights": np.ones(tokens.shape, np.float32),
    }


def test_a_bfloat16_model_learns_and_keeps_its_types():
    precision = PrecisionConfig(
        params="bfloat16", compute="bfloat16", tables="bfloat16"
    )
    experiment = Experiment(
        name="low",
        model=dataclasses.replace(MODEL, precision=precision),
        optim=OptimConfig(schedule="constant", learning_rate=1e-2),
    )
    parts = Parts(experiment)
    transform = build_optimizer(experiment.optim, parts.labels, 30)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state = init_state(parts.init_params, transform, mesh)
    dtypes = jax.tree.map(lambda x: x.dtype, state)
    step = make_train_step(parts.loss, transform)
    losses = []
    for _ in range(30):
        state, metrics = step(state, bytes_batch())
        assert metrics["finite"]
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1, "the second step compiled again"
    assert jax.tree.map(lambda x: x.dtype, state) == dtypes
    stored = {str(x.dtype) for x in jax.tree.leaves(state.params)}
    assert stored == {"bfloat16"}
    assert losses[-1] < 0.6 * losses[0]
