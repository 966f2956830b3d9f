"""`memjax eval --knn` on a tiny finished run: built, used again, refused, printed.

What: the command and `memjax.run.evaluate_knn`, from checkpoint to table.
Why: the pieces are tested alone; here the run folder decides what belongs together.
When not: figures against a loop; test_knn.
"""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

from memjax.cli.main import main
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.prepare import prepare_text
from memjax.errors import CheckpointError
from memjax.evaluate.datastore import open_datastore
from memjax.evaluate.knn import KnnConfig
from memjax.experiment import Experiment
from memjax.layers.peer import PeerConfig
from memjax.models.config import ModelConfig
from memjax.run import evaluate, evaluate_knn, train
from memjax.train.config import TrainConfig

MEMORY = PeerConfig(layers=(0,), n_sub_keys=3, n_heads=1, k=2, gate="none")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three steps, checkpoints at 2 and 3; a memory instead of the feed-forward."""
    folder = tmp_path_factory.mktemp("knn")
    text = folder / "notes.txt"
    text.write_text("".join(f"line {n} of the notes\n" for n in range(60)))
    prepare_text([text], folder / "store")
    memory = dataclasses.replace(MEMORY, place="instead_of_feed_forward")
    experiment = Experiment(
        name="tiny",
        model=ModelConfig(
            n_layers=1, d_model=16, n_heads=2, n_kv_heads=2, d_ff=16, memories=(memory,)
        ),
        data=DataConfig(
            corpora=(CorpusConfig(name=str(folder / "store")),),
            context=16,
            batch_size=8,
            eval_stride=16,
            eval_batch_size=8,
            n_threads=0,
        ),
        train=TrainConfig(n_steps=3, eval_every=None, save_every=2, log_every=1),
    )
    train(experiment, folder / "run")
    return folder / "run"


@pytest.fixture
def run_dir(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def memjax(capsys):
    def run(*words):
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


def test_a_run_is_scored_and_its_datastore_used_again(memjax, run_dir, tmp_path):
    """The text repeats itself, so neighbours help a model that has learnt nothing."""
    out = tmp_path / "out.json"
    code, said, err = memjax(
        "eval", run_dir, "--knn", "--knn-k", 8, "--knn-lambda", "0,0.25,0.9",
        "--json", out,
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out.read_text())
    knn = found["knn"]
    assert knn["k"] == 8 and knn["step"] == 3 and knn["index"] == "exact"
    np.testing.assert_allclose(knn["lm"]["bpb"], found["valid_bpb"], rtol=1e-6)
    none, some, most = (mixture["bpb"] for mixture in knn["mixtures"])
    assert none == knn["lm"]["bpb"] and most < some < none
    assert 0.5 < knn["in_neighbours"] <= 1
    assert f"building {run_dir / 'datastore'}: {knn['n_entries']} tokens" in said
    for text in ("model alone", "neighbours alone", "mixture, lambda 0.25"):
        assert text in said
    for figure in (none, some, most):
        assert f"{figure:.4f}" in said

    config = KnnConfig(k=8, lambdas=(0.9,))
    before = (run_dir / "datastore" / "keys.npy").stat()
    lines = []
    again = evaluate_knn(run_dir, config=config, report=lines.append)
    assert again["mixtures"][0] == knn["mixtures"][2]
    assert not any("building" in line for line in lines)
    assert (run_dir / "datastore" / "keys.npy").stat().st_ino == before.st_ino

    # Another checkpoint, another size, another model in the same place.
    with pytest.raises(CheckpointError, match="model.step is 3 there and 2 now"):
        evaluate_knn(run_dir, step=2, config=config)
    code, _, err = memjax("eval", run_dir, "--knn", "--knn-tokens", 50)
    assert code == 1 and "n_tokens is" in err and "50 now" in err
    rebuilt = memjax("eval", run_dir, "--knn", "--knn-tokens", 50, "--knn-rebuild")
    assert rebuilt[0] == 0 and "50 training tokens" in rebuilt[1]
    with pytest.raises(CheckpointError, match="key is 'feed_forward' there"):
        evaluate_knn(run_dir, config=dataclasses.replace(config, key="final"))
    with pytest.raises(CheckpointError):
        open_datastore(run_dir / "datastore", {})
    found = evaluate_knn(
        run_dir,
        step=2,
        config=KnnConfig(k=1, n_tokens=1, key="final", temperature=2.0),
        rebuild=True,
    )
    assert found["n_entries"] == 1 and found["knn"]["bpb"] == math.inf
    other = evaluate(run_dir, step=2)["valid_bpb"]
    np.testing.assert_allclose(found["lm"]["bpb"], other, rtol=1e-6)


def test_test_is_mixed_once_on_purpose_and_recorded(memjax, run_dir):
    words = ("eval", run_dir, "--split", "test", "--knn", "--knn-tokens", 40)
    code, _, err = memjax(*words, "--knn-lambda", "0.1,0.2")
    assert code == 2 and "lambda is chosen on valid" in err
    assert "test_bpb" not in json.loads((run_dir / "result.json").read_text())
    assert memjax(*words)[0] == 0
    result = json.loads((run_dir / "result.json").read_text())
    (mixed,) = result["test_knn"]
    np.testing.assert_allclose(mixed["lm"]["bpb"], result["test_bpb"], rtol=1e-6)
    assert mixed["split"] == "test" and mixed["mixtures"][0]["lambda"] == 0.25


def test_wrong_words_are_refused_in_a_line(memjax, trained):
    for words, code, text in [
        (("--knn-k", 3), 2, "--knn-k belongs to --knn"),
        (("--knn-rebuild",), 2, "--knn-rebuild belongs to --knn"),
        (("--knn", "--knn-lambda", "a"), 2, "--knn-lambda a is not allowed"),
        (("--knn", "--knn-lambda", "1.5"), 1, "knn.lambdas = (1.5,) is not allowed"),
        (("--knn", "--knn-k", 0), 1, "knn.k = 0 is not allowed"),
        (("--knn", "--sweep"), 2, "not for a --sweep"),
    ]:
        got, _, err = memjax("eval", trained, *words)
        assert got == code and text in err and err.count("\n") == 1, err
