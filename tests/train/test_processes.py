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


def result(run_dir):
    """Bits per byte of the finished run."""
    return json.loads((run_dir / "result.json").read_text())["valid_bpb"]


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


@pytest.mark.slow
def test_a_run_wanders_over_devices_and_processes(experiment, whole, tmp_path):
    """4 devices, 2 processes x 1, 2 devices, 1 device, 2 x 2: one run of 8 steps."""
    run_dir = tmp_path / "run"
    words = ("train", experiment, "--run-dir", run_dir, "--no-sample")
    told = "import signal; os.kill(os.getpid(), signal.SIGTERM)"
    for stop, n_processes, n_devices in ((2, 1, 4), (3, 2, 1), (5, 1, 2), (6, 1, 1)):
        before = commands.patch(failing=stop, action=told)
        if n_processes == 1:
            started = [commands.start(*words, n_devices=n_devices, before=before)]
        else:
            started = commands.start_pair(
                *words, n_devices=n_devices, before=(before, "")
            )
        for code, _, err in commands.finish(started):
            assert code == 0, err
    for code, _, err in commands.finish(commands.start_pair(*words)):
        assert code == 0, err
    lines = (run_dir / "starts.jsonl").read_text().splitlines()
    counts = [json.loads(line)["n_processes"] for line in lines]
    assert counts == [1, 2, 1, 1, 2]
    assert_same_losses(run_dir, whole, range(1, 9))
    assert result(run_dir) == pytest.approx(result(whole), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        ("--mesh.data", 1, "--mesh.table", 4),
        ("--mesh.data", 1, "--mesh.table", 4, "--mesh.table-by", "columns"),
        ("--mesh.data", 2, "--mesh.table", 2),
        ("--mesh.data", 1, "--mesh.fsdp", 2, "--mesh.tensor", 2),
        # Both processes hold all rows of the batch here.
        (
            *("--mesh.data", 1, "--mesh.tensor", 4),
            *("--model.n-heads", 4, "--model.n-kv-heads", 4),
        ),
    ],
)
def test_tables_and_weights_are_divided_over_processes(experiment, tmp_path, mesh):
    """Processes hold parts of a table or a weight, and the same rows of the batch."""
    words = ("train", experiment, "--no-sample", "--train.n-steps", 4, *mesh)
    words += ("--model.memories.0.table-mode", "rows")
    started = [
        commands.start(*words, "--run-dir", tmp_path / "one", n_devices=4),
        *commands.start_pair(*words, "--run-dir", tmp_path / "two"),
    ]
    for code, _, err in commands.finish(started):
        assert code == 0, err
    assert_same_losses(tmp_path / "two", tmp_path / "one", range(1, 5))
    assert result(tmp_path / "two") == pytest.approx(result(tmp_path / "one"), rel=1e-6)


@pytest.mark.slow
def test_different_experiments_and_folders_are_refused(experiment, tmp_path):
    address = f"127.0.0.1:{commands.free_port()}"
    words = ("train", experiment, "--coordinator", address, "--num-processes", 2)
    first = commands.start(*words, "--process-id", 0, "--run-dir", tmp_path / "a")
    second = commands.start(
        *words, "--process-id", 1, "--run-dir", tmp_path / "a", "--seed", 3
    )
    for code, _, err in commands.finish([first, second]):
        assert code == 1
        assert "seed: 0 in process 0, 3 in process 1" in err
    assert not (tmp_path / "a").exists(), "nothing was begun"


@pytest.mark.slow
def test_a_process_that_never_comes_is_said_in_time(experiment, tmp_path):
    for process in (0, 1):
        address = f"127.0.0.1:{commands.free_port()}"
        words = ("train", experiment, "--run-dir", tmp_path / "run")
        words += ("--coordinator", address, "--num-processes", 2)
        alone = commands.start(*words, "--process-id", process, "--start-timeout", 5)
        ((code, _, err),) = commands.finish([alone])
        assert code == 1
        assert f"not all processes met at {address} within 5 s" in err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other(experiment, tmp_path, victim):
    """SIGKILL leaves no word; jax notices by the heartbeat and says who is missing."""
    run_dir = tmp_path / "run"
    before = ["", ""]
    before[victim] = commands.patch(failing=5, action="os.kill(os.getpid(), 9)")
    words = ("train", experiment, "--run-dir", run_dir, "--heartbeat-timeout", 10)
    ended = commands.finish(commands.start_pair(*words, before=before))
    code, _, err = ended[1 - victim]
    assert ended[victim][0] == -9 and code not in (0, None)
    assert "another" in err and "died" in err
    assert whole_steps(run_dir / "checkpoints")[-1] >= 2


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


@pytest.mark.slow
def test_two_processes_score_as_one(whole):
    """`memjax eval` on valid and on test; one of them prints and writes."""
    for split in ("valid", "test"):
        words = ("eval", whole, "--split", split)
        before = json.loads((whole / "result.json").read_text())
        pair = commands.finish(commands.start_pair(*words))
        assert [code for code, _, _ in pair] == [0, 0], pair
        assert "bits per byte" in pair[0][1] and pair[1][1] == ""
        if split == "valid":
            assert f"{before['valid_bpb']:.3f}" in pair[0][1]
        else:
            after = json.loads((whole / "result.json").read_text())
            assert len(after["test_scored"]) == 1
    ended = commands.finish(commands.start_pair("eval", whole, "--memory"))
    assert [code for code, _, _ in ended] == [2, 2]
