"""`memjax train` in several processes: one run, whoever computes it."""

import json
import time

import pytest

from memjax.train.checkpoint import whole_steps
from tests.train import commands


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return commands.write_experiment(tmp_path_factory.mktemp("experiment"))


@pytest.fixture(scope="module")
def whole(experiment, tmp_path_factory):
    """The run of one process with four devices, eight steps."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    started = commands.start("train", experiment, "--run-dir", run_dir, n_devices=4)
    ((code, out, err),) = commands.finish([started])
    assert code == 0, err
    return run_dir


def losses(run_dir):
    """{step: loss} of the training records."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = {r["step"]: r["loss"] for r in records if r.get("loss_hex")}
    assert found
    return found


def assert_same_losses(run_dir, other, steps):
    ours, theirs = losses(run_dir), losses(other)
    assert list(ours) == list(steps)
    for step in steps:
        assert ours[step] == pytest.approx(theirs[step], rel=1e-6), step


def test_two_processes_train_as_one_and_one_goes_on(experiment, whole, tmp_path):
    """2 x 2 devices until process 1 is told to stop, then 1 x 2: as 1 x 4 devices."""
    words = ("train", experiment, "--run-dir", tmp_path / "run")
    told = "import signal; os.kill(os.getpid(), signal.SIGTERM)"
    pair = commands.start_pair(
        *words,
        *("--stopped-code", 75),
        before=("", commands.patch(failing=3, action=told)),
    )
    (code, out, err), (other_code, other_out, other_err) = commands.finish(pair)
    assert (code, other_code) == (75, 75), err + other_err
    assert out.endswith("SIGTERM: saved at step 5; rerun to go on")
    assert other_out == "" and other_err == "", "process 0 speaks for all"
    assert_same_losses(tmp_path / "run", whole, range(1, 6))
    starts = (tmp_path / "run" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["n_processes"] for line in starts] == [2]

    ((code, out, err),) = commands.finish([commands.start(*words, n_devices=2)])
    assert code == 0, err
    assert "resumed at step 5 of 8" in out
    assert_same_losses(tmp_path / "run", whole, range(1, 9))


def test_one_failing_process_ends_all_with_its_message(experiment, tmp_path):
    """Process 1 loses its disk in step 5; what was saved is whole."""
    run_dir = tmp_path / "run"
    began = time.monotonic()
    pair = commands.start_pair(
        *("train", experiment, "--run-dir", run_dir),
        before=("", commands.patch(failing=5)),
    )
    (code, _, err), (other_code, _, other_err) = commands.finish(pair)
    assert (code, other_code) == (1, 1)
    assert "OSError: no such disk" in other_err
    assert "process 1 ended: no such disk" in err
    assert "the same command goes on from the newest checkpoint" in err
    assert time.monotonic() - began < 60, "nobody waits for a time limit"
    assert whole_steps(run_dir / "checkpoints")[:2] == [2, 4]
