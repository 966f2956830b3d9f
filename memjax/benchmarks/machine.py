"""What a machine is, as far as a timing depends on it.

What: `machine_facts`, plain JSON, `n_cores`, `free_bytes` and
    `huge_page_frac`.
Why: a figure without its machine cannot be repeated.
When not: devices and extras for a bug report; `memjax doctor` prints those.
"""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory, load, and versions of python, jax and memjax.

    What the system does not tell is None. The load is the mean number of running
    programs over the last minute: much above 0 before a timing, others were at work.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": n_cores(),
        "memory_bytes": _bytes("MemTotal"),
        "load": load,
        "system": platform.system(),
        "python": platform.python_version(),
        "jax": version("jax"),
        "memjax": version("memjax"),
    }


def n_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_bytes() -> int | None:
    """Memory that programs can still take without swapping; None: unknown."""
    return _bytes("MemAvailable")


def huge_page_frac() -> float | None:
    """The part of this process' own memory that lies in huge pages; None: unknown."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    if not kilobytes.get("Anonymous"):
        return None
    return kilobytes.get("AnonHugePages", 0) / kilobytes["Anonymous"]


def _bytes(name: str) -> int | None:
    text = _field("/proc/meminfo", name)
    return None if text is None else int(text.split()[0]) * 1024


def _field(file: str, name: str) -> str | None:
    """The first value of `name` in a file of lines `name: value`."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
