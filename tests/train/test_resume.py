"""Killed runs: nothing is lost, nothing is seen twice."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def run_toy(run_dir, n_steps, pause_s, *processes, n_devices=1):
    root = Path(toy.__file__).parents[2]
    arguments = [str(x) for x in (run_dir, n_steps, pause_s, *processes)]
    return subprocess.Popen(
        [sys.executable, toy.__file__, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={n_devices}",
        },
    )


def wait_for_records(run_dir, n, process):
    path = run_dir / "metrics.jsonl"
    limit = time.monotonic() + 120
    while not path.exists() or len(records_of(run_dir)) < n:
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)


def test_a_kill_at_a_random_step_changes_nothing(tmp_path):
    """SIGKILL, rerun: the same losses as hex floats, the same final parameters."""
    n_steps = 24
    whole = run_toy(tmp_path / "whole", n_steps, 0)
    killed = run_toy(tmp_path / "killed", n_steps, 0.05)
    kill_at = random.Random(os.getpid()).randint(4, 20)
    wait_for_records(tmp_path / "killed", kill_at, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    reached = max(r["step"] for r in records_of(tmp_path / "killed"))
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


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_pair(run_dir, n_steps, pause_s):
    """Two processes with two devices each."""
    address = f"127.0.0.1:{free_port()}"
    return [
        run_toy(run_dir, n_steps, pause_s, address, i, 2, n_devices=2) for i in range(2)
    ]


@pytest.mark.slow
def test_all_processes_stop_at_the_same_step(tmp_path):
    """SIGTERM to the second of two; both save one checkpoint; a rerun goes on."""
    pair = run_pair(tmp_path / "pair", 16, 0.1)
    wait_for_records(tmp_path / "pair", 3, pair[0])
    pair[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=120)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    stopped = [output.splitlines()[-1] for output in outputs]
    assert stopped[0] == stopped[1]
    step = int(stopped[0].split()[-1])
    assert 3 <= step < 16
    assert f"SIGTERM: saved at step {step}; rerun to go on" in outputs[0]
    assert "SIGTERM" not in outputs[1], "one process speaks"

    pair = run_pair(tmp_path / "pair", 16, 0)
    outputs = [process.communicate(timeout=120)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    single = run_toy(tmp_path / "single", 16, 0, n_devices=4)
    single.communicate(timeout=120)
    pairs = [
        (a["step"], a["loss"], b["loss"], a["tokens_seen"] == b["tokens_seen"])
        for a, b in zip(
            records_of(tmp_path / "pair"), records_of(tmp_path / "single"), strict=True
        )
    ]
    assert [step for step, *_ in pairs] == list(range(1, 17))
    for _, ours, theirs, same_tokens in pairs:
        assert ours == pytest.approx(theirs, rel=1e-5) and same_tokens
