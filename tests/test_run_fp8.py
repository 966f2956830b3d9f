"""A finished run with its tables in FP8: scored and sampled by function and command."""

import json

import numpy as np
import pytest

from memjax.build.parts import Parts
from memjax.cli.main import main
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.prepare import prepare_text
from memjax.errors import ConfigError
from memjax.experiment import Experiment, override
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.optim.config import OptimConfig
from memjax.parallel.mesh import make_mesh
from memjax.run import evaluate, load_fp8, sample, train
from memjax.train.config import TrainConfig


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """A few lines of own text, one Engram by rows."""
    folder = tmp_path_factory.mktemp("text")
    text = folder / "notes.txt"
    text.write_text("".join(f"line {n} of the notes\n" for n in range(60)))
    prepare_text([text], folder / "store")
    memory = EngramConfig(
        layers=(0,), n_heads=1, rows_per_head=53, row_width=32, table_mode="rows"
    )
    return Experiment(
        name="tables",
        model=ModelConfig(
            n_layers=1,
            d_model=16,
            n_heads=2,
            n_kv_heads=2,
            d_ff=16,
            scan_layers=False,
            memories=(memory,),
        ),
        data=DataConfig(
            corpora=(CorpusConfig(name=str(folder / "store")),),
            context=16,
            batch_size=8,
            eval_stride=16,
            eval_batch_size=8,
        ),
        optim=OptimConfig(schedule="constant"),
        train=TrainConfig(n_steps=3, eval_every=None),
    )


@pytest.fixture(scope="module")
def run_dir(experiment, tmp_path_factory):
    """A finished run of three steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(experiment, folder)
    return folder


def test_eval_prints_both_scores(run_dir, tmp_path, capsys):
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    out = tmp_path / "out.json"
    assert main(["eval", str(run_dir), "--fp8", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    whole, in_fp8 = found["valid_bpb"], found["fp8"]["valid_bpb"]
    assert f"{whole:.4f}" in printed and f"{in_fp8:.4f}" in printed
    assert "tables in FP8" in printed
    assert whole != in_fp8 and abs(whole - in_fp8) < 0.05
    assert evaluate(run_dir, fp8=True) == found["fp8"]
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert before == after
    parts, params, step = load_fp8(run_dir)
    assert step == 3
    assert parts.experiment.model.memories[0].table_mode == "fp8"
    memory = params["block_0"]["memory"]
    assert memory["table_codes"].dtype == memory["table_scales"].dtype == np.uint8
    assert "table" not in memory


def test_of_test_the_score_is_recorded(run_dir, capsys):
    assert main(["eval", str(run_dir), "--split", "test", "--fp8"]) == 0
    result = json.loads((run_dir / "result.json").read_text())
    (recorded,) = result["test_fp8"]
    assert recorded["test_bpb"] == pytest.approx(result["test_bpb"], abs=0.05)
    assert "tables in FP8" in capsys.readouterr().out


def test_sample_writes_with_tables_in_fp8(run_dir, capsys):
    text = sample(run_dir, b"line", n_tokens=5, fp8=True)
    assert main(["sample", str(run_dir), "--prompt", "line", "--n-tokens", "5"]) == 0
    assert main(["sample", str(run_dir), "--n-tokens", "2", "--fp8"]) == 0
    assert len(text) <= 5 and capsys.readouterr().out


def test_training_in_fp8_is_refused_and_leaves_no_folder(experiment, tmp_path):
    fp8 = override(experiment, [("model.memories.0.table_mode", "fp8")])
    with pytest.raises(ConfigError, match=r"memories\.0\.table_mode = 'fp8'.*training"):
        train(fp8, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_divided_tables_are_refused(experiment, monkeypatch):
    divided = override(experiment, [("mesh.table", 2)])
    parts = Parts(divided, make_mesh(divided.mesh))
    monkeypatch.setattr("memjax.run.load_run", lambda *_: (parts, {}, 3))
    with pytest.raises(ConfigError, match="mesh.table = 2 .* 1 for tables in FP8"):
        load_fp8("anywhere")


def test_a_sweep_is_not_scored_in_fp8(capsys):
    assert main(["eval", "experiments/quickstart.py", "--sweep", "--fp8"]) == 2
    assert "--fp8" in capsys.readouterr().err
