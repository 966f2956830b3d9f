"""One side of a comparison, inside its worker.

What: `Contender`, which starts, times and reports what a benchmark gives it; `jax_run`
    and `torch_peer` for the two frameworks.
Why: warm-up, choice among variants, clock and memory are the same for both sides.
When not: outside a worker; `duel` asks for all of this by name.
"""

import importlib
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from memjax.benchmarks.machine import huge_page_frac, n_cores
from memjax.errors import MissingExtraError

Run = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What is timed, with everything allocated and compiled.

    Attributes:
        variants: name -> one call, which returns when its work is done. All do the
            same; the fastest is kept.
        outputs: what a call computes, {name: array}, for the comparison of both sides:
            asked before the first call, from the initial state.
    """

    variants: Mapping[str, Run]
    outputs: Callable[[], Mapping[str, Any]] | None = None


class Contender:
    """A side of a duel.

    Args:
        framework: "jax" or "torch".
        make: allocates and compiles; called by `start`.
    """

    def __init__(self, framework: str, make: Callable[[], Ready]) -> None:
        self._framework, self._make = framework, make
        self._ready: Ready | None = None
        self._run: Run | None = None

    def describe(self) -> dict[str, Any]:
        """Framework, version, device and threads."""
        if self._framework == "torch":
            torch = torch_peer()
            device, threads = torch_device(), torch.get_num_threads()
        else:
            import jax

            device, threads = jax.default_backend(), n_cores()
        return {
            "framework": self._framework,
            "version": version(self._framework),
            "device": device,
            "threads": threads,
        }

    def start(self) -> None:
        """Allocate and compile."""
        self._ready = self._make()

    def outputs(self, file: str) -> bool:
        """Write what a call computes to an .npz file; whether there is anything."""
        assert self._ready is not None
        if self._ready.outputs is None:
            return False
        arrays = {name: np.asarray(x) for name, x in self._ready.outputs().items()}
        np.savez(Path(file), **arrays)  # pyright: ignore[reportArgumentType]
        return True

    def choose(self) -> dict[str, float]:
        """Warm up; keep the fastest variant; the seconds of each."""
        assert self._ready is not None
        taken = {}
        for name, run in self._ready.variants.items():
            run()
            taken[name] = min(_seconds(run) for _ in range(2))
        best = min(taken, key=lambda name: taken[name])
        self._run = self._ready.variants[best]
        return dict(sorted(taken.items(), key=lambda item: item[1]))

    def seconds(self, n: int) -> list[float]:
        """The seconds of n calls after an untimed one: another side had the caches."""
        assert self._run is not None
        self._run()
        return [_seconds(self._run) for _ in range(n)]

    def finish(self) -> dict[str, Any]:
        """Peak memory of the process, and the part of it in huge pages."""
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_bytes": peak, "huge_page_frac": huge_page_frac()}


def _seconds(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def torch_peer() -> Any:
    """PyTorch with a thread for every core.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise MissingExtraError("torch", "bench") from None
    if torch.get_num_threads() != n_cores():
        torch.set_num_threads(n_cores())
    torch.sparse.check_sparse_tensor_invariants.disable()  # said, or it warns
    return torch


def torch_device() -> str:
    """ "cuda" where PyTorch sees a GPU, else "cpu"."""
    return "cuda" if torch_peer().cuda.is_available() else "cpu"
