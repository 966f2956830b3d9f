"""One entry of a benchmark, and the circumstances under which it is measured.

What: `Entry`, a name and how to measure it; `Session`, what all entries of a command
    share; `open_program`, a worker that is closed at the end.
Why: what is timed is written down as data, so that it can be listed, chosen by name,
    and refused for lack of memory before anything starts.
When not: the turns of two sides; see `duel`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from memjax.benchmarks.figure import Figure
from memjax.benchmarks.process import Process, Program, Worker

OpenWorker = Callable[[Program, bool], Worker]  # the bool: huge pages


@dataclass(frozen=True, kw_only=True)
class Session:
    """How a command measures.

    Attributes:
        rates: of the machine, see `rates`.
        huge_pages: whether glibc is asked for huge pages, on both sides.
        with_peer: whether PyTorch is there.
        n_turns: turns of each side.
        turn_seconds: about how long a turn is; at least two calls.
        max_calls: most timed calls of a turn.
        variables: of the environment of every worker.
        say: told what is being done.
        open_worker: makes a worker of (program, huge pages).
    """

    rates: Mapping[str, float]
    huge_pages: bool = True
    with_peer: bool = True
    n_turns: int = 5
    turn_seconds: float = 1.0
    max_calls: int = 50
    variables: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda _: None
    open_worker: OpenWorker = Process

    def calls(self, seconds: float) -> int:
        """Timed calls of a turn when one takes so long."""
        return max(2, min(self.max_calls, int(self.turn_seconds / max(seconds, 1e-9))))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A figure that a benchmark takes.

    Attributes:
        name: "BENCHMARK/what/size".
        measure: takes it. BenchmarkError ends the command.
    """

    name: str
    measure: Callable[[Session], Figure]


@contextmanager
def open_program(session: Session, program: Program) -> Iterator[Worker]:
    """A worker of a program, not yet asked anything; closed at the end."""
    variables = {**session.variables, **program.variables}
    program = replace(program, variables=variables)
    worker = session.open_worker(program, session.huge_pages)
    try:
        yield worker
    finally:
        worker.close()


def ask(worker: Worker, call: str, *arguments: Any) -> Any:
    """Ask and wait."""
    worker.ask(call, *arguments)
    return worker.answer()
