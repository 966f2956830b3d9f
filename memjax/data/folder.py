"""Prepared folders: one corpus, its train, valid and test stores, and what made it.

What: write such a folder so that it is there whole or not at all, and open it.
Why: a killed or concurrent `prepare` must leave nothing half-written in the way.
When not: the ids themselves are the business of `memjax.data.store`.

    corpus.json          name, tokenizer, what it was made from
    train/ valid/ test/  token stores; a split without documents has an empty store
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memjax.data.recipe import check_split
from memjax.data.store import TokenStore
from memjax.errors import DataError

ABOUT = "corpus.json"
FORMAT = 1


def is_prepared(folder: Path) -> bool:
    """Whether the folder has the mark of a prepared corpus."""
    return (folder / ABOUT).is_file()


def read_about(folder: Path) -> dict[str, Any]:
    """What `corpus.json` says; DataError when it is missing or damaged."""
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{folder} is no prepared corpus: no {ABOUT} in it") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise DataError(f"{path} is damaged or of another format than {FORMAT}")
    return about


def open_split(folder: Path, split: str) -> TokenStore:
    """The store of one split, its hashes checked."""
    return TokenStore(folder / check_split(split))


def write_folder(
    folder: Path, about: dict[str, Any], write: Callable[[Path], dict[str, Any] | None]
) -> bool:
    """Make a prepared folder in one move.

    Args:
        folder: where it shall be.
        about: for `corpus.json`.
        write: writes the stores into the temporary folder it is given; what it
            returns is added to `about`.

    Returns:
        True; False when another process had put the folder there first.

    Raises:
        DataError: the place cannot be written. Nothing is left behind then, nor after
            any error of `write`.
    """
    scratch = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        scratch.mkdir(parents=True)
        more = write(scratch) or {}
        content = {"format": FORMAT, **about, **more}
        (scratch / ABOUT).write_text(json.dumps(content, indent=1) + "\n")
        try:
            os.rename(scratch, folder)
        except OSError:
            if is_prepared(folder):
                return False
            raise
        return True
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
