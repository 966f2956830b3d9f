"""The command line itself: help, typos, errors in one line, light imports."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import memjax as package
from memjax.cli.arguments import UsageError, split
from memjax.cli.main import COMMANDS
from memjax.cli.train import Train
from memjax.errors import MemjaxError


def test_help_lists_every_command(memjax):
    outcome = memjax("--help")
    assert outcome.code == 0
    for name, (_, line) in COMMANDS.items():
        assert f"  {name}" in outcome.out and line in outcome.out
    assert memjax().code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(memjax, name):
    outcome = memjax(name, "--help")
    assert outcome.code == 0 and f"usage: memjax {name}" in outcome.out


def test_version(memjax):
    assert memjax("--version").out.startswith("memjax 0.")


def test_unknown_command_suggests_the_nearest(memjax):
    outcome = memjax("trian", "x.py")
    assert outcome == (2, "", "memjax: unknown command 'trian'; did you mean train?\n")


def test_help_of_a_file_lists_its_fields(memjax, tiny_file):
    outcome = memjax("train", tiny_file, "--help")
    assert outcome.code == 0
    for option in ("--run-dir", "--model.memories.0.n-heads", "--optim.learning-rate"):
        assert option in outcome.out
    assert "{True,False}" in outcome.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.topk=16"], "model.topk = '16'"),
        (["--model.n-laiers", "3"], "did you mean model.n_layers?"),
        (["--model.n-layers=2.5"], "model.n_layers = '2.5'"),
        (["--model.n-layers="], "model.n_layers = ''"),
        (["model.n_layers=two"], "model.n_layers = 'two'"),
        (["--model.scan-layers=0"], "true or false"),
        (["--model.n-heads", "3"], "model.n_heads = 3"),
        (["--model.memories.0.layers", "1"], "model.memories.0.layers = (1,)"),
        (["--model.memories.1.cap", "0.5"], "1 entries, indices 0 to 0"),
        (["--data.batch-size", "3"], "data.batch_size"),
        (["--n-layers", "2"], "did you mean model.n_layers?"),
    ],
)
def test_p27_bad_overrides_are_one_line(memjax, tiny_file, words, message):
    """A wrong override names the field, suggests the nearest, and nothing starts."""
    outcome = memjax("show", tiny_file, *words)
    if words == ["--data.batch-size", "3"]:  # 8 devices: found when they are known
        outcome = memjax(
            "train", tiny_file, *words, "--run-dir", tiny_file.parent / "no"
        )
        assert not (tiny_file.parent / "no").exists()
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1 and message in outcome.err


def test_usage_errors_have_exit_code_2(memjax, tiny_file):
    assert "did you mean --debug?" in memjax("show", tiny_file, "--debg").err
    assert memjax("show", tiny_file, "--debg").code == 2
    assert memjax("show", tiny_file, "--seed").code == 2
    assert memjax("prepare").code == 2
    assert memjax("sample", "run", "--temprature", "1").code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show"], "Missing from memjax show: FILE"),
        (["show", "FILE", "--scale", "huge"], "invalid choice 'huge'"),
        (["show", "FILE", "more"], "Unrecognized options: more"),
        (["sweep", "FILE", "--jobs", "two"], "--jobs: invalid literal"),
        (["sample", "run", "--temprature", "1"], "did you mean --temperature FLOAT?"),
    ],
)
def test_a_wrong_option_is_one_line_without_a_box(memjax, tiny_file, words, message):
    outcome = memjax(*(tiny_file if word == "FILE" else word for word in words))
    assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome.err
    assert message in outcome.err and f"(see memjax {words[0]} --help)" in outcome.err
    assert not set(outcome.err) & set("\u256d\u2502\u2500\u2570")


def test_debug_errors_shows_the_traceback(memjax, tmp_path, monkeypatch):
    with pytest.raises(MemjaxError):
        memjax("show", tmp_path / "no.py", "--debug-errors")
    monkeypatch.setenv("MEMJAX_TRACEBACK", "1")
    with pytest.raises(MemjaxError):
        from memjax.cli.main import main

        main(["show", str(tmp_path / "no.py")])


def test_what_jax_notes_on_an_error_stays_out_of_its_line(memjax, monkeypatch):
    """Our errors often come from inside of a trace."""

    def run(words):
        def wrong(x):
            raise MemjaxError("rows = 3; allowed: 4")

        jax.jit(wrong)(1.0)

    monkeypatch.setattr("memjax.cli.doctor.run", run)
    assert memjax("doctor") == (1, "", "memjax: rows = 3; allowed: 4\n")


def test_sigterm_leaves_no_half_prepared_folder(memjax, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    notes = tmp_path / "in" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("a line\n" * 30)
    monkeypatch.setattr(
        "memjax.data.prepare.read_documents",
        lambda *_, **__: signal.raise_signal(signal.SIGTERM),
    )
    assert memjax("prepare", notes, "--out", tmp_path / "out" / "store").code == 143
    assert list((tmp_path / "out").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_split_keeps_own_options_and_collects_the_rest():
    words = "a.py --seed 3 --run-dir d --model.memories.0.orders 2 3 --debug x.y=1"
    own, overrides = split(Train, words.split())
    assert own == ["a.py", "--run-dir", "d", "--debug"]
    assert overrides == [
        ("seed", "3"),
        ("model.memories.0.orders", "2 3"),
        ("x.y", "1"),
    ]
    assert split(Train, ["a.py", "--optim.x", "-3"])[1] == [("optim.x", "-3")]
    assert split(Train, ["dir.x=1/a.py"]) == (["dir.x=1/a.py"], [])
    with pytest.raises(UsageError, match="--seed needs a value"):
        split(Train, ["a.py", "--seed", "--debug"])


def test_public_names_exist_and_match_what_checkers_see():
    tree = ast.parse(Path(package.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: f"memjax.{home}" for name, home in package._HOMES.items()}
    assert seen == homes and sorted(homes) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None and name in dir(package)
    with pytest.raises(AttributeError, match="no attribute 'engram'"):
        _ = package.engram


def test_import_help_and_show_start_no_backend(tiny_file):
    """`import memjax` imports no jax; `show` and `table` reach no device."""
    code = f"""
import sys, memjax
assert "jax" not in sys.modules and "numpy" not in sys.modules
import memjax.report.table, memjax.report.results
from memjax.cli.main import main
assert main(["--help"]) == 0
assert "jax" not in sys.modules
assert main(["show", {str(tiny_file)!r}]) == 0
assert main(["table", {str(tiny_file)!r}]) == 1
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "memory tables: " in done.stdout
