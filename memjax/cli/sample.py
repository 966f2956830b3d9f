"""`memjax sample`: text from a trained run.

What: continues a prompt with the model of a run folder.
Why: a look says in seconds what a number hides.
When not: measuring; that is `memjax eval`.
"""

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from memjax.cli.arguments import Flag, parse
from memjax.cli.target import resolve
from memjax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Print text that a trained model writes."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder."""
    prompt: str = ""
    """Text to continue; empty begins a document."""
    n_tokens: int = 300
    """Tokens to write at most; the text ends where the model ends a document."""
    temperature: float = 0.8
    """0 takes the most probable token every time."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = None
    """Draw among the K most probable tokens only."""
    seed: int = 0
    """The same seed gives the same text."""
    fp8: Flag = False
    """Read the memory tables in 8-bit floats."""

    def check(self) -> None:
        """Raise ConfigError for an option out of range."""
        if self.n_tokens < 1:
            raise ConfigError("n-tokens", self.n_tokens, "at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError("temperature", self.temperature, "a number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError("top-k", self.top_k, "at least 1")
        if not 0 <= self.seed < 2**31:
            raise ConfigError("seed", self.seed, f"0 <= seed < {2**31}")


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    command = parse(Sample, argv, "sample")
    command.check()
    target = resolve(command.run)
    from memjax.run import sample
    from memjax.train.noise import quiet_libraries

    quiet_libraries()
    prompt = os.fsencode(command.prompt)  # the bytes as typed, UTF-8 or not
    text = sample(
        target.run_dir,
        prompt,
        n_tokens=command.n_tokens,
        temperature=command.temperature,
        top_k=command.top_k,
        seed=command.seed,
        fp8=command.fp8,
    )
    print(readable(prompt + text))
    return 0


def readable(text: bytes) -> str:
    """Bytes as text that is safe to print.

    What is no UTF-8, and control characters but newline and tab (a model writes
    terminal escapes too), show as replacement characters.
    """
    decoded = text.decode("utf-8", errors="replace")
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\ufffd"
        for char in decoded
    )
