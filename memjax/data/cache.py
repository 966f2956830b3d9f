"""Built corpora, kept between runs.

What: finds the prepared folder of a recipe, building it the first time.
Why: a recipe takes seconds and a tokenizer minutes; the second run starts at once.
When not: a user's own text is prepared into a folder of the user's choice.

A cached folder is named after the recipe and a fingerprint of what it depends on, so
that nothing in the cache is ever out of date.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from memjax.data.corpora import CORPORA
from memjax.data.folder import is_prepared, write_folder
from memjax.data.recipe import SPLITS
from memjax.data.store import FORMAT, SHARD_TOKENS, write_store
from memjax.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
Progress = Callable[[str], None]


def cache_root(cache_dir: str | None) -> Path:
    """`cache_dir`, or else $MEMJAX_CACHE, or else ~/.cache/memjax."""
    chosen = cache_dir or os.environ.get("MEMJAX_CACHE") or "~/.cache/memjax"
    return Path(chosen).expanduser().absolute()


def cached_corpus(
    name: str,
    tokenizer: Tokenizer,
    cache_dir: str | None,
    progress: Progress | None = None,
) -> Path:
    """Prepared folder of a recipe of `CORPORA`, built if it is not there.

    Processes that build it at the same time all end up with the one that was first.

    Raises:
        MissingExtraError, DataError: see `build_corpus` and `write_folder`.
    """
    recipe = CORPORA[name]
    depends = [FORMAT, SHARD_TOKENS, recipe.text_sha256, tokenizer.fingerprint]
    mark = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:12]
    folder = cache_root(cache_dir) / f"{name}-{mark}"
    if is_prepared(folder):
        return folder
    report = progress or logger.info

    def write(scratch: Path) -> None:
        report(f"building {name}")
        splits = recipe.splits()
        for split in SPLITS:
            store = write_store(scratch / split, splits[split], tokenizer)
            report(
                f"{name} {split}: {store.n_documents} documents, {store.n_bytes} "
                f"bytes, {store.n_tokens} tokens"
            )

    about = {"name": name, "tokenizer": tokenizer.fingerprint, "recipe": name}
    write_folder(folder, about, write)
    return folder
