"""`memjax prepare`: corpora and token stores, ahead of training.

What: builds corpora by name or those of an experiment, or stores of your own text.
Why: a machine without network or time trains at once; errors in text show early.
When not: needed; `memjax train` prepares what it lacks.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from memjax.cli.arguments import OptionalDir, UsageError, parse

_Sources = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE [SOURCE ...]")
]


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Build corpora (kjv, wikiart, gcide, core28), those of an experiment file, or,
    with --out, a store of your own .txt, .jsonl and .parquet files and folders.

    memjax prepare kjv; memjax prepare notes/ --out data/notes
    """

    sources: _Sources
    """Corpus names, one experiment file, or text files and folders."""
    out: OptionalDir = None
    """New folder for your own text; name it in data.corpora afterwards."""
    tokenizer: str = "bytes"
    """bytes, deepseek, or a tokenizers JSON file."""
    documents: Literal["line", "file"] = "line"
    """What is one document of a .txt file."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8: an error that names its place, or replaced and counted."""
    text_field: str = "text"
    """Field of a .jsonl line, or column of a .parquet file."""
    cache_dir: OptionalDir = None
    """Where corpora are built; default $MEMJAX_CACHE or ~/.cache/memjax."""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    command = parse(Prepare, argv, "prepare")
    if not command.sources:
        raise UsageError("name a corpus, an experiment file, or text files with --out")
    _check_options(command)
    if command.out is not None:
        return _prepare_text(command, command.out)
    from memjax.data.config import CorpusConfig, DataConfig
    from memjax.data.folder import open_split
    from memjax.data.prepared import prepare
    from memjax.data.recipe import SPLITS
    from memjax.experiment import load_experiment

    if any(source.endswith((".py", ".json")) for source in command.sources):
        if len(command.sources) > 1:
            raise UsageError("one experiment file, or corpus names, not both")
        file = next(iter(command.sources))
        config = load_experiment(file).experiment.data
        if command.tokenizer not in ("bytes", config.tokenizer):
            raise UsageError(f"--tokenizer is not for {file}: the file names its own")
        if command.cache_dir is not None:
            config = replace(config, cache_dir=command.cache_dir)
    else:
        if any(Path(source).exists() for source in command.sources):
            raise UsageError("text of your own needs --out DIR for the store")
        config = DataConfig(
            corpora=tuple(CorpusConfig(name=name) for name in command.sources),
            tokenizer=command.tokenizer,
            cache_dir=command.cache_dir,
        )
    for part in prepare(config, progress=print).parts:
        for split in SPLITS:
            open_split(part.folder, split)  # checks the hashes of what was found
        print(f"{part.name}: {part.folder}")
    return 0


def _check_options(command: Prepare) -> None:
    """UsageError for an option that would be ignored."""
    own = command.out is not None
    names = ("cache_dir",) if own else ("documents", "errors", "text_field")
    for name in names:
        if getattr(command, name) != getattr(Prepare, name):
            option = name.replace("_", "-")
            where = "corpora" if own else "text of your own, with --out"
            raise UsageError(f"--{option} is only for {where}")


def _prepare_text(command: Prepare, out: str) -> int:
    from memjax.data.prepare import prepare_text

    made = prepare_text(
        command.sources,
        out,
        tokenizer=command.tokenizer,
        documents=command.documents,
        errors=command.errors,
        text_field=command.text_field,
        progress=print,
    )
    for split, store in made.stores.items():
        print(
            f"{split}: {store.n_documents} documents, {store.n_bytes} bytes, "
            f"{store.n_tokens} tokens"
        )
    noted = {name: count for name, count in asdict(made.counts).items() if count}
    print(f"read: {', '.join(f'{name} {count}' for name, count in noted.items())}")
    print(f"{'found' if made.reused else 'wrote'} {made.folder}")
    return 0
