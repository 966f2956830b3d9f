"""Settings shared by every test.

What: eight simulated CPU devices, quick compilation, folders of tests on several cores,
the `--golden-root` option, one hypothesis profile.
Why: the number of devices must be chosen before a jax backend starts; tests compile
thousands of small programs and run each a few times.
When not: fixtures that only one folder needs stand in that folder's conftest.
"""

import gc
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import settings

# XLA's newer code generator for CPUs sets up MLIR for every fused loop, which is half
# of the suite's time; the older one goes straight to LLVM. It joins products and sums
# where the machine has such instructions, so that a jitted program would round in other
# places than the same steps one by one: AVX has none. XLA ends the process at a flag it
# does not know, hence the two conditions.
_QUICK = ["--xla_cpu_use_fusion_emitters=false"]
if platform.machine() in ("x86_64", "AMD64"):
    _QUICK.append("--xla_cpu_max_isa=AVX")
if jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = " ".join([*_QUICK, os.environ.get("XLA_FLAGS", "")])

_MOST_PROCESSES = 4  # each holds one to three gigabytes
_MAPS = Path("/proc/self/maps")  # on Linux: a line for each region of memory
_MANY_MAPS = 20_000
_RECORDED = pytest.StashKey[str]()

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # processes that tests start

settings.register_profile(
    "memjax", deadline=None, max_examples=25, derandomize=True, database=None
)
settings.load_profile("memjax")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A folder's files share the cores (pytest-xdist); `-n 0` is one process.

    A single file is quicker without the start of more processes, and so it is left
    alone, as are a debugger and the processes that were started here.
    """
    option = config.option
    if hasattr(config, "workerinput") or option.usepdb or option.collectonly:
        return
    folders = [Path(argument) for argument in config.args if Path(argument).is_dir()]
    n_processes = min(os.cpu_count() or 1, _MOST_PROCESSES)
    given = getattr(option, "numprocesses", 0)  # 0: there is no such plugin
    if folders and n_processes > 1 and given is None:
        option.numprocesses = n_processes
        option.dist = "loadfile"
        # The process after one that crashed would wait for ever with one test left.
        if option.maxworkerrestart is None:
            option.maxworkerrestart = "0"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker has collected all cases and counts them alike."""
    line = getattr(node, "workeroutput", {}).get("recorded numbers")
    if line is not None:
        node.config.stash[_RECORDED] = line


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if _RECORDED in config.stash:
        terminalreporter.section("recorded numbers")
        terminalreporter.write_line(config.stash[_RECORDED])


def pytest_collection_finish() -> None:
    """Modules and collected tests stay; the collector need not walk them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _few_programs() -> Iterator[None]:
    """Forgets compiled programs after a file, once they are many.

    On a CPU, XLA maps three regions of memory for each program, jax keeps the programs,
    and Linux lets a process have 65530 regions unless told otherwise: the one above
    them is a segmentation fault inside XLA's compiler.
    """
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-root",
        action="append",
        default=None,
        metavar="DIR",
        help="folder with a manifest.json of recorded numbers; may be repeated",
    )
