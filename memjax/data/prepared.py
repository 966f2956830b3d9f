"""The prepared corpora that a config names.

What: `prepare` finds or builds every corpus and takes mixtures apart.
Why: preparing without reading is a command; training and evaluation share the result.
When not: a user's own files become a prepared folder through `memjax.data.prepare`.
"""

from dataclasses import dataclass
from pathlib import Path

from memjax.data.cache import Progress, cached_corpus
from memjax.data.config import DataConfig
from memjax.data.corpora import CORPORA, MIXTURES, corpus_parts
from memjax.data.folder import is_prepared, open_split, read_about
from memjax.data.store import TokenStore
from memjax.data.tokenizer import Tokenizer, load_tokenizer
from memjax.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Part:
    """A prepared corpus inside a mixture: its name, its folder and its weight."""

    name: str
    folder: Path
    weight: float


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The tokenizer and the prepared corpora of a config, mixtures taken apart."""

    tokenizer: Tokenizer
    parts: tuple[Part, ...]

    def store(self, name: str, split: str) -> TokenStore:
        """The store of one split of the part called `name`."""
        for part in self.parts:
            if part.name == name:
                return open_split(part.folder, split)
        known = ", ".join(part.name for part in self.parts)
        raise ConfigError("part", name, f"one of {known}")


def _is_folder(name: str) -> bool:
    known = name in CORPORA or name in MIXTURES
    return not known and is_prepared(Path(name).expanduser())


def prepare(config: DataConfig, *, progress: Progress | None = None) -> Prepared:
    """Find every corpus of a config, building what is not in the cache.

    Args:
        config: what is wanted.
        progress: called with a line for people as building goes on; by default the
            lines go to the log.

    Raises:
        ConfigError: an unknown corpus, or one listed twice.
        MissingExtraError: a corpus or tokenizer whose package is not installed.
        DataError: a wrong hash, a damaged folder, one made with another tokenizer, or
            a cache that cannot be written.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    recipes = [corpus for corpus in config.corpora if not _is_folder(corpus.name)]
    for corpus in recipes:  # every name is known before the first is built
        corpus_parts(corpus.name)
    parts: list[Part] = []
    for corpus in config.corpora:
        path = Path(corpus.name).expanduser()
        if corpus in recipes:
            found = {
                name: cached_corpus(name, tokenizer, config.cache_dir, progress)
                for name in corpus_parts(corpus.name)
            }
        else:
            found = {str(read_about(path)["name"]): path}
        for name, folder in found.items():
            made_with = read_about(folder).get("tokenizer")
            if made_with != tokenizer.fingerprint:
                raise DataError(
                    f"data.tokenizer = {config.tokenizer!r} ({tokenizer.fingerprint}) "
                    f"is not allowed: {folder} was made with {made_with}"
                )
            if name in [part.name for part in parts]:
                raise ConfigError(
                    "data.corpora", corpus.name, f"each corpus once, {name} is there"
                )
            parts.append(Part(name=name, folder=folder, weight=corpus.weight))
    return Prepared(tokenizer=tokenizer, parts=tuple(parts))
