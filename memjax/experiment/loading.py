"""Experiment files: Python files with `config()`, or the JSON a run left behind.

What: `load_experiment(path, scale)` -> the experiment, its sweep, published figures.
Why: one name on the command line for a file, a saved config and a run folder.
When not: building experiments in code; construct `Experiment` directly.
"""

import hashlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from memjax.errors import ConfigError, DataError, MemjaxError
from memjax.experiment import paths
from memjax.experiment.definition import CONFIG_FILE, Experiment
from memjax.experiment.sweep import Sweep

SCALES = ("laptop", "gpu", "pod")


class Loaded(NamedTuple):
    """What an experiment file holds.

    Attributes:
        experiment: the result of `config()`, validated.
        sweep: the result of `sweep()`, None for a file without one.
        published: figures of a paper, as the file gives them; {} without.
        path: the file.
    """

    experiment: Experiment
    sweep: Sweep | None
    published: Mapping[str, Any]
    path: Path


def load_experiment(path: str | os.PathLike[str], scale: str = "laptop") -> Loaded:
    """Load an experiment file, a saved config or a run folder.

    Args:
      path: a `.py` file with `config()` or `config(scale)`, and perhaps `sweep()` (or
        `sweep(scale)`) and `published`; a `config.json`; or a folder that holds one.
      scale: "laptop" (minutes on two cores), "gpu" or "pod". A file whose `config`
        takes no scale has one size, and any other than "laptop" is an error, as it is
        for a saved config.

    Raises:
      ConfigError: no such file, no `config`, a bad field, an unknown scale.
      DataError: a saved config that is not JSON.
      MemjaxError: the file itself fails; names its line.
    """
    if scale not in SCALES:
        raise ConfigError("scale", scale, f"one of {', '.join(SCALES)}")
    path = Path(path)
    if path.is_dir():
        path = path / CONFIG_FILE
    if not path.is_file():
        allowed = f"an experiment file (.py), or a run folder with {CONFIG_FILE}"
        raise ConfigError("FILE", str(path), allowed)
    if path.suffix == ".json":
        if scale != "laptop":
            raise ConfigError("scale", scale, "not given: a saved config has one size")
        return Loaded(_read_json(path).validate(), None, {}, path)
    if path.suffix != ".py":
        raise ConfigError("FILE", str(path), "a .py file or a .json file")
    module = _run_file(path)
    config = getattr(module, "config", None)
    if not callable(config):
        raise ConfigError("FILE", str(path), "a file that defines config()")
    if scale != "laptop" and not inspect.signature(config).parameters:
        raise ConfigError("scale", scale, f"laptop: {path} has one size only")
    experiment = _call(config, scale, path)
    if not isinstance(experiment, Experiment):
        raise ConfigError("config()", experiment, f"an Experiment, in {path}")
    sweep = getattr(module, "sweep", None)
    if sweep is not None:
        sweep = _call(sweep, scale, path) if callable(sweep) else sweep
        if not isinstance(sweep, Sweep):
            raise ConfigError("sweep()", sweep, f"a Sweep, in {path}")
    published = getattr(module, "published", {})
    return Loaded(experiment.validate(), sweep, published, path)


def _read_json(path: Path) -> Experiment:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is no saved config: {error}") from error
    if not isinstance(plain, dict):
        raise DataError(f"{path} is no saved config: not a JSON object")
    return paths.from_dict(Experiment, plain)


def _run_file(path: Path) -> ModuleType:
    """Execute a Python file as a module of its own; never a stale compiled one."""
    name = (
        "memjax_file_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    )
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses defined in the file look themselves up

    def execute() -> None:
        code = compile(path.read_bytes(), str(path), "exec")
        exec(code, module.__dict__)

    try:
        _guarded(execute, path)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _call(function: Callable[..., Any], scale: str, path: Path) -> Any:
    scaled = bool(inspect.signature(function).parameters)
    return _guarded(lambda: function(scale) if scaled else function(), path)


def _guarded(run: Callable[[], Any], path: Path) -> Any:
    """`run()`; a mistake inside the user's file becomes one line naming its line."""
    try:
        return run()
    except MemjaxError:
        raise
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        where = f"{path}, line {line}" if line else str(path)
        raise MemjaxError(f"{where}: {type(error).__name__}: {error}") from error
