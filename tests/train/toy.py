"""A language model of a few numbers, with everything `fit` wants handed in.

Also a program: `python toy.py RUN_DIR N_STEPS PAUSE_S [ADDRESS PROCESS N_PROCESSES]`
trains it, for tests that kill processes. A bigram table and a bias predict the next
token.
"""

import dataclasses
import hashlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from memjax.errors import DataError
from memjax.parallel.mesh import MeshConfig, data_reader, make_mesh
from memjax.train.config import TrainConfig
from memjax.train.loop import fit
from memjax.train.run_folder import open_run_folder

V = 7
FINGERPRINT = {"ngram": {"seed": 0, "primes": [11, 13]}, "token_map": "3f2a"}
LABELS = {"bias": "vector", "table": "matrix"}


def init_params(key):
    return {
        "bias": jnp.zeros((V,)),
        "table": 0.1 * jax.random.normal(key, (V, V)),
    }


def loss_fn(params, batch, key):
    """Noise on the logits stands for dropout, so that the key matters."""
    logits = params["table"][batch["tokens"]] + params["bias"]
    logits = logits + 0.01 * jax.random.normal(key, logits.shape)
    return _nats(logits, batch)


def quiet_loss_fn(params, batch, key):
    del key
    return _nats(params["table"][batch["tokens"]] + params["bias"], batch)


def _nats(logits, batch):
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1
    )[..., 0]
    weights = batch["weights"]
    return -jnp.sum(weights * picked), {"weight": jnp.sum(weights)}


def make_batch(index, rows=8, context=4):
    """Batch number `index`: random tokens, targets close to tokens + 1."""
    rng = np.random.default_rng([17, index])
    tokens = rng.integers(0, V, (rows, context), dtype=np.int32)
    noise = (rng.random((rows, context)) < 0.2).astype(np.int32)
    weights = (rng.random((rows, context)) < 0.9).astype(np.float32)
    targets = (tokens + 1 + noise) % V
    return {"tokens": tokens, "targets": targets.astype(np.int32), "weights": weights}


class ToyBatches:
    """Endless, and restorable to a position."""

    def __init__(self, rows=8, pause_s=0.0, bad_at=None):
        self.index, self.rows, self.pause_s, self.bad_at = 0, rows, pause_s, bad_at
        self.served = []

    def __next__(self):
        time.sleep(self.pause_s)
        batch = make_batch(self.index, self.rows)
        if self.index == self.bad_at:
            batch["weights"][0, 0] = np.inf
        self.served.append(self.index)
        self.index += 1
        return batch

    def state(self):
        return {"next": self.index}

    def restore(self, state):
        if set(state) != {"next"}:
            raise DataError(f"data state {state}, allowed: one 'next'")
        self.index = state["next"]


_EVAL = jax.jit(lambda params, batch: quiet_loss_fn(params, batch, None))


def eval_fn(params, max_batches):
    """Two batches in all."""
    n = 2 if max_batches is None else min(2, max_batches)
    nats, weight = 0.0, 0.0
    for index in range(n):
        total, aux = _EVAL(params, make_batch(1000 + index))
        nats, weight = nats + float(total), weight + float(aux["weight"])
    return {"bpb": nats / weight / np.log(2.0), "n_batches": float(n)}


def rate(step):
    return 0.1 / (1.0 + step)


def transform():
    return optax.adam(rate)


def toy_mesh(n_devices=1):
    return make_mesh(MeshConfig(), jax.devices()[:n_devices])


def toy_fit(run_dir, *, n_devices=1, batches=None, config=None, **settings):
    """`fit` on the toy; `settings` with TrainConfig's names go there, others to fit."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    of_config = {k: v for k, v in settings.items() if k in names}
    of_fit = {k: v for k, v in settings.items() if k not in names}
    if config is None:
        base = TrainConfig(n_steps=6, eval_every=None, save_every=None, log_every=1)
        config = dataclasses.replace(base, **of_config)
    arguments = {
        "mesh": toy_mesh(n_devices),
        "init_params": init_params,
        "loss_fn": loss_fn,
        "transform": transform(),
        "batches": ToyBatches() if batches is None else batches,
        "eval_fn": eval_fn,
        "learning_rate": rate,
        "fingerprint": FINGERPRINT,
        **of_fit,
    }
    folder = open_run_folder(run_dir, config={"train": dataclasses.asdict(config)})
    return fit(config, run_dir=folder, **arguments)


def tree_hash(tree):
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


class PartOfBatches(ToyBatches):
    """The rows of one reader out of several."""

    def __init__(self, reader, n_readers, **settings):
        super().__init__(**settings)
        self.part = slice(
            reader * self.rows // n_readers, (reader + 1) * self.rows // n_readers
        )

    def __next__(self):
        return {name: rows[self.part] for name, rows in super().__next__().items()}


def main(run_dir, n_steps, pause_s, address=None, process="0", n_processes="1"):
    if address is not None:
        jax.distributed.initialize(
            address, num_processes=int(n_processes), process_id=int(process)
        )
    mesh = make_mesh(MeshConfig())
    batches = PartOfBatches(*data_reader(mesh), pause_s=float(pause_s))
    result = toy_fit(
        run_dir,
        mesh=mesh,
        n_steps=int(n_steps),
        save_every=3,
        eval_every=4,
        batches=batches,
    )
    print(f"hash {tree_hash(result.state)} step {result.step}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
