"""Hooks: what is printed, what is recorded, and the clock behind both."""

import io
import json

import pytest

from memjax.train.clock import Clock
from memjax.train.hooks.base import Every, Hook, StepInfo
from memjax.train.hooks.progress import Progress, duration
from memjax.train.hooks.record import Recorder, read_records
from tests.train.event_reader import read_events


def info(step, n_steps=20, rates=None, **values):
    return StepInfo(
        step,
        n_steps,
        {"loss": 1.5, "bpb": 2.1640425, **values},
        200.0 if "tokens_per_s" in values else None,
        lambda: {"": 0.01} if rates is None else rates,
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_when_not_a_terminal():
    stream = io.StringIO()
    progress = Progress(10, stream=stream)
    for step in range(1, 21):
        progress.on_step(info(step, tokens_per_s=12345.6))
    progress.on_event("eval", 20, {"bpb": 2.0})
    progress.on_event("health", 20, {"rows": 3.0})
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "10/20", "20/20", "20"]
    assert lines[1] == (
        "step 10/20   50%  loss 2.1640 BPB  12,346 tokens/s  ETA 3m20s  lr 0.01"
    )
    assert lines[3] == "step 20  valid 2.0000 BPB"
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_one_line_that_rewrites_itself_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream, times = Terminal(), iter([0.0, 0.0, 0.1, 0.3, 0.3, 0.35, 0.35])
    progress = Progress(10, stream=stream, now=lambda: next(times))
    for step in (1, 2, 3, 20):
        progress.on_step(info(step, rates={"dense": 0.1, "table": 0.2}))
    progress.on_message("stopped")
    progress.close()
    drawn = stream.getvalue().split("\r")[1:]
    assert [text.split()[1] for text in drawn] == ["1/20", "3/20", "20/20"]
    assert drawn[0] == (
        "step 1/20    5%  loss 2.1640 BPB  lr dense 0.1  lr table 0.2\x1b[K"
    )
    assert stream.getvalue().endswith("\x1b[K\nstopped\n")
    monkeypatch.setenv("COLUMNS", "30")  # a line that wraps could not be rewritten
    narrow = Terminal()
    Progress(10, stream=narrow).on_step(info(1, rates={"dense": 0.1, "table": 0.2}))
    assert narrow.getvalue() == "\rstep 1/20    5%  loss 2.1640 \x1b[K"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (7500, "2h05m")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_every_passes_each_nth_step_the_last_and_all_events():
    class Seen(Hook):
        def __init__(self):
            self.steps, self.events = [], []

        def on_step(self, info):
            self.steps.append(info.step)

        def on_event(self, kind, step, values):
            self.events.append((kind, step))

    seen = Seen()
    every = Every(3, seen)
    for step in range(1, 9):
        every.on_step(info(step, n_steps=8))
    every.on_event("eval", 4, {})
    assert seen.steps == [3, 6, 8]
    assert seen.events == [("eval", 4)]


def test_records_are_exact_and_in_both_files(tmp_path):
    recorder = Recorder(tmp_path, now=lambda: 5.0)
    recorder.on_step(info(1, loss=0.1, rates={"table": 0.5, "dense": 0.25}))
    recorder.on_event("eval", 1, {"bpb": 2.5})
    recorder.close()
    train, evaluation = read_records(tmp_path / "metrics.jsonl")
    assert float.fromhex(train["loss_hex"]) == 0.1
    assert train["learning_rate/table"] == 0.5
    assert evaluation == {"kind": "eval", "step": 1, "time": 5.0, "bpb": 2.5}
    events = read_events(tmp_path / "tensorboard")
    assert [step for step, _ in events] == [1, 1]
    assert events[0][1]["train/learning_rate/dense"] == 0.25
    assert events[1][1] == {"eval/bpb": 2.5}


def test_a_restart_cuts_back_to_what_the_checkpoint_knew(tmp_path):
    """Lines spoilt by a kill, and records after the save of the restored step."""
    kept = [
        {"kind": "train", "step": 9, "time": 1.0, "loss": 1.0},
        {"kind": "train", "step": 10, "time": 2.0, "loss": 1.0},
        {"kind": "eval", "step": 10, "time": 3.0, "bpb": 1.0},
    ]
    dropped = [
        {"kind": "health", "step": 10, "time": 4.0, "rows": 7.0},
        {"kind": "final", "step": 10, "time": 4.0, "bpb": 1.0},
        {"kind": "train", "step": 11, "time": 5.0, "loss": 1.0},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in kept + dropped)
    path = tmp_path / "metrics.jsonl"
    spoilt = b'[]\n{"kind": "train", "step": "x", "time": 1.0}\n\xff\0\n{"kind": "tra'
    path.write_bytes(lines.encode() + spoilt)
    Recorder(tmp_path, restored_step=10).close()
    assert read_records(path) == kept
    assert [s for s, _ in read_events(tmp_path / "tensorboard")] == [9, 10, 10]


def test_the_clock_leaves_out_pauses_and_compiling():
    now = iter([100.0, 102.0, 110.0, 150.0, 154.0])
    clock = Clock(train_s=7.0, now=lambda: next(now))
    assert clock.step_s is None and clock.tokens_per_s is None
    clock.step_done(50)  # 100: the step that compiled
    clock.step_done(50)  # 102
    with clock.paused():  # 110 to 150
        pass
    clock.step_done(90)  # 154: 12 active seconds later
    assert clock.train_s == 7.0 + 2.0 + 12.0
    assert clock.step_s == 7.0
    assert clock.tokens_per_s == 10.0
