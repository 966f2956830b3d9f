"""Turn every entry of every manifest into a test, and count what is left.

What: `--golden-root` folders (default: the copies beside this file) become cases; the
    terminal summary says how many ran and how many wait for a later family.
Why: nothing recorded may be skipped without a line that says so.
When not: how a case runs is families/.
"""

import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.golden.case import Case, Manifest
from tests.golden.families import NOT_BUILT

_HERE = Path(__file__).parent
DEFAULT_ROOTS = (_HERE / "engram", _HERE / "product_keys")
_LISTED = pytest.StashKey[list[Case]]()
_RUN = pytest.StashKey[list[Case]]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    if _RUN not in config.stash:
        cases = [case for root in _roots(config) for case in Manifest(root).cases()]
        config.stash[_RUN] = [c for c in cases if c.family not in NOT_BUILT]
        config.stash[_LISTED] = [c for c in cases if c.family in NOT_BUILT]
    if "case" in metafunc.fixturenames:
        cases = config.stash[_RUN]
        metafunc.parametrize("case", cases, ids=[_name(case) for case in cases])
    if "root" in metafunc.fixturenames:
        roots = _roots(config)
        metafunc.parametrize("root", roots, ids=[root.name for root in roots])


@pytest.fixture(scope="session")
def planned(pytestconfig: pytest.Config) -> tuple[list[Case], list[Case]]:
    """Cases that are tests of this session, and cases listed as not yet built."""
    return pytestconfig.stash[_RUN], pytestconfig.stash[_LISTED]


@pytest.fixture(scope="session")
def float64_errors(request: pytest.FixtureRequest) -> dict[tuple[Path, str], str]:
    """What the 64-bit process said about each selected float64 case; "" when well."""
    # Tests elsewhere may have a parameter of that name.
    params = [
        getattr(getattr(item, "callspec", None), "params", {})
        for item in request.session.items
    ]
    selected = [found["case"] for found in params if "case" in found]
    wanted = [
        (c.manifest.root, c.name)
        for c in selected
        if isinstance(c, Case) and _is_float64(c)
    ]
    # These programs run once each: compiling them without optimisation is quicker.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    settings = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    result = subprocess.run(
        [sys.executable, "-m", "tests.golden.x64_worker"],
        input=json.dumps([[str(root), name] for root, name in wanted]),
        cwd=_HERE.parent.parent,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    said = [json.loads(line) for line in result.stdout.splitlines()]
    errors = {(Path(root), name): error or "" for root, name, error in said}
    missing = f"the 64-bit process died: {result.stderr[-2000:]}"
    return {key: errors.get(key, missing) for key in wanted}


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if _RUN in config.stash:
        terminalreporter.section("recorded numbers")
        terminalreporter.write_line(_summary(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands its line to tests/conftest.py, which prints it."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and _RUN in session.config.stash:
        output["recorded numbers"] = _summary(session.config)


def _summary(config: pytest.Config) -> str:
    n_run, listed = len(config.stash[_RUN]), config.stash[_LISTED]
    families = Counter(case.family for case in listed)
    names = ", ".join(f"{name} {n}" for name, n in families.items()) or "none"
    return (
        f"{n_run} cases with a test + {len(listed)} of families not yet built "
        f"({names}) = {n_run + len(listed)} in "
        + ", ".join(str(root / "manifest.json") for root in _roots(config))
    )


def _is_float64(case: Case) -> bool:
    try:
        return case.dtype == "float64"
    except (
        OSError,
        ValueError,
        zipfile.BadZipFile,
    ):  # its own test says so, the others go on
        return False


def _roots(config: pytest.Config) -> list[Path]:
    given = config.getoption("golden_root")
    return [Path(root).resolve() for root in given or DEFAULT_ROOTS]


def _name(case: Case) -> str:
    return f"{case.manifest.root.name}/{case.name}"
