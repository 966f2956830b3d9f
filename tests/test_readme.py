"""The README does what it says.

What: its Python blocks run, its commands run (shrunk), CI runs its two first commands.
Why: a reader's first minutes are spent there.
When not: what the commands print in detail; tests/cli has that.
"""

import re
import shlex
import shutil
from pathlib import Path

import jax
import pytest

from memjax.cli import main as cli
from memjax.experiment import load_experiment
from memjax.models.config import ModelConfig
from memjax.models.parameters import cost

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST = 'pip install -e ".[data]" && memjax train experiments/quickstart.py'
SECOND = 'pip install -e ".[data,dev]" && pytest'


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_first_screen_has_the_two_commands() -> None:
    screen = "\n".join(README.splitlines()[:25])
    assert blocks("bash")[:2] == [f"{FIRST}\n", f"{SECOND}\n"]
    assert FIRST in screen
    assert SECOND in screen


def test_ci_runs_exactly_the_two_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    run = re.findall(r"^section '[^']*' \\?\s*'(.*)'$", script, re.MULTILINE)
    assert run[0] == f'{FIRST} --debug --run-dir "$RUN_DIR"'
    assert run[1] == SECOND
    assert run[2:] == [
        "pip check",
        "ruff check . && shellcheck launch/*.sh launch/gke/*.sh",
        "ruff format --check .",
        "lint-imports --no-cache",
        "pyright",
    ]


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_run(number: int) -> None:
    names: dict[str, object] = {}
    exec(compile(blocks("python")[number], f"README block {number}", "exec"), names)
    if "losses" in names:  # the training loop learns its sentence
        losses = names["losses"]
        assert isinstance(losses, list)
        assert losses[-1] < 0.5 * losses[0]
    elif "model" in names:  # the config of a model, with a memory in it
        model = names["model"]
        assert isinstance(model, ModelConfig) and cost(model, 8).table_params == 2**21
    else:  # every row that was read has moved by the rate's RMS, no other row has
        loss, table_RW = names["loss"], names["table_RW"]
        assert callable(loss) and isinstance(table_RW, jax.Array)
        start_RW = 0.02 * jax.random.normal(jax.random.key(0), table_RW.shape)
        rms_R = ((table_RW - start_RW) ** 2).mean(-1) ** 0.5
        moved_R = rms_R > 0
        assert 0 < moved_R.sum() < len(table_RW)
        assert float(abs(rms_R[moved_R] - 0.18 * 0.02).max()) < 1e-5
        assert float(loss(table_RW)) < float(loss(start_RW))


def test_there_are_three_python_blocks() -> None:
    assert len(blocks("python")) == 3


def test_the_experiment_of_the_docs_loads(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configs.md").read_text(encoding="utf-8")
    (block,) = blocks("python", text)
    (tmp_path / "mine.py").write_text(block, encoding="utf-8")
    loaded = load_experiment(tmp_path / "mine.py")
    assert loaded.sweep is not None
    assert len(loaded.sweep.cells) == 12
    override = re.findall(r"^    memjax train \S+ (--.*)$", text, re.MULTILINE)
    assert override == ["--model.d-model 256 --model.memories.0.orders 2 3 4"]


def test_links_lead_somewhere() -> None:
    for file in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text = file.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (file.parent / target).exists(), f"{file.name}: {target}"


def test_every_command_stands_in_the_table() -> None:
    listed = re.findall(r"^\| `memjax (\w+)` \|", README, re.MULTILINE)
    assert listed == list(cli.COMMANDS)


def test_the_other_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the README's order, at --debug size; of the sweep one cell."""
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    (tmp_path / "notes").mkdir()
    lines = [f"Note {i}: this is line {i} of some notes.\n" * 3 for i in range(400)]
    (tmp_path / "notes" / "a.txt").write_text("".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = []
    for line in "".join(blocks("bash")[2:]).splitlines():
        program, *words = shlex.split(line)
        assert program == "memjax"
        if words[0] in ("train", "sweep", "table", "show"):
            words += ["--debug", "--train.n-steps", "3"]
        if words[0] == "bench":
            words += ["--help"]  # it measures for a minute; tests/cli/test_bench.py
        if words[0] == "sample":
            words += ["--n-tokens", "20"]
        if words[0] == "sweep":
            assert cli.main([*words, "--dry-run"]) == 0
            first = capsys.readouterr().out.splitlines()[0].split()[-1]
            words += ["--only", Path(first).name]
        assert cli.main(words) == 0, line
        assert capsys.readouterr().out.strip(), line
        done.append(words[0])
    assert set(done) == set(cli.COMMANDS)
