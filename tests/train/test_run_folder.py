"""The run folder: what is written, what is refused."""

import json
import os
import subprocess

import pytest

from memjax.errors import ConfigError, TrainingError
from memjax.train import run_folder
from memjax.train.run_folder import open_run_folder, versions, write_result

CONFIG = {
    "model": {"d_model": 128, "memories": [{"n_heads": 8}, {"n_heads": 4}]},
    "train": {"n_steps": 10, "accumulate_steps": 1},
    "seed": 0,
}


def with_changes(**changes):
    config = json.loads(json.dumps(CONFIG))
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = config
        for name in parents:
            node = node[int(name)] if isinstance(node, list) else node[name]
        node[last] = value
    return config


def starts_of(path):
    return [
        json.loads(line) for line in (path / "starts.jsonl").read_text().splitlines()
    ]


def test_what_a_run_needs_to_be_repeated_is_written(tmp_path):
    path = open_run_folder(
        tmp_path / "a" / "b", config=CONFIG, changes=["seed: 1 -> 0"]
    )
    assert path.is_absolute()
    assert json.loads((path / "config.json").read_text()) == CONFIG
    (start,) = starts_of(path)
    assert start["changes_to_file"] == ["seed: 1 -> 0"]
    assert start["versions"] == versions()
    assert set(versions()) >= {"python", "memjax", "jax", "flax", "optax", "numpy"}
    assert start["prng"] == "threefry2x32"
    assert start["devices"] == {"cpu cpu": 8}


def test_a_rerun_appends_and_may_change_how_long_it_trains(tmp_path):
    open_run_folder(tmp_path, config=CONFIG)
    longer = with_changes(train__n_steps=25)
    open_run_folder(tmp_path, config=longer)
    assert json.loads((tmp_path / "config.json").read_text()) == longer
    first, second = starts_of(tmp_path)
    assert first["changes_to_last_start"] == []
    assert second["changes_to_last_start"] == ["train.n_steps: 10 there, 25 now"]


def test_another_config_is_refused_by_field(tmp_path):
    open_run_folder(tmp_path, config=CONFIG)
    other = with_changes(
        model__memories__1__n_heads=2, train__accumulate_steps=2, train__n_steps=5
    )
    with pytest.raises(TrainingError) as caught:
        open_run_folder(tmp_path, config=other)
    message = str(caught.value)
    assert "model.memories.1.n_heads: 4 there, 2 now" in message
    assert "train.accumulate_steps: 1 there, 2 now" in message
    assert "n_steps" not in message and "\n" not in message
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    assert len(starts_of(tmp_path)) == 1


def test_fewer_steps_than_the_checkpoint_change_nothing(tmp_path):
    """A refused rerun must not become the config that the folder holds."""
    open_run_folder(tmp_path, config=CONFIG, n_steps=10)
    step = tmp_path / "checkpoints" / "8"
    for item in ("", "params", "rest", "data", "meta"):
        (step / item).mkdir(parents=True, exist_ok=True)
        (step / item / "commit_success.txt").touch()
    with pytest.raises(ConfigError, match=r"^train\.n_steps = 7 .* at least 8"):
        open_run_folder(tmp_path, config=with_changes(train__n_steps=7), n_steps=7)
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    assert len(starts_of(tmp_path)) == 1
    open_run_folder(tmp_path, config=with_changes(train__n_steps=8), n_steps=8)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="run folder .*file/run cannot be used"):
        open_run_folder(tmp_path / "file" / "run", config=CONFIG)
    for spoilt in (b"{", b"[]", b"\xff"):
        (tmp_path / "config.json").write_bytes(spoilt)
        with pytest.raises(TrainingError, match=r"config.json is not JSON"):
            open_run_folder(tmp_path, config=CONFIG)
    (tmp_path / "config.json").unlink()
    (tmp_path / "starts.jsonl").write_bytes(b"\xff\n")  # spoilt, and not in the way
    open_run_folder(tmp_path, config=CONFIG)
    assert len((tmp_path / "starts.jsonl").read_bytes().splitlines()) == 2


def test_commit_and_changes_on_top_of_it_replay(tmp_path):
    root = tmp_path / "checkout"
    root.mkdir()
    assert run_folder._checkout(root) == (None, "")

    def git(*args, **how):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", "-C", str(root), *who, *args],
            check=True,
            capture_output=True,
            text=True,
            **how,
        ).stdout

    git("init", "-q")
    (root / "code.py").write_text("one\n")
    git("add", "code.py")
    git("commit", "-qm", "first")
    commit, patch = run_folder._checkout(root)
    assert commit == git("rev-parse", "HEAD").strip() and patch == ""
    (root / "code.py").write_text("two\n")
    (root / "new.py").write_text("three\n")
    commit, patch = run_folder._checkout(root)
    git("checkout", "-q", "code.py")
    os.remove(root / "new.py")
    git("apply", "-", input=patch)
    assert (root / "code.py").read_text() == "two\n"
    assert (root / "new.py").read_text() == "three\n"


def test_a_result_is_written_in_one_piece(tmp_path):
    write_result(tmp_path, {"valid_bpb": 1.5})
    assert json.loads((tmp_path / "result.json").read_text()) == {"valid_bpb": 1.5}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
