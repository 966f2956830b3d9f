"""The step of a model with a memory: compiled once, donated, and no longer with depth.

What: programs are counted, not timed.
Why: a step that is compiled again, or copied, is slow in a way no loss shows.
When not: times; `memjax bench train_step` takes them.
"""

import dataclasses

import jax
import numpy as np
import pytest

from memjax.benchmarks.train_step import DEPTHS, experiment
from memjax.build.parts import Parts
from memjax.optim.build import build_optimizer
from memjax.parallel.mesh import global_batch, make_mesh
from memjax.train.state import abstract_state, init_state
from memjax.train.step import make_train_step


def step_of(found):
    """(the jitted step, its parts, mesh, transform)."""
    mesh = make_mesh(found.mesh, jax.devices()[:1])
    parts = Parts(found, mesh)
    transform = build_optimizer(found.optim, parts.dense_labels, found.train.n_steps)
    step = make_train_step(
        parts.training_loss, transform, tables=parts.tables, mesh=mesh
    )
    return step, parts, mesh, transform


def batch_of(data, seed=0):
    shape = (data.batch_size, data.context)
    tokens = np.random.default_rng(seed).integers(0, 257, shape, np.int32)
    return {
        "tokens": tokens,
        "targets": tokens,
        "segments": np.ones(shape, np.int32),
        "positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
        "weights": np.ones(shape, np.float32),
    }


def test_one_program_no_transfers_and_the_state_is_given_away():
    found = experiment(memory=True, n_layers=2, short=True)
    step, parts, mesh, transform = step_of(found)
    state = init_state(parts.init_params, transform, mesh, tables=parts.tables)
    batches = [global_batch(mesh, batch_of(found.data, seed)) for seed in range(3)]
    with jax.transfer_guard("disallow"):
        for batch in batches:
            before, (state, _) = state, step(state, batch)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert step._cache_size() == 1


@pytest.mark.parametrize("layers", [(1,), (1, 12)])
def test_the_program_hardly_grows_with_depth(layers):
    """Lines of the lowered text: equal blocks are one loop, memories split it."""
    sizes = []
    for n_layers in DEPTHS:
        found = experiment(memory=True, n_layers=n_layers, short=True)
        (memory,) = found.model.memories
        here = tuple(layer for layer in layers if layer < n_layers)
        model = dataclasses.replace(
            found.model, memories=(dataclasses.replace(memory, layers=here),)
        )
        step, parts, mesh, transform = step_of(dataclasses.replace(found, model=model))
        state = abstract_state(parts.init_params, transform, mesh, tables=parts.tables)
        lowered = step.lower(state, batch_of(found.data))
        sizes.append(lowered.as_text().count("\n"))
    assert sizes[1] < 3 * sizes[0]
