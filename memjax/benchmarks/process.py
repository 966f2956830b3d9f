"""One timed table in a process of its own, driven step by step from outside.

What: `Process`, the handle; run as a program this module is the other end.
Why: huge pages are chosen when a process starts, memory comes back when it ends, and
    several sizes can take turns, so that the machine's mood meets them alike.
When not: tests and notebooks; `Local` does the same in this process.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from memjax.benchmarks.table_step import TableCase, TableStep, load_batches
from memjax.errors import MemjaxError

HUGE_PAGES = "glibc.malloc.hugetlb=1"


class BenchmarkError(MemjaxError):
    """A timing could not be taken."""


class Worker(Protocol):
    """A `TableStep` somewhere, reached by the names of its methods."""

    case: TableCase

    def ask(self, call: str, n: int = 0) -> None:
        """Begin `describe`, `start`, `steps`, `parts` or `finish`."""
        ...

    def answer(self) -> Any:
        """The result of what was asked last; BenchmarkError if it failed."""
        ...

    def close(self) -> None:
        """End it, whatever it is doing."""
        ...


class Local:
    """A worker in this process."""

    def __init__(self, case: TableCase, batches: Path, huge_pages: bool) -> None:
        del huge_pages  # chosen when this process started
        self.case = case
        self._step = TableStep(case, *load_batches(batches))
        self._asked = ("describe", 0)

    def ask(self, call: str, n: int = 0) -> None:
        self._asked = (call, n)

    def answer(self) -> Any:
        return answer(self._step, *self._asked)

    def close(self) -> None:
        """Nothing to end."""


class Process:
    """A worker in a process of its own; it asks itself `describe` first."""

    def __init__(self, case: TableCase, batches: Path, huge_pages: bool) -> None:
        self.case = case
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(asdict(case)), str(batches)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(os.environ, huge_pages),
        )

    def ask(self, call: str, n: int = 0) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([call, n]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; `answer` says how

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            said = json.loads(line)
            if "error" not in said:
                return said["result"]
            raise BenchmarkError(f"{self._name()}: {said['error']}")
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().split("\n")
        last = next((line for line in reversed(words) if line.strip()), "")
        if code == -9:
            last = "killed, as when memory runs out; choose fewer rows"
        raise BenchmarkError(f"{self._name()} ended with code {code}: {last}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                pass

    def _name(self) -> str:
        return f"{self.case.optimizer} with {self.case.n_rows} rows"


def environment(before: Mapping[str, str], huge_pages: bool) -> dict[str, str]:
    """The variables of a worker: huge pages, and no device memory taken ahead."""
    after = {**before, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    tunables = [
        tunable
        for tunable in before.get("GLIBC_TUNABLES", "").split(":")
        if tunable and not tunable.startswith("glibc.malloc.hugetlb=")
    ]
    after["GLIBC_TUNABLES"] = ":".join(tunables + [HUGE_PAGES] * huge_pages)
    return after


def answer(step: TableStep, call: str, n: int) -> Any:
    """What a worker answers to one call, as plain JSON."""
    if call == "describe":
        import jax

        device = jax.devices()[0]
        return {
            "backend": jax.default_backend(),
            "device": f"{device.device_kind}",
            "need_bytes": step.need_bytes,
            "temp_bytes": step.temp_bytes,
        }
    if call == "start":
        step.start()
        return None
    if call in ("steps", "parts"):
        return getattr(step, call)(n)
    return step.counts() | {"huge_page_frac": huge_page_frac()}


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


def main(case: str, batches: str) -> None:
    """Answer the calls on stdin, one JSON line each, until it ends."""
    out, sys.stdout = sys.stdout, sys.stderr

    def say(**words: Any) -> None:
        out.write(json.dumps(words) + "\n")
        out.flush()

    try:
        step = TableStep(TableCase(**json.loads(case)), *load_batches(Path(batches)))
        say(result=answer(step, "describe", 0))
        for line in sys.stdin:
            say(result=answer(step, *json.loads(line)))
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        say(error=f"{type(error).__name__}: {first}")
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
