"""One tiny finished run and a way to call the command line, for all tests here.

What: `memjax` runs a command in this process, `finished` is a run of six steps.
Why: a run costs seconds of compiling; every test that reads one shares it.
When not: tests that change a run make their own.
"""

import contextlib
import io
import shutil
from collections import namedtuple

import pytest

from memjax.cli.main import main

Outcome = namedtuple("Outcome", "code out err")

FILE = """
from memjax.data.config import CorpusConfig, DataConfig
from memjax.experiment import Experiment, axis, product
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.train.config import TrainConfig

MEMORY = EngramConfig(layers=(0,), orders=(2, 3), n_heads=1, rows_per_head=50,
                      row_width=4, kernel_size=0)

def config():
    return Experiment(
        name="tiny",
        model=ModelConfig(n_layers=1, d_model=16, n_heads=2, n_kv_heads=2, d_ff=16,
                          scan_layers=False, memories=(MEMORY,)),
        data=DataConfig(corpora=(CorpusConfig(name="NOTES"),), context=16,
                        batch_size=8, eval_stride=16, eval_batch_size=8, n_threads=0),
        train=TrainConfig(n_steps=4, eval_every=None, save_every=2, log_every=1),
    )

def sweep():
    return product(axis("model.memories", off=(), on=(MEMORY,)), axis("seed", 0, 1),
                   baseline={"model.memories": "off"})
"""


@pytest.fixture
def memjax(capsys, monkeypatch):
    """Run `memjax ...` in this process -> (code, out, err)."""
    monkeypatch.delenv("MEMJAX_TRACEBACK", raising=False)

    def run(*words):
        code = main([str(word) for word in words])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory):
    """An experiment file over a few lines of own text."""
    folder = tmp_path_factory.mktemp("tiny")
    text = folder / "notes.txt"
    text.write_text("".join(f"line {n} of the notes\n" for n in range(60)))
    store = folder / "store"
    assert main(["prepare", str(text), "--out", str(store)]) == 0
    file = folder / "tiny.py"
    file.write_text(FILE.replace("NOTES", str(store)))
    return file


@pytest.fixture(scope="session")
def trained_and_output(tiny_file, tmp_path_factory):
    """Trained to its end in the default folder; what the command printed."""
    here = tmp_path_factory.mktemp("here")
    printed = io.StringIO()
    with contextlib.chdir(here), contextlib.redirect_stdout(printed):
        assert main(["train", str(tiny_file), "--train.n-steps", "3"]) == 0
    (run_dir,) = (here / "runs").iterdir()
    return run_dir, printed.getvalue()


@pytest.fixture
def trained(trained_and_output):
    """The finished run; for reading only."""
    return trained_and_output[0]


@pytest.fixture
def trained_output(trained_and_output):
    """What `memjax train` printed."""
    return trained_and_output[1]


@pytest.fixture
def finished(trained, tmp_path):
    """A copy of the finished run that a test may change."""
    return shutil.copytree(trained, tmp_path / "run")
