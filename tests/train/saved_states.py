"""Small states and their checkpoints.

What: `params_of`, `state_of`, `abstract_of`, and `save` and `restore` in one go.
Why: tests of checkpoints are about what lies in the folder.
When not: states of a run; see `toy`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from memjax.parallel.mesh import replicated
from memjax.train.checkpoint import Checkpoints
from memjax.train.state import init_state
from tests.train import toy

FINGERPRINT = {"ngram": {"seed": 0, "primes": [11, 13]}, "token_map": "3f2a"}
SGD = optax.sgd(0.1)


def params_of(rows=6, counter=jnp.int32, layers=1):
    params = {f"layer_{i}": {"bias": np.arange(3.0, dtype="f")} for i in range(layers)}
    weights = np.arange(rows * 2.0, dtype="f").reshape(rows, 2)
    return {**params, "weights": weights, "counter": np.array(16777217).astype(counter)}


def state_of(params, step=0):
    state = init_state(
        lambda key: jax.tree.map(jnp.asarray, params), SGD, toy.toy_mesh()
    )
    return state._replace(step=state.step + step)


def abstract_of(state):
    place = replicated(toy.toy_mesh())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state
    )


def save(directory, step, params=None, **how):
    state = state_of(params_of() if params is None else params, step)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(state, data={"next": step}, fingerprint=FINGERPRINT, **how)
    return state


def restore(directory, wanted, fingerprint=FINGERPRINT):
    with Checkpoints(directory) as checkpoints:
        return checkpoints.restore_newest(abstract_of(state_of(wanted)), fingerprint)
