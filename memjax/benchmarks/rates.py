"""How fast the machine copies memory and multiplies matrices, right now.

What: `Rates`, an object for a worker that measures both with all cores.
Why: a time says little without what the machine could do at best in the same minute.
When not: a published rate; those of accelerators stand in their data sheets.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.benchmarks.machine import n_cores
from memjax.benchmarks.process import Program


def rates_program(short: bool) -> Program:
    """Copies of 256 MB and products of 2048 x 2048; an eighth of both in short form."""
    return Program(
        target="memjax.benchmarks.rates:Rates",
        arguments={
            "n_bytes": 2**25 if short else 2**28,
            "side": 512 if short else 2048,
        },
        name="the machine's rates",
        need_bytes=2**30,
    )


class Rates:
    """Arrays of a size at which caches do not help, and what to do with them."""

    def __init__(self, n_bytes: int, side: int, n_times: int = 5) -> None:
        self._n_bytes, self._side, self._n_times = n_bytes, side, n_times

    def describe(self) -> dict[str, Any]:
        """The device."""
        return {
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
        }

    def measure(self) -> dict[str, float]:
        """The best of some trials.

        Returns:
            "copy_gb_s": 1e9 bytes a second, read and written both counted, of the
            faster of XLA's copy and, on a CPU, memcpy in one thread per core;
            "matmul_gflops": of a float32 product in XLA.
        """
        n, side = self._n_bytes // 4, self._side
        x_N = jnp.ones(n, jnp.float32)
        copy = jax.jit(lambda x_N: x_N + 1)
        seconds = self._best(lambda: copy(x_N).block_until_ready())
        if jax.default_backend() == "cpu":
            source, target = np.ones(n, np.float32), np.zeros(n, np.float32)
            seconds = min(seconds, self._best(lambda: _copy_in_threads(source, target)))
        a_SS = jnp.ones((side, side), jnp.float32)
        product = jax.jit(lambda a_SS: jnp.matmul(a_SS, a_SS, precision="highest"))
        matmul_seconds = self._best(lambda: product(a_SS).block_until_ready())
        return {
            "copy_gb_s": 2 * self._n_bytes / seconds / 1e9,
            "matmul_gflops": 2 * side**3 / matmul_seconds / 1e9,
        }

    def _best(self, call: Callable[[], Any]) -> float:
        call()
        times = []
        for _ in range(self._n_times):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)


def _copy_in_threads(source_N: np.ndarray, target_N: np.ndarray) -> None:
    n = n_cores()
    with ThreadPoolExecutor(n) as threads:
        parts = zip(
            np.array_split(source_N, n), np.array_split(target_N, n), strict=True
        )
        list(threads.map(lambda part: np.copyto(part[1], part[0]), parts))
