"""Each command on a tiny real run: what it prints, writes and refuses."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from memjax.cli.doctor import EXTRAS
from memjax.cli.sample import readable
from memjax.cli.train import keep_test_scores
from memjax.experiment import config_hash, load_experiment, set_path
from memjax.experiment.cells import plan_cells
from memjax.experiment.definition import write_json

ROOT = Path(__file__).parents[2]


def test_show_marks_changes_and_counts_parameters(memjax, tiny_file):
    outcome = memjax("show", tiny_file, "--model.d-ff", "32")
    assert outcome.code == 0
    assert "* model.d_ff" in outcome.out and "\n  model.d_model" in outcome.out
    plain = json.loads(memjax("show", tiny_file, "--json").out)
    shapes = plain["description"]["shapes"]
    tables = {path: leaf for path, leaf in shapes.items() if leaf["label"] == "table"}
    assert [leaf["shape"] for leaf in tables.values()] == [[53 + 59, 4]]
    assert plain["description"]["params_table"] == (53 + 59) * 4
    assert plain["config"]["model"]["d_ff"] == 16


def test_train_prints_plan_changes_sample_table_and_folder(trained, trained_output):
    for text in (
        "train.n_steps: 4 -> 3",
        "dense weights: ",
        "memory tables: 448 parameters",
        "each step: 128 tokens; 3 steps",
        "a sample:",
        "store valid",
        f"run folder: runs/{trained.name}",
    ):
        assert text in trained_output, text
    start = json.loads((trained / "starts.jsonl").read_text().splitlines()[0])
    assert start["changes_to_file"] == ["train.n_steps: 4 -> 3"]


def test_p27_the_saved_config_is_the_run(memjax, trained, tiny_file):
    """The config written next to the run is the resolved one, overrides included."""
    result = json.loads((trained / "result.json").read_text())
    saved = load_experiment(trained).experiment
    overridden = set_path(load_experiment(tiny_file).experiment, "train.n_steps", 3)
    assert saved == overridden
    assert trained.name == f"tiny-{config_hash(saved)[:8]}"
    assert result["config_hash"] == config_hash(saved)
    assert result["steps"] == 3 and set(result["valid"]) == {"store"}
    other = memjax("train", tiny_file, "--run-dir", trained, "--seed", "1")
    assert other.code == 1 and "seed" in other.err and other.err.count("\n") == 1


def test_eval_valid_equals_training_and_test_is_recorded_once(memjax, finished):
    result = json.loads((finished / "result.json").read_text())
    valid = memjax("eval", finished)
    assert valid.code == 0 and f"{result['valid_bpb']:.3f}" in valid.out
    assert json.loads((finished / "result.json").read_text()) == result
    assert memjax("eval", finished, "--split", "test").code == 0
    scored = json.loads((finished / "result.json").read_text())
    assert scored["test_bpb"] > 0 and len(scored["test_scored"]) == 1
    again = memjax("eval", finished, "--split", "test")
    assert "test was scored" in again.out
    assert json.loads((finished / "result.json").read_text()) == scored
    memjax("eval", finished, "--split", "test", "--again")
    twice = json.loads((finished / "result.json").read_text())
    assert len(twice["test_scored"]) == 2 and twice["test_bpb"] == scored["test_bpb"]


def test_eval_memory_prints_tables_and_writes_only_what_it_is_asked_to(
    memjax, finished, tmp_path
):
    """The figures of the tables are those of the JSON; the run is left as it was."""

    def files():
        paths = (path for path in finished.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in paths}

    before = files()
    out = tmp_path / "out.json"
    outcome = memjax("eval", finished, "--memory", "--order", "2", "--json", out)
    assert outcome.code == 0, outcome.err
    assert files() == before
    found = json.loads(out.read_text())
    measured = found["memory"]
    assert measured["split"] == "valid" and measured["step"] == 3
    loss = measured["loss"]
    # One byte a token, and one part.
    assert loss["nats"] / math.log(2) == pytest.approx(found["valid_bpb"], rel=1e-5)
    memory = measured["memories"]["layer_0"]
    assert len(memory["collisions"]) == 2
    assert (
        sum(bucket["n_tokens"] for bucket in memory["gate"]["buckets"])
        == (loss["n_tokens"])
    )
    parts = measured["gradient_share"]
    whole = parts["backbone"] + parts["memory"] + parts["tables"]
    assert whole == pytest.approx(1) and parts["tables"] > 0
    for text in (
        "this run",
        f"{loss['nats']:.4f}",
        "loss by gate of layer_0",
        "2-gram stands in train",
        f"{memory['collisions'][1]['expected_shared_frac']:.4f}",
    ):
        assert text in outcome.out, text


def test_eval_memory_refuses_what_it_cannot_measure(memjax, trained, tiny_file):
    outcome = memjax("eval", trained, "--memory", "--order", "0")
    assert outcome.code == 1 and "order = 0 is not allowed" in outcome.err
    outcome = memjax("eval", trained, "--order", "2")
    assert outcome.code == 2 and "--order belongs to --memory" in outcome.err
    outcome = memjax("eval", tiny_file, "--sweep", "--memory")
    assert outcome.code == 2 and "not for a --sweep" in outcome.err


def test_a_rerun_keeps_the_test_score_of_the_same_step(tmp_path):
    earlier = {"steps": 3, "test_bpb": 1.0, "test_scored": ["then"], "valid_bpb": 2.0}
    for steps, kept in ((3, True), (4, False)):
        write_json(tmp_path / "result.json", {"steps": steps, "valid_bpb": 1.9})
        keep_test_scores(tmp_path, earlier)
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["valid_bpb"] == 1.9
        assert ("test_bpb" in result) == ("test_scored" in result) == kept


def test_eval_refuses_runs_that_are_not_there_or_not_finished(
    memjax, finished, tiny_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    outcome = memjax("eval", tiny_file)
    assert outcome.code == 1 and "holds no run" in outcome.err
    config = load_experiment(finished).experiment
    write_json(finished / "result.json", {"config_hash": "of fewer steps"})
    outcome = memjax("eval", finished, "--split", "test")
    assert outcome.code == 1 and "only finished runs" in outcome.err
    assert f"step {config.train.n_steps}" in outcome.err
    for spoilt in ("{", "[]"):
        (finished / "result.json").write_text(spoilt)
        outcome = memjax("eval", finished, "--split", "test")
        assert outcome.code == 1 and "result.json cannot be read" in outcome.err
    (finished / "result.json").unlink()
    outcome = memjax("eval", finished, "--split", "test")
    assert outcome.code == 1 and "only finished runs" in outcome.err
    shutil.rmtree(finished / "checkpoints")
    outcome = memjax("eval", finished)
    assert outcome.code == 1 and "holds no whole checkpoint" in outcome.err


def test_what_is_in_the_way_of_a_run_is_one_line(memjax, tiny_file, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    outcome = memjax("train", tiny_file, "--run-dir", tmp_path / "file")
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert "allowed: a folder that may be written" in outcome.err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("not a folder")
    outcome = memjax("train", tiny_file, "--run-dir", tmp_path / "run")
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert f"{tmp_path / 'run' / 'tensorboard'}: " in outcome.err
    outcome = memjax("train", tiny_file, "--run-dir", "")
    assert outcome.code == 1 and "run-dir = ''" in outcome.err


def test_sample_is_repeatable_and_checks_its_options(memjax, trained):
    words = ["sample", trained, "--prompt", "line", "--n-tokens", "8", "--seed", "3"]
    first, second = memjax(*words), memjax(*words)
    assert first == second and first.code == 0 and first.out.startswith("line")
    assert memjax("sample", trained, "--temperature", "-1").code == 1
    typed = memjax("sample", trained, "--prompt", "\udcff", "--n-tokens", "1")
    assert typed.code == 0 and typed.out.startswith("\ufffd")  # the byte 0xff
    assert "n-tokens = 0" in memjax("sample", trained, "--n-tokens", "0").err
    assert readable(b"a\x1b[31m\xff\tb\n") == "a\ufffd[31m\ufffd\tb\n"


def test_doctor_names_devices_and_extras(memjax, tiny_file):
    outcome = memjax("doctor", tiny_file)
    assert outcome.code == 0
    for text in ("jaxlib", "cpu:0", "data 8", "cache: ", "tokenizers"):
        assert text in outcome.out


def test_every_extra_with_modules_is_declared_in_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) <= set(project["optional-dependencies"])


def test_prepare_reports_bad_input_in_one_line(memjax, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good\nb\xffd\n")
    outcome = memjax("prepare", bad, "--out", tmp_path / "store")
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert "bad.txt" in outcome.err and not (tmp_path / "store").exists()
    assert "needs --out" in memjax("prepare", bad).err
    assert "kjv" in memjax("prepare", "no_such_corpus").err


def test_prepare_refuses_options_that_it_would_ignore(memjax, tiny_file, tmp_path):
    for words, option in (
        (["kjv", "--errors", "replace"], "--errors"),
        ([tiny_file, "--tokenizer", "deepseek"], "--tokenizer"),
        ([tmp_path, "--out", tmp_path / "o", "--cache-dir", tmp_path], "--cache-dir"),
    ):
        outcome = memjax("prepare", *words)
        assert outcome.code == 2 and f"{option} is " in outcome.err


def test_prepare_checks_the_hashes_of_what_it_finds(memjax, tiny_file, tmp_path):
    store = shutil.copytree(tiny_file.parent / "store", tmp_path / "store")
    file = tmp_path / "copy.py"
    file.write_text(
        tiny_file.read_text().replace(str(tiny_file.parent / "store"), str(store))
    )
    words = ["prepare", file]
    assert memjax(*words).code == 0
    shard = store / "test" / "tokens-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    outcome = memjax(*words)
    assert outcome.code == 1 and f"{shard} is damaged" in outcome.err


def test_table_from_result_files(memjax, tiny_file, tmp_path):
    loaded = load_experiment(tiny_file)
    cells = plan_cells(loaded.experiment, loaded.sweep, tmp_path)
    for cell, bpb in zip(cells, (2.0, 2.2, 1.5, 1.6), strict=True):
        result = {"valid_bpb": bpb, "config_hash": config_hash(cell.experiment)}
        write_json(cell.run_dir / "result.json", result)
    outcome = memjax("table", tiny_file, "--run-dir", tmp_path)
    assert outcome.code == 0 and "-0.5500" in outcome.out and "+-0.6353" in outcome.out
    rows = json.loads(memjax("table", tiny_file, "--run-dir", tmp_path, "--json").out)
    assert rows[1]["by_seed"] == {"0": 1.5, "1": 1.6}
    bad = memjax("table", tiny_file, "--run-dir", tmp_path, "--metric", "bpb")
    assert bad.code == 1 and "valid_bpb" in bad.err
    assert memjax("table", tiny_file, "--run-dir", tmp_path / "none").code == 1
    axis = memjax("table", tiny_file, "--run-dir", tmp_path, "--seed", "1")
    assert axis.code == 1 and "is an axis" in axis.err
    longer = memjax("table", tiny_file, "--run-dir", tmp_path, "--train.n-steps", "9")
    assert longer.code == 1


def test_p27_a_sweep_cell_trains_from_its_saved_config_and_then_not_again(
    memjax, tiny_file, tmp_path, trained
):
    """A run started from a saved config alone repeats the run of the file."""
    words = ["sweep", tiny_file, "--run-dir", tmp_path, "--train.n-steps", "3"]
    words += ["--only", "memories=on,seed=0"]  # the settings that config() has
    listed = memjax(*words, "--dry-run")
    assert listed.code == 0 and listed.out.startswith("new")
    first = memjax(*words)
    assert first.code == 0 and "1 finished, " in first.out
    (folder,) = tmp_path.iterdir()
    ours, theirs = (
        json.loads((run / "result.json").read_text()) for run in (folder, trained)
    )
    assert ours["config_hash"] == theirs["config_hash"]
    # One device there, eight simulated ones here: sums are rounded differently.
    assert ours["valid_bpb"] == pytest.approx(theirs["valid_bpb"], abs=1e-4)
    assert "1 finished before" in memjax(*words).out


def test_a_failing_cell_is_reported_and_names_its_log(memjax, tiny_file, tmp_path):
    file = tmp_path / "broken.py"
    text = tiny_file.read_text().replace(str(tiny_file.parent / "store"), "no_corpus")
    file.write_text(text)
    words = ["sweep", file, "--run-dir", tmp_path / "runs", "--only", "off,seed=0"]
    outcome = memjax(*words)
    assert outcome.code == 1 and "1 failed" in outcome.out
    log = outcome.err.split("failed: ")[1].strip()
    with open(log) as lines:
        assert "no_corpus" in lines.read()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_sigterm_stops_a_sweep_and_the_run_goes_on_later(tiny_file, tmp_path):
    words = [sys.executable, "-m", "memjax.cli.main", "sweep", str(tiny_file)]
    words += ["--run-dir", str(tmp_path), "--only", "memories=off,seed=0"]
    words += ["--train.n-steps", "1000000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not list(tmp_path.glob("*/metrics.jsonl")):
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0 and "1 stopped" in out
    (folder,) = tmp_path.iterdir()
    assert not (folder / "result.json").exists()
    assert list((folder / "checkpoints").iterdir())
