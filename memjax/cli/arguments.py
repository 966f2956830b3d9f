"""Arguments of a command: its own options, and overrides of the experiment.

What: `parse` fills a command's frozen dataclass (tyro) and lists the overrides.
Why: every field of any experiment is an option, without naming them in each command.
When not: what an override means is `memjax.experiment.override`: the same rule as for
sweeps and saved configs, strict types, one-line errors. tyro would turn a list of
different memory configs into subcommands and print its errors as boxes.
"""

import contextlib
import dataclasses
import difflib
import io
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from memjax.errors import MemjaxError

Command = TypeVar("Command")
Overrides = list[tuple[str, str]]

File = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Scale = Literal["laptop", "gpu", "pod"]
OptionalText = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]
OptionalDir = Annotated[str | None, tyro.conf.arg(metavar="DIR")]

_BARE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=")


class UsageError(MemjaxError):
    """The command line itself is wrong; exit code 2."""

    exit_code = 2


def parse(cls: type[Command], argv: Sequence[str], name: str) -> Command:
    """A command without overrides; `--help` prints and exits with 0.

    Raises UsageError, one line, for what tyro would print as a box.
    """
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return tyro.cli(cls, args=list(argv), prog=f"memjax {name}")
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        complaint = _without_box(stderr.getvalue())
        raise UsageError(f"{complaint} (see memjax {name} --help)") from None


def _without_box(text: str) -> str:
    """The complaint inside a box of tyro's, and the option it thinks was meant.

    A box is a title, the complaint, and hints; rules part them, and whether there are
    borders depends on the terminal.
    """
    lines = [line.strip("\u2502| ") for line in text.splitlines()]
    parts: list[list[str]] = [[]]
    for line in [line for line in lines if line][1:]:
        if set(line) <= set("\u2500-\u2570\u256f+"):
            parts.append([])
        else:
            parts[-1].append(line)
    said, *others = [part for part in parts if part] or [["wrong usage"]]
    complaint = " ".join(said).rstrip(".")
    for title, *hints in others:
        if title.startswith("Perhaps you meant") and hints:
            complaint += f"; did you mean {hints[0]}?"
    return complaint


def parse_with_overrides(
    cls: type[Command], argv: Sequence[str], name: str
) -> tuple[Command, Overrides]:
    """A command whose unknown options are fields of the experiment.

    `--model.d-model 256`, `--model.d-model=256` and `model.d_model=256` are the same;
    a list takes several words, `--model.memories.0.orders 3 4 5`, so FILE comes first.

    Raises UsageError for an option without a value, or close to one of ours.
    """
    own, overrides = split(cls, argv)
    if any(word in ("-h", "--help") for word in own):
        files = [word for word in own if not word.startswith("-")]
        if files:
            _help_with_fields(cls, files[0], name)
    return parse(cls, own, name), overrides


def split(cls: type, argv: Sequence[str]) -> tuple[list[str], Overrides]:
    """Words for the command itself, and (path, text) of the overrides."""
    options = {
        field.name: get_type_hints(cls)[field.name] for field in dataclasses.fields(cls)
    }
    own: list[str] = []
    overrides: Overrides = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if not word.startswith("--"):
            if own and _BARE.match(word):
                overrides.append((name, text))
            else:
                own.append(word)
        elif key == "help" or key in options:
            own.append(word)
            if options.get(key) is not bool and key != "help" and words and not equals:
                own.append(words.pop(0))
        else:
            _check_typo(name, options)
            if not equals:
                values = []
                while words and not words[0].startswith(("--", "-h")):
                    values.append(words.pop(0))
                if not values:
                    raise UsageError(f"--{name} needs a value")
                text = " ".join(values)
            overrides.append((name, text))
    return own, overrides


def _check_typo(name: str, options: dict[str, Any]) -> None:
    if "." in name:
        return
    known = [option.replace("_", "-") for option in options]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if close:
        raise UsageError(f"unknown option --{name}; did you mean --{close[0]}?")


def _help_with_fields(cls: type, file: str, name: str) -> None:
    """The command's options, then every field of the experiment with its value."""
    from memjax.experiment import Experiment, load_experiment

    experiment = load_experiment(file).experiment
    try:
        tyro.cli(cls, args=["--help"], prog=f"memjax {name}")
    except SystemExit:
        pass
    print(f"\nfields of {file}, with their values there:\n")
    flat = tyro.conf.AvoidSubcommands[tyro.conf.FlagConversionOff[Experiment]]
    tyro.cli(flat, default=experiment, args=["--help"], prog=f"memjax {name} {file}")
