"""An object in a process of its own, called from outside.

What: `Program`, which object; `Process` and `Local`, handles on it; run as a program
    this module is the other end.
Why: huge pages are chosen when a process starts, memory comes back when it ends, two
    frameworks do not share threads, and several programs can take turns, so that the
    machine's mood meets them alike.
When not: tests and notebooks; `Local` does the same in this process.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from memjax.errors import MemjaxError

HUGE_PAGES = "glibc.malloc.hugetlb=1"


class BenchmarkError(MemjaxError):
    """A timing could not be taken."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a worker holds.

    Attributes:
        target: "module:function". The function makes an object whose method `describe`
            is asked first; other methods are called by name and answer plain JSON.
        arguments: of that function, plain JSON.
        name: says in errors which program it was.
        need_bytes: memory it takes at its peak, about; 0: not known beforehand.
        advice: what to do when it is killed, as when memory runs out.
        variables: of the environment, beside those of this process.
    """

    target: str
    arguments: Mapping[str, Any]
    name: str
    need_bytes: int = 0
    advice: str = "close other programs"
    variables: Mapping[str, str] = field(default_factory=dict)

    def make(self) -> Any:
        """The object, in this process."""
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(module), function)(**self.arguments)


class Worker(Protocol):
    """An object somewhere, reached by the names of its methods."""

    def ask(self, call: str, *arguments: Any) -> None:
        """Begin a method."""
        ...

    def answer(self) -> Any:
        """The result of what was asked last, at first of `describe`.

        BenchmarkError if it failed.
        """
        ...

    def close(self) -> None:
        """End it, whatever it is doing."""
        ...


class Local:
    """A worker in this process."""

    def __init__(self, program: Program, huge_pages: bool) -> None:
        del huge_pages  # chosen when this process started
        self._object = program.make()
        self._asked: list[Any] = ["describe"]

    def ask(self, call: str, *arguments: Any) -> None:
        self._asked = [call, *arguments]

    def answer(self) -> Any:
        return answer(self._object, self._asked)

    def close(self) -> None:
        """Let the object go."""
        self._object = None


class Process:
    """A worker in a process of its own."""

    def __init__(self, program: Program, huge_pages: bool) -> None:
        self._program = program
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                __name__,
                program.target,
                json.dumps(dict(program.arguments)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(os.environ, huge_pages) | dict(program.variables),
        )

    def ask(self, call: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([call, *arguments]) + "\n")
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
            raise BenchmarkError(f"{self._program.name}: {said['error']}")
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().split("\n")
        last = next((line for line in reversed(words) if line.strip()), "")
        if code == -9:
            last = f"killed, as when memory runs out; {self._program.advice}"
        raise BenchmarkError(f"{self._program.name} ended with code {code}: {last}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                pass


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


def answer(of: Any, asked: list[Any]) -> Any:
    """What an object answers to [method, *arguments]."""
    call, *arguments = asked
    if call.startswith("_"):
        raise ValueError(f"{call!r} is no method for others")
    return getattr(of, call)(*arguments)


def main(target: str, arguments: str) -> None:
    """Answer the calls on stdin, one JSON line each, until it ends."""
    out, sys.stdout = sys.stdout, sys.stderr

    def say(**words: Any) -> None:
        out.write(json.dumps(words) + "\n")
        out.flush()

    try:
        program = Program(target=target, arguments=json.loads(arguments), name=target)
        made = program.make()
        say(result=answer(made, ["describe"]))
        for line in sys.stdin:
            say(result=answer(made, json.loads(line)))
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        say(error=f"{type(error).__name__}: {first}")
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
