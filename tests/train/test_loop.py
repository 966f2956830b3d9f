"""The loop: its order, its ends, its resume law."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import CheckpointError, ConfigError, TrainingError
from memjax.parallel.mesh import MeshConfig, make_mesh
from memjax.train.checkpoint import whole_steps
from memjax.train.hooks.base import Hook
from memjax.train.hooks.record import read_records
from memjax.train.state import Ema
from tests.train import toy


def records_of(run_dir, kind="train"):
    records = read_records(run_dir / "metrics.jsonl")
    return [record for record in records if record["kind"] == kind]


def losses_of(run_dir):
    return {r["step"]: r["loss_hex"] for r in records_of(run_dir)}


class Killer(toy.ToyBatches):
    """Sends a signal to this process while a batch is taken."""

    def __init__(self, at, number):
        super().__init__()
        self.at, self.number = at, number

    def __next__(self):
        if self.index == self.at:
            os.kill(os.getpid(), self.number)
        return super().__next__()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps without a stop."""
    run_dir = tmp_path_factory.mktemp("whole")
    return run_dir, toy.toy_fit(run_dir, eval_every=2, save_every=4)


def test_the_loop_learns_and_says_how_it_ended(whole, tmp_path):
    run_dir, result = whole
    assert result.step == 6 and result.stopped_by is None
    evaluations = records_of(run_dir, "eval")
    assert [r["step"] for r in evaluations] == [2, 4, 6]
    assert evaluations[-1]["bpb"] < evaluations[0]["bpb"]
    (final,) = records_of(run_dir, "final")
    assert final["bpb"] == result.final["bpb"] == evaluations[-1]["bpb"]
    weights = [toy.make_batch(i)["weights"].sum() for i in range(6)]
    assert result.tokens_seen == sum(weights)
    assert [r["learning_rate"] for r in records_of(run_dir)] == [
        toy.rate(step) for step in range(6)
    ]
    # Best on the way and the newest; keep_last is 2, the best was the last.
    assert whole_steps(run_dir / "checkpoints") == [4, 6]
    assert (result.best_step, result.best_bpb) == (6, final["bpb"])


def test_six_steps_equal_three_saved_restored_and_three(whole, tmp_path):
    """The resume law, bit for bit, the position in the data included."""
    run_dir, result = whole
    toy.toy_fit(tmp_path, n_steps=3, eval_every=2)
    batches = toy.ToyBatches()
    resumed = toy.toy_fit(tmp_path, n_steps=6, eval_every=2, batches=batches)
    assert batches.served == [3, 4, 5], "nothing is read and thrown away"
    assert losses_of(tmp_path) == losses_of(run_dir)
    assert toy.tree_hash(resumed.state) == toy.tree_hash(result.state)
    assert resumed.tokens_seen == result.tokens_seen
    steps = [r["step"] for r in records_of(tmp_path, "eval")]
    assert steps == [2, 3, 4, 6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_the_rerun_goes_on(
    whole, tmp_path, capsys, number
):
    run_dir, result = whole
    handler = signal.getsignal(number)
    stopped = toy.toy_fit(tmp_path, batches=Killer(3, number))
    name = signal.Signals(number).name
    assert (stopped.step, stopped.stopped_by, stopped.final) == (4, name, None)
    assert whole_steps(tmp_path / "checkpoints") == [4]
    assert f"{name}: saved at step 4; rerun to go on" in capsys.readouterr().out
    assert signal.getsignal(number) == handler
    resumed = toy.toy_fit(tmp_path)
    assert losses_of(tmp_path) == losses_of(run_dir)
    assert toy.tree_hash(resumed.state) == toy.tree_hash(result.state)


def test_a_second_interrupt_does_not_wait(tmp_path):
    class Twice(Killer):
        def __next__(self):
            if self.index == self.at:
                os.kill(os.getpid(), signal.SIGINT)
            return super().__next__()

    with pytest.raises(KeyboardInterrupt):
        toy.toy_fit(tmp_path, batches=Twice(2, signal.SIGINT))


def test_a_bad_loss_stops_and_is_not_saved(tmp_path):
    """The loss of step 5 is bad; a save is due right after it."""
    batches = toy.ToyBatches(bad_at=4)
    with pytest.raises(TrainingError) as caught:
        toy.toy_fit(tmp_path, batches=batches, save_every=1, keep_last=9)
    assert "loss = nan at step 5, training stopped" in str(caught.value)
    good = tmp_path / "checkpoints" / "4"
    assert f"the last good checkpoint is step 4, {good}" in str(caught.value)
    assert whole_steps(tmp_path / "checkpoints") == [1, 2, 3, 4]
    assert [r["step"] for r in records_of(tmp_path)] == [1, 2, 3, 4]


def test_a_bad_loss_before_any_checkpoint_says_so(tmp_path):
    with pytest.raises(TrainingError, match="step 1.*there is no checkpoint yet"):
        toy.toy_fit(tmp_path, batches=toy.ToyBatches(bad_at=0))


def test_eval_and_save_see_the_state_before_the_step(tmp_path):
    seen = []

    def eval_fn(params, max_batches):
        seen.append((toy.tree_hash(params), max_batches))
        return {"bpb": 1.0 + len(seen), "other": jnp.float32(2.0)}

    class States(Hook):
        def __init__(self):
            self.hashes = []

        def before_step(self, step, state, batch):
            self.hashes.append(toy.tree_hash(state.params))

    states = States()
    result = toy.toy_fit(
        tmp_path,
        eval_fn=eval_fn,
        hooks=[states],
        n_steps=4,
        eval_every=2,
        max_eval_batches=1,
    )
    last = toy.tree_hash(result.state.params)
    assert seen == [(states.hashes[2], 1), (last, 1), (last, None)]
    assert result.final == {"bpb": 4.0, "other": 2.0}
    # The first evaluation was the best, so it was saved although no save was due.
    assert (result.best_step, result.best_bpb) == (2, 2.0)
    assert whole_steps(tmp_path / "checkpoints") == [2, 4]


def test_a_finished_run_is_finished(tmp_path, whole):
    first = toy.toy_fit(tmp_path, n_steps=2)
    again = toy.toy_fit(tmp_path, n_steps=2)
    assert again.final == first.final and again.step == 2
    assert len(records_of(tmp_path, "final")) == 1
    with pytest.raises(ConfigError, match="train.n_steps = 1.*at step 2 already"):
        toy.toy_fit(tmp_path, n_steps=1)
    with pytest.raises(CheckpointError, match="token_map: saved '3f2a', wanted 'x'"):
        toy.toy_fit(
            tmp_path, n_steps=3, fingerprint={**toy.FINGERPRINT, "token_map": "x"}
        )


def test_a_partial_evaluation_is_not_the_final_one_of_a_rerun(tmp_path):
    options = {"n_steps": 2, "eval_every": 1}
    first = toy.toy_fit(tmp_path, max_eval_batches=1, **options)
    assert records_of(tmp_path, "eval")[-1]["n_batches"] == 1
    again = toy.toy_fit(tmp_path, max_eval_batches=None, **options)
    assert again.final == first.final and again.final["n_batches"] == 2


def test_evaluations_use_the_average(tmp_path):
    ema = Ema(
        init=lambda params: jax.tree.map(jnp.zeros_like, params),
        update=lambda ema, params, step: ema,
        merge=lambda ema, params: ema,
    )
    result = toy.toy_fit(tmp_path, n_steps=2, ema=ema)
    np.testing.assert_allclose(result.final["bpb"], np.log2(toy.V), rtol=1e-6)


def test_health_profile_and_records_are_on_disk(tmp_path):
    def health_fn(state, batch):
        return {"rows": jnp.sum(batch["weights"]), "at": state.step}

    toy.toy_fit(
        tmp_path,
        n_steps=5,
        health_fn=health_fn,
        health_every=2,
        profile_steps=(1, 3),
        log_every=2,
    )
    health = records_of(tmp_path, "health")
    assert [(r["step"], r["at"]) for r in health] == [(0, 0), (2, 2), (4, 4)]
    assert health[1]["rows"] == toy.make_batch(2)["weights"].sum()
    assert [r["step"] for r in records_of(tmp_path)] == [2, 4, 5]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_hidden_transfers_are_errors(tmp_path):
    class Hidden(toy.ToyBatches):
        def __next__(self):
            jnp.sin(np.float32(1.0))
            return super().__next__()

    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        toy.toy_fit(tmp_path, batches=Hidden())


def test_what_cannot_be_trained_is_refused_first(tmp_path):
    mesh = make_mesh(MeshConfig(data=1, tensor=2), jax.devices()[:2])
    with pytest.raises(ConfigError, match="mesh.tensor = 2.*no placement"):
        toy.toy_fit(tmp_path / "a", mesh=mesh)
    with pytest.raises(ConfigError, match="train.health_every = 3"):
        toy.toy_fit(tmp_path / "b", health_every=3)
    with pytest.raises(ConfigError, match="data.batch_size = 8.*mesh.fsdp.*3"):
        toy.toy_fit(tmp_path / "c", n_devices=3)
    short = iter([toy.make_batch(0)])
    batches = toy.ToyBatches()
    batches.__class__ = type(
        "Short", (toy.ToyBatches,), {"__next__": lambda _: next(short)}
    )
    with pytest.raises(TrainingError, match="the training data ended at step 1"):
        toy.toy_fit(tmp_path / "d", batches=batches)


@pytest.mark.multidevice
def test_eight_devices_train_like_one(whole, tmp_path):
    run_dir, result = whole
    eight = toy.toy_fit(tmp_path, n_devices=8)
    for a, b in zip(
        jax.tree.leaves(result.state.params),
        jax.tree.leaves(eight.state.params),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert eight.tokens_seen == result.tokens_seen
