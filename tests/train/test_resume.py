"""Killed runs: nothing is lost, nothing is seen twice."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memjax.train.hooks.record import read_records
from tests.train import toy
from tests.train.event_reader import read_events
from tests.train.test_loop import records_of


class CrashError(Exception):
    pass


class CrashingBatches(toy.ToyBatches):
    """Stands for a kill: step 21 is never taken."""

    def __next__(self):
        if self.index == 20:
            raise CrashError
        return super().__next__()


def test_p28_resumed_logs_hold_every_step_once(tmp_path):
    """P28: to step 20, checkpoint at 10, kill, resume from 10 to 25."""
    with pytest.raises(CrashError):
        toy.toy_fit(tmp_path, n_steps=25, save_every=10, batches=CrashingBatches())
    os.rename(tmp_path / "checkpoints" / "20", tmp_path / "lost")
    # The last metrics before the kill were still in flight, the others are there.
    first = {r["step"]: r for r in records_of(tmp_path)}
    assert sorted(first) == list(range(1, 21))

    resumed_at = time.time()
    result = toy.toy_fit(tmp_path, n_steps=25, save_every=10)
    records = records_of(tmp_path)
    assert [r["step"] for r in records] == list(range(1, 26))
    for record in records:
        step = record["step"]
        assert (record["time"] >= resumed_at) == (step > 10), "resumed values from 11"
        if step <= 20:
            assert record["loss_hex"] == first[step]["loss_hex"]
            assert record["tokens_seen"] == first[step]["tokens_seen"]
        assert record["learning_rate"] == toy.rate(step - 1)

    events = read_events(tmp_path / "tensorboard")
    train = [(step, values) for step, values in events if "train/loss" in values]
    assert [step for step, _ in train] == list(range(1, 26))
    for (_, values), record in zip(train, records, strict=True):
        assert values["train/loss"] == pytest.approx(record["loss"], rel=1e-6)
        assert values["train/tokens_seen"] == record["tokens_seen"]
    seen = [record["tokens_seen"] for record in records]
    assert seen == sorted(seen) and seen[-1] == result.tokens_seen


def test_p28_throughput_does_not_count_the_time_before_the_restart(tmp_path):
    """P28: seconds of training go on from the checkpoint, not from the first start."""
    toy.toy_fit(tmp_path, n_steps=4)
    before = records_of(tmp_path)[-1]["train_s"]
    time.sleep(1.0)
    start = time.monotonic()
    toy.toy_fit(tmp_path, n_steps=8)
    took = time.monotonic() - start
    after = {r["step"]: r for r in records_of(tmp_path)}
    assert after[5]["train_s"] == before, "the first step of a process compiles"
    assert "tokens_per_s" not in after[5]
    for step in (6, 7, 8):
        assert before < after[step]["train_s"] < before + took
        assert after[step]["tokens_per_s"] * (after[step]["train_s"] - before) > 20


def run_toy(run_dir, n_steps, pause_s):
    root = Path(toy.__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, toy.__file__, str(run_dir), str(n_steps), str(pause_s)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
    )


def test_a_kill_at_a_random_step_changes_nothing(tmp_path):
    """SIGKILL, rerun: the same losses as hex floats, the same final parameters."""
    n_steps = 24
    whole = run_toy(tmp_path / "whole", n_steps, 0)
    killed = run_toy(tmp_path / "killed", n_steps, 0.05)
    kill_at = random.Random(os.getpid()).randint(4, 20)
    path = tmp_path / "killed" / "metrics.jsonl"
    limit = time.monotonic() + 120
    while not path.exists() or len(records_of(path.parent)) < kill_at:
        assert killed.poll() is None and time.monotonic() < limit
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    reached = max(r["step"] for r in read_records(path))
    assert reached < n_steps, "it was killed before the end"

    expected = whole.communicate(timeout=120)[0].splitlines()[-1]
    rerun = run_toy(tmp_path / "killed", n_steps, 0)
    output = rerun.communicate(timeout=120)[0]
    assert whole.returncode == rerun.returncode == 0
    assert output.splitlines()[-1] == expected
    assert f"step {n_steps}" in expected
    losses = [
        [(r["step"], r["loss_hex"]) for r in records_of(tmp_path / name)]
        for name in ("whole", "killed")
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == list(range(1, n_steps + 1))
