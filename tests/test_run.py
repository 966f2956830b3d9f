"""Real runs of the real model: killed and rerun, refused checkpoints, bad machines.

What: the whole stack on a few lines of own text, in seconds.
Why: the floors are tested alone; here they meet.
When not: the command line's words and output; tests/cli has that.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from memjax.build.sizes import describe
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.pipeline import prepare
from memjax.data.prepare import prepare_text
from memjax.errors import CheckpointError, ConfigError, DataError, TrainingError
from memjax.experiment import Experiment, override, save
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.optim.config import OptimConfig
from memjax.run import evaluate, load_run, sample, train
from memjax.train.config import TrainConfig

MEMORY = EngramConfig(
    layers=(0,), orders=(2, 3), n_heads=1, rows_per_head=50, row_width=4, kernel_size=0
)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Eight steps of a one-block model with a memory, an average and dropout."""
    folder = tmp_path_factory.mktemp("text")
    text = folder / "notes.txt"
    text.write_text("".join(f"line {n} of the notes\n" for n in range(60)))
    prepare_text([text], folder / "store")
    return Experiment(
        name="tiny",
        model=ModelConfig(
            n_layers=1,
            d_model=16,
            n_heads=2,
            n_kv_heads=2,
            d_ff=16,
            dropout=0.1,
            scan_layers=False,
            memories=(dataclasses.replace(MEMORY, dropout=0.2),),
        ),
        data=DataConfig(
            corpora=(CorpusConfig(name=str(folder / "store")),),
            context=16,
            batch_size=8,
            eval_stride=16,
            eval_batch_size=8,
        ),
        optim=OptimConfig(ema_decay=0.9),
        train=TrainConfig(n_steps=8, eval_every=4, save_every=2, log_every=1),
    )


@pytest.fixture(scope="module")
def trained(experiment, tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    return folder, train(experiment, folder)


def recorded(folder):
    """Losses of the run by step, as hex floats, and a hash of its last parameters."""
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {x["step"]: x["loss_hex"] for x in lines if "loss_hex" in x}
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(load_run(folder)[1]):
        digest.update(np.asarray(leaf).tobytes())
    return losses, digest.hexdigest()


def command(experiment, folder):
    """The command line of a training process on one device."""
    file = save(experiment, folder.with_suffix(".json"))
    words = [sys.executable, "-m", "memjax.cli.main", "train", str(file)]
    return [*words, "--run-dir", str(folder), "--no-sample"]


def test_a_killed_run_ends_like_one_that_was_not(experiment, tmp_path):
    """SIGKILL at a random moment of training, then the same command again."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jit"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment.pop("XLA_FLAGS", None)
    experiment = override(experiment, [("train.n_steps", 40)])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(experiment, whole), env=environment, check=True)
    wanted = recorded(whole)
    assert sorted(wanted[0]) == list(range(1, 41))

    kill_after = int(np.random.default_rng().integers(3, 38))
    with subprocess.Popen(command(experiment, killed), env=environment) as process:
        metrics = killed / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and f'"step": {kill_after},' in metrics.read_text():
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "the run ended before the kill"
    subprocess.run(command(experiment, killed), env=environment, check=True)
    assert recorded(killed) == wanted, f"killed after step {kill_after}"
    starts = (killed / "starts.jsonl").read_text().splitlines()
    assert len(starts) == 2


def test_training_lowers_the_loss_and_scores_every_byte(trained, experiment):
    folder, result = trained
    assert result["steps"] == 8
    assert 0 < result["valid_bpb"] < 8.1
    assert json.loads((folder / "result.json").read_text()) == result
    scored = evaluate(folder)
    np.testing.assert_allclose(scored["valid_bpb"], result["valid_bpb"], rtol=1e-6)
    other = evaluate(folder, step=6)
    assert other["step"] == 6
    assert other["valid_bpb"] != scored["valid_bpb"]


def test_the_bits_per_byte_are_those_of_a_plain_loop(trained, experiment):
    """One document at a time, one window, no batching: the same sum of bits."""
    folder, result = trained
    parts, params, _ = load_run(folder)
    prepared = prepare(experiment.data)
    store = prepared.store(prepared.parts[0].name, "valid")
    nats, n_bytes = 0.0, 0
    for document in store:
        ids = np.concatenate([[256], np.asarray(document)]).astype(np.int32)
        assert len(ids) <= 33, "the loop below has no context rule"
        for start in range(0, len(ids) - 1, 16):
            window = ids[start : start + 17]
            logits = parts.model.apply({"params": params}, window[None, :-1])
            log_p = jax.nn.log_softmax(logits)[0]
            nats -= float(sum(log_p[i, t] for i, t in enumerate(window[1:])))
        n_bytes += len(ids) - 1
    np.testing.assert_allclose(
        nats / np.log(2) / n_bytes, result["valid_bpb"], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("model.memories.0.hash_seed", 1, "ngram_layouts"),
        ("model.memories.0.pad_id", 7, "ngram_layouts"),
        ("model.memories.0.rows_per_head", 60, "table"),
        ("model.d_ff", 24, "feed_forward"),
        ("model.n_layers", 2, "block_1"),
    ],
)
def test_p21_the_checkpoint_of_another_model_is_refused(
    trained, experiment, tmp_path, path, value, named
):
    """Another n-gram seed or pad token: an error although all shapes agree."""
    folder = tmp_path / "copy"
    shutil.copytree(trained[0], folder)
    other = override(experiment, [(path, value), ("train.n_steps", 9)])
    with pytest.raises(TrainingError, match=path.rpartition(".")[2]):
        train(other, folder)
    save(other, folder / "config.json")
    with pytest.raises(CheckpointError, match=named):
        load_run(folder)
    with pytest.raises(CheckpointError, match=named):
        train(other, folder)


def test_more_steps_go_on_from_the_last_checkpoint(experiment, trained, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(trained[0], folder)
    more = override(experiment, [("train.n_steps", 9)])
    assert train(more, folder)["steps"] == 9
    with pytest.raises(ConfigError, match=r"train\.n_steps = 8"):
        train(experiment, folder)


def test_a_run_goes_on_on_another_mesh_and_is_read_on_other_devices(
    experiment, trained, tmp_path
):
    """Begun with data 8, ended with data 2, fsdp 2, tensor 2: the same losses. The
    parameters of a run on 4 devices are read by these 8."""
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    shutil.rmtree(folder / "checkpoints" / "8")
    mesh = [("mesh.data", 2), ("mesh.fsdp", 2), ("mesh.tensor", 2)]
    train(override(experiment, mesh), folder)
    (_, start) = map(json.loads, (folder / "starts.jsonl").read_text().splitlines())
    assert "mesh.fsdp: 1 there, 2 now" in start["changes_to_last_start"]
    losses, wanted = (recorded(of)[0] for of in (folder, trained[0]))
    assert sorted(losses) == sorted(wanted) == list(range(1, 9))
    for step, loss in losses.items():
        np.testing.assert_allclose(
            float.fromhex(loss), float.fromhex(wanted[step]), rtol=2e-6
        )
    params = load_run(folder)[1]
    save(override(experiment, mesh[:2]), folder / "config.json")
    parts, copies, _ = load_run(folder)
    assert parts.mesh.shape["data"] == 8
    jax.tree.map(np.testing.assert_array_equal, copies, params)


def test_samples_repeat_and_stay_inside_the_vocabulary(trained):
    folder, _ = trained
    text = sample(folder, b"line", n_tokens=20, seed=3)
    assert text == sample(folder, b"line", n_tokens=20, seed=3)
    assert len(text) <= 20


def test_a_table_too_large_for_memory_says_how_many_bytes(experiment, tmp_path):
    huge = override(
        experiment,
        [
            ("model.memories.0.rows_per_head", 500_000_000),
            ("model.memories.0.row_width", 4096),
        ],
    )
    with pytest.raises(
        ConfigError, match=r"model\.memories .*needs at least \d+ bytes"
    ):
        train(huge, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_label_rule_that_matches_nothing_stops_before_anything_is_written(
    experiment, tmp_path
):
    wrong = override(
        experiment, [("optim.label_rules", (("no_such_layer", "frozen"),))]
    )
    with pytest.raises(ConfigError, match="no_such_layer"):
        train(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("data.corpora.0.name", "no_such_corpus"), ("data.batch_size", 80_000)],
)
def test_data_that_cannot_be_read_leaves_no_folder(experiment, tmp_path, field, value):
    """The mended command would otherwise be refused as another config."""
    with pytest.raises((ConfigError, DataError), match=str(value)):
        train(override(experiment, [(field, value)]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_frozen_memory_does_not_move(experiment, tmp_path):
    rules = (("memory/table", "frozen"),)
    for n_steps in (2, 3):
        train(
            override(
                experiment,
                [("optim.label_rules", rules), ("train.n_steps", n_steps)],
            ),
            tmp_path / "run",
        )
    first, last = (load_run(tmp_path / "run", step)[1] for step in (2, 3))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), first, last)
    assert not changed["block_0"]["memory"].pop("table")
    assert all(jax.tree.leaves(changed["block_0"]))


def test_an_unwritable_run_folder_is_one_line(experiment, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(TrainingError, match="run folder") as caught:
        train(experiment, tmp_path / "file" / "run")
    assert "\n" not in str(caught.value)


def test_describe_counts_what_training_makes(trained, experiment):
    described = describe(experiment)
    _, params, _ = load_run(trained[0])
    sizes = [x.size for x in jax.tree.leaves(params)]
    assert described["params_dense"] + described["params_table"] == sum(sizes)
    assert described["tokens_per_step"] == 8 * 16
    assert described["shapes"]["block_0/memory/table"]["label"] == "table"


def test_memory_health_is_recorded(experiment, tmp_path):
    watched = override(experiment, [("train.health_every", 2), ("train.n_steps", 3)])
    train(watched, tmp_path / "run")
    lines = Path(tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    health = [x for x in map(json.loads, lines) if x.get("kind") == "health"]
    assert [x["step"] for x in health] == [0, 2]
    first = health[0]
    for name in ("rows_touched", "usage_frac", "usage_entropy_bits", "collision_frac"):
        assert f"{name}/layer_0" in first
    assert first["gate_q05/layer_0"] <= first["gate_q50/layer_0"]
    assert 0 < first["memory_share"] < 1
    assert first["backbone_grad_norm"] > 0
    assert first["backbone_grad_norm_without_memory"] > 0
    assert first["backbone_grad_norm"] != first["backbone_grad_norm_without_memory"]
