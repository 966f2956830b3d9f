"""The folder of a run.

What: `open_run_folder` makes it and writes what is needed to repeat the run.
Why: a table's number can be traced to a config, a commit and versions, always.
When not: metrics and checkpoints; the loop writes those.

    config.json    the resolved config
    starts.jsonl   one line a start: time, command line, differences of the config to
                   its file and to the last start, versions, devices, commit
    dirty-N.patch  what the checkout of start N had on top of its commit
    result.json    what the caller writes when a run has reached its last step
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from memjax.errors import ConfigError, TrainingError
from memjax.parallel.processes import exchange
from memjax.train.checkpoint import whole_steps
from memjax.train.config import RESUMABLE_FIELDS
from memjax.train.state import prng_implementation

CONFIG_FILE = "config.json"
STARTS_FILE = "starts.jsonl"
RESULT_FILE = "result.json"
CHECKPOINT_FOLDER = "checkpoints"
_PACKAGES = ("memjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_LARGEST_UNTRACKED = 200_000
_SHARED_S = 60.0


def open_run_folder(
    run_dir: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    changes: Sequence[str] = (),
    may_change: Sequence[str] = RESUMABLE_FIELDS,
    n_steps: int | None = None,
) -> Path:
    """Make the folder, or open it again for the same config.

    Args:
        run_dir: made with its parents when missing.
        config: the resolved config as JSON values.
        changes: how it differs from its file, one text a field.
        may_change: dotted fields (or whole branches) a rerun may change.
        n_steps: length of the run; None leaves it unchecked.

    Returns:
        The absolute path.

    Raises:
        TrainingError: it cannot be written, or holds the run of another config (names
            every differing field); nothing is changed then.
        ConfigError: it holds a checkpoint beyond n_steps; nothing is changed then.
    """
    path = Path(os.path.abspath(run_dir))
    config = json.loads(json.dumps(config))
    differences: list[str] = []
    try:
        if (path / CONFIG_FILE).exists():
            old = _read_config(path / CONFIG_FILE)
            differences = _compare(path, old, config, may_change)
            _check_length(path, n_steps)
        if jax.process_index() == 0:
            path.mkdir(parents=True, exist_ok=True)
            _write_json(path / CONFIG_FILE, config)
            _append_start(path, list(changes), differences)
    except OSError as error:
        raise TrainingError(
            f"run folder {path} cannot be used: {error.strerror or error}; "
            "allowed: a folder that may be written"
        ) from error
    _check_shared(path)
    return path


def _check_shared(path: Path) -> None:
    """TrainingError in all processes unless each sees what process 0 has written.

    A file system over a network may show a new file late; it has a minute.
    """
    if jax.process_count() == 1:
        return
    multihost_utils.sync_global_devices("memjax run folder")
    written = exchange("run folder written", _starts(path))[0]
    limit = time.monotonic() + _SHARED_S
    while _starts(path) != written and time.monotonic() < limit:
        time.sleep(0.2)
    seen = exchange("run folder seen", _starts(path))
    for process, text in enumerate(seen):
        if text != written:
            raise TrainingError(
                f"run folder {path} of process {process} is not that of process 0; "
                "allowed: a folder on a file system that all processes share"
            )


def _starts(path: Path) -> str:
    starts = path / STARTS_FILE
    return starts.read_text(encoding="utf-8") if starts.exists() else ""


def write_result(run_dir: str | os.PathLike[str], result: Mapping[str, Any]) -> None:
    """Write result.json in one piece."""
    _write_json(Path(run_dir) / RESULT_FILE, result)


def versions() -> dict[str, str]:
    """Versions of python and of the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _append_start(path: Path, changes: list[str], differences: list[str]) -> None:
    starts = path / STARTS_FILE
    number = len(starts.read_bytes().splitlines()) if starts.exists() else 0
    commit, patch = _checkout(Path(__file__).parents[2])
    patch_name = f"dirty-{number}.patch" if patch else None
    if patch_name is not None:
        (path / patch_name).write_text(patch, encoding="utf-8")
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "changes_to_file": changes,
        "changes_to_last_start": differences,
        "versions": versions(),
        "platform": platform.platform(),
        "prng": prng_implementation(),
        "devices": _device_kinds(),
        "n_processes": jax.process_count(),
        "commit": commit,
        "dirty_patch": patch_name,
    }
    with starts.open("a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")


def _device_kinds() -> dict[str, int]:
    kinds: dict[str, int] = {}
    for device in jax.devices():
        name = f"{device.platform} {device.device_kind}"
        kinds[name] = kinds.get(name, 0) + 1
    return kinds


def _checkout(root: Path) -> tuple[str | None, str]:
    """(commit, changes on top of it) when `root` is a git checkout, else (None, "")."""
    if not (root / ".git").exists():
        return None, ""
    commit = _git(root, "rev-parse", "HEAD").strip() or None
    patch = _git(root, "diff", "HEAD")
    for name in _git(root, "ls-files", "--others", "--exclude-standard").splitlines():
        file = root / name
        if file.is_file() and file.stat().st_size <= _LARGEST_UNTRACKED:
            patch += _git(root, "diff", "--no-index", "--", os.devnull, name)
    return commit, patch


def _git(root: Path, *args: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *args],
            capture_output=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", errors="replace")


def _compare(
    path: Path,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    may_change: Sequence[str],
) -> list[str]:
    """Allowed differences as texts; TrainingError when there are others."""
    before, after = _flat(old), _flat(new)
    allowed: list[str] = []
    refused: list[str] = []
    for field in sorted(before.keys() | after.keys()):
        was, now = before.get(field, "absent"), after.get(field, "absent")
        if was == now:
            continue
        free = any(field == f or field.startswith(f"{f}.") for f in may_change)
        (allowed if free else refused).append(f"{field}: {was!r} there, {now!r} now")
    if refused:
        raise TrainingError(
            f"run folder {path} holds the run of another config "
            f"({'; '.join(refused)}); allowed: the same config, or another run folder"
        )
    return allowed


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise TrainingError(
            f"{path} is not JSON ({error}); allowed: another run folder"
        ) from error
    return config


def _check_length(path: Path, n_steps: int | None) -> None:
    steps = whole_steps(path / CHECKPOINT_FOLDER)
    if n_steps is not None and steps and steps[-1] > n_steps:
        raise ConfigError(
            "train.n_steps",
            n_steps,
            f"at least {steps[-1]}, the step that the run in {path} has reached",
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested objects and lists by dotted name."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(str(i), inner) for i, inner in enumerate(value)]
    else:
        return {prefix: value}
    if not items:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, inner in items:
        flat.update(_flat(inner, f"{prefix}.{name}" if prefix else name))
    return flat
