"""What to read and how to cut it: the configuration of the data.

What: two frozen dataclasses of plain values, each checked when it is made.
Why: a run is described before any file is touched, and prints as JSON.
When not: how text files become documents is said to `prepare_text` instead.
"""

import math
from dataclasses import dataclass
from typing import Any

from memjax.errors import ConfigError

HASH_ON = ("device", "host")


def _check_int(field: str, value: Any, low: int, high: int | None = None) -> None:
    allowed = f"an integer >= {low}" if high is None else f"an integer {low}..{high}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        raise ConfigError(field, value, allowed)


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """One corpus of a mixture.

    Attributes:
        name: a recipe (`kjv`, `wikiart`, `gcide`, or `core28`, the three of them) or
            the path of a folder written by `memjax prepare`.
        weight: passes over the corpus in one epoch of the mixture, > 0. With 1.0
            everywhere the mixture is the concatenation; 2.0 shows a corpus twice an
            epoch (in two orders); 0.5 shows one half in one epoch and the other half
            in the next.
    """

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(
                "data.corpora.name", self.name, "a recipe or the path of a folder"
            )
        number = isinstance(self.weight, int | float)
        if not number or not math.isfinite(self.weight) or self.weight <= 0:
            raise ConfigError("data.corpora.weight", self.weight, "a finite number > 0")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The stream of batches of one run.

    Attributes:
        corpora: what is mixed, at least one.
        tokenizer: `bytes`, `deepseek`, or the path of a `tokenizers` JSON file.
        context: tokens of a row.
        batch_size: rows of a batch over all processes.
        seed: of the orders of documents and windows.
        shuffle_documents: False reads documents and windows in stored order.
        eval_stride: tokens by which the evaluation window moves, 1..context; each
            scored token sees at least context - eval_stride tokens before it, but for
            those near the beginning of a document.
        eval_batch_size: rows of an evaluation batch over all processes.
        n_threads: reading threads of a process; 0 reads when a batch is asked for.
        n_workers: reading processes; 0 (best below millions of tokens/s) has none.
            The batches do not depend on it.
        hash_on: where rows of memories that are addressed by tokens are looked up:
            "device", in the step; "host", by the reading threads and processes, whose
            batches then carry them. The rows are the same.
        cache_dir: where built corpora lie; None is $MEMJAX_CACHE or ~/.cache/memjax.
    """

    corpora: tuple[CorpusConfig, ...] = (CorpusConfig(name="kjv"),)
    tokenizer: str = "bytes"
    context: int = 256
    batch_size: int = 8
    seed: int = 0
    shuffle_documents: bool = True
    eval_stride: int = 128
    eval_batch_size: int = 16
    n_threads: int = 2
    n_workers: int = 0
    hash_on: str = "device"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if not self.corpora:
            raise ConfigError("data.corpora", self.corpora, "at least one corpus")
        if not isinstance(self.tokenizer, str) or not self.tokenizer:
            raise ConfigError(
                "data.tokenizer", self.tokenizer, "bytes, deepseek or a path"
            )
        _check_int("data.context", self.context, 1)
        _check_int("data.batch_size", self.batch_size, 1)
        _check_int("data.seed", self.seed, 0, 2**63 - 1)
        if not isinstance(self.shuffle_documents, bool):
            raise ConfigError(
                "data.shuffle_documents", self.shuffle_documents, "True or False"
            )
        _check_int("data.eval_stride", self.eval_stride, 1, self.context)
        _check_int("data.eval_batch_size", self.eval_batch_size, 1)
        _check_int("data.n_threads", self.n_threads, 0)
        _check_int("data.n_workers", self.n_workers, 0)
        if self.hash_on not in HASH_ON:
            raise ConfigError("data.hash_on", self.hash_on, f"one of {HASH_ON}")
