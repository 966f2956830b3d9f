"""State that the forward pass changes: parted, carried on, saved, never trained.

The toy's state is a running mean of token 0's logits and a count of the calls.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from memjax.train.model_state import ModelState
from memjax.train.state import init_state
from memjax.train.step import make_train_step
from tests.train import toy

NAMES = ("mean", "calls")
STATE = ModelState(
    split=lambda tree: (
        {k: v for k, v in tree.items() if k not in NAMES},
        {k: v for k, v in tree.items() if k in NAMES},
    ),
    merge=lambda params, held: {**params, **held},
)


def init_params(key):
    state = {"mean": jnp.zeros(toy.V), "calls": jnp.zeros((), jnp.int32)}
    return toy.init_params(key) | state


def loss_fn(params, batch, key):
    """The new state depends on the order of the batches."""
    nats, sums = toy.quiet_loss_fn(params, batch, key)
    mean = 0.5 * params["mean"] + 0.5 * params["table"][0] * batch["weights"].sum()
    return nats, (sums, {"mean": mean, "calls": params["calls"] + 1})


def steps_of(accumulate_steps, n_steps=3):
    mesh = toy.toy_mesh(1)
    transform = optax.adamw(0.1)
    state = init_state(init_params, transform, mesh, model_state=STATE)
    step = make_train_step(
        loss_fn,
        transform,
        accumulate_steps=accumulate_steps,
        model_state=STATE,
        mesh=mesh,
    )
    for i in range(n_steps):
        state, metrics = step(state, jax.tree.map(jnp.asarray, toy.make_batch(i)))
    return state, metrics


def test_a_step_returns_the_new_state_and_does_not_train_it():
    state, metrics = steps_of(1)
    assert int(state.params["calls"]) == 3
    assert np.any(state.params["mean"] != 0)
    adam = state.opt_state[0]
    assert set(adam.mu) == {"bias", "table"}
    assert bool(metrics["finite"])


def test_micro_batches_hand_the_state_on():
    whole, _ = steps_of(1)
    state, _ = steps_of(4)
    assert int(state.params["calls"]) == 12
    np.testing.assert_allclose(
        state.params["table"], whole.params["table"], rtol=1e-5, atol=1e-6
    )
    assert np.abs(state.params["mean"] - whole.params["mean"]).max() > 1e-3


def run(folder, n_steps):
    seen = []

    def evaluate(params, max_batches):
        del max_batches
        seen.append(int(params["calls"]))
        return {"bpb": 1.0}

    result = toy.toy_fit(
        folder,
        n_steps=n_steps,
        save_every=2,
        eval_every=2,
        init_params=init_params,
        loss_fn=loss_fn,
        eval_fn=evaluate,
        model_state=STATE,
        ema=None,
        group_norms=None,
    )
    return result.state, seen


def test_it_is_saved_restored_and_evaluated(tmp_path):
    through, seen = run(tmp_path / "whole", 4)
    assert seen[-1] == 4
    run(tmp_path / "parts", 2)
    resumed, _ = run(tmp_path / "parts", 4)
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(through), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(resumed.params["calls"]) == 4
