"""Checkpoints that cannot be written: what is said, and what stays."""

import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from memjax.errors import CheckpointError
from memjax.train.checkpoint import Checkpoints, whole_steps
from tests.train.saved_states import FINGERPRINT, params_of, save, state_of


def random_params(n=200_000):
    rng = np.random.default_rng(0)
    return {"weights": rng.standard_normal(n, dtype=np.float32)}


def test_a_writer_that_fails_is_told_in_words_and_the_last_stays(tmp_path):
    """Files may not grow beyond 64 KiB, as on a disk that is full."""
    resource = pytest.importorskip("resource")
    save(tmp_path, 1)
    state = state_of(random_params(), 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with (
            pytest.raises(CheckpointError) as caught,
            Checkpoints(tmp_path) as checkpoints,
        ):
            checkpoints.save(state, data={}, fingerprint=FINGERPRINT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"cannot be written to {tmp_path}: ValueError:" in str(caught.value)
    assert "File too large" in str(caught.value)
    assert "goes on from the last whole checkpoint (step 1)" in str(caught.value)
    assert whole_steps(tmp_path) == [1]
    save(tmp_path, 2, random_params())
    assert whole_steps(tmp_path) == [1, 2]


def test_a_disk_without_room_is_noticed_before(tmp_path, monkeypatch):
    """For one as large as the last, or for half of the parameters of the first."""
    usage = shutil.disk_usage(tmp_path)

    def little(path):
        return usage._replace(free=99_999)

    monkeypatch.setattr(shutil, "disk_usage", little)
    with pytest.raises(CheckpointError, match="99999 bytes are free, .* are 800000"):
        save(tmp_path, 1, random_params())
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    save(tmp_path, 1, random_params())
    monkeypatch.setattr(shutil, "disk_usage", little)
    with pytest.raises(CheckpointError, match=r"99999 bytes are free, .*, took 7\d{5}"):
        save(tmp_path, 2, random_params())
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    # Some file systems say of all that it is nothing.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0))
    save(tmp_path, 2, random_params())
    assert whole_steps(tmp_path) == [1, 2]


def test_room_is_asked_for_when_the_save_before_is_done(tmp_path, monkeypatch):
    """Its unfinished folder and the step that it replaces take room meanwhile."""
    asked = []
    usage = shutil.disk_usage(tmp_path)

    def seen(path):
        asked.append(sorted(folder.name for folder in Path(path).iterdir()))
        return usage

    monkeypatch.setattr(shutil, "disk_usage", seen)
    states = [state_of(random_params(1_000_000), step) for step in (1, 2, 3)]
    with Checkpoints(tmp_path, keep_last=1, keep_best=False) as checkpoints:
        for state in states:
            checkpoints.save(state, data={}, fingerprint=FINGERPRINT)
    assert asked == [[], ["1"], ["2"]]


def test_a_folder_that_cannot_be_written(tmp_path):
    """A file is in its place; the next save is a good one."""
    directory = tmp_path / "checkpoints"
    state = state_of(params_of(), 1)
    with Checkpoints(directory) as checkpoints:
        directory.rmdir()
        directory.touch()
        with pytest.raises(CheckpointError, match="cannot be written .*: File exists"):
            checkpoints.save(state, data={}, fingerprint=FINGERPRINT)
        directory.unlink()
        checkpoints.save(state, data={}, fingerprint=FINGERPRINT)
    assert whole_steps(directory) == [1]


@pytest.fixture
def failing_writer(monkeypatch):
    """What waits for the writer fails as it does on a full disk."""

    def fail(manager):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", fail)


def test_the_error_before_stays_and_the_writer_is_noted(tmp_path, failing_writer):
    with pytest.raises(KeyError, match="mine") as caught, Checkpoints(tmp_path):
        raise KeyError("mine")
    (note,) = caught.value.__notes__
    assert "No space left" in note
    with pytest.raises(CheckpointError, match="No space left"):
        Checkpoints(tmp_path).close()


def test_where_the_newest_is_can_be_said_when_the_writer_failed(
    tmp_path, failing_writer
):
    text = Checkpoints(tmp_path).describe_newest()
    assert "No space left" in text and "it starts anew" in text


def test_errors_that_are_not_the_writers_stay_as_they_are(tmp_path, monkeypatch):
    """The best is the best of those that are there, also after a failed save."""
    save(tmp_path, 1, bpb=2.0)

    def mistaken(manager, *args, **kwargs):
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(ocp.CheckpointManager, "save", mistaken)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(KeyError, match="a mistake"):
            checkpoints.save(
                state_of(params_of(), 2), data={}, fingerprint=FINGERPRINT, bpb=1.0
            )
        assert (checkpoints.best_step, checkpoints.best_bpb) == (1, 2.0)
