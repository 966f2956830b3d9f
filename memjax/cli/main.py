"""The `memjax` command: picks a subcommand, turns our errors into one line.

What: `main(argv)` -> exit code: 0, 1 (an error of the run), 2 (wrong usage).
Why: `--help` and typos answer at once; a subcommand's imports wait for its turn.
When not: each command is a module of its own beside this one.
"""

import contextlib
import difflib
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from memjax.errors import MemjaxError

COMMANDS = {
    "train": ("train", "train an experiment, or go on where it stopped"),
    "eval": ("evaluate", "bits per byte of a run on valid, or on test once"),
    "sample": ("sample", "text from a trained run"),
    "prepare": ("prepare", "build corpora, or token stores of your own text"),
    "sweep": ("sweep", "run the missing cells of a sweep"),
    "table": ("table", "the table of a sweep: means, deviations, differences"),
    "show": ("show", "config, shapes, parameters and costs; no device touched"),
    "bench": ("bench", "timings of parts, PyTorch's beside them"),
    "doctor": ("doctor", "devices, versions, disk and extras of this machine"),
}
TRACEBACK = "MEMJAX_TRACEBACK"


def usage() -> str:
    """The text of `memjax --help`."""
    commands = "\n".join(f"  {name:9}{line}" for name, (_, line) in COMMANDS.items())
    return (
        "usage: memjax COMMAND ...\n\n"
        "Memory layers for language models: train, measure, compare.\n\n"
        f"commands:\n{commands}\n\n"
        "memjax COMMAND --help      its options\n"
        "memjax train FILE --help   every field of that experiment\n"
        "memjax --version\n"
        "--debug-errors             (any command) the whole traceback of an error;\n"
        f"                           {TRACEBACK}=1 does the same\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; see `usage`."""
    try:
        code = _dispatch(argv)
    except BaseException:
        if not _failed_among_several():
            raise
        traceback.print_exc()
        code = 1
    if _failed_among_several():
        from memjax.parallel.processes import leave

        leave(code)
    return code


def _failed_among_several() -> bool:
    """Whether this is one of several processes and must not wait for the others."""
    processes = sys.modules.get("memjax.parallel.processes")
    return processes is not None and processes.failed()


def _dispatch(argv: Sequence[str] | None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    whole = "--debug-errors" in argv or os.environ.get(TRACEBACK, "") not in (
        "",
        "0",
    )
    argv = [word for word in argv if word != "--debug-errors"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"memjax {version('memjax')}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(COMMANDS)}"
        return _complain(f"unknown command {name!r}; {hint}", 2)
    try:
        module = importlib.import_module(f"memjax.cli.{COMMANDS[name][0]}")
        with _sigterm_unwinds():
            return module.run(rest)
    except MemjaxError as error:
        if whole:
            raise
        return _complain(str(error), getattr(error, "exit_code", 1))
    except SystemExit as stop:  # of the argument parser: 0 for help, 2 for usage
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:  # `memjax table FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a file in the way of a folder
        if whole or error.filename is None:
            raise
        return _complain(f"{error.filename}: {error.strerror}", 1)


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends a command through its `finally`s, which remove what is half done.

    Training and sweeps catch it themselves, to save first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(message: str, code: int) -> int:
    print("memjax: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
