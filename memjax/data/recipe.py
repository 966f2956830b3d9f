"""A corpus as a recipe: how its text is built, cut and checked.

What: the dataclass every file in `recipes/` fills, and the two ways to cut a text.
Why: the repository ships recipes and hashes, never the texts.
When not: a user's own text has no recipe; see `memjax.data.prepare`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from memjax.data.package_file import check_hash
from memjax.errors import ConfigError

SPLITS = ("train", "valid", "test")
BLOCK_BYTES = 32768


def split_of(unit: int, *, cycle: int = 20) -> str:
    """Split of unit number `unit`: of each `cycle` the last is test, and the one half a
    cycle before it is valid (9 and 19 of 20, 4 and 9 of 10)."""
    place = unit % cycle
    if place == cycle - 1:
        return "test"
    return "valid" if place == cycle // 2 - 1 else "train"


def blocks(text: bytes, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Cut a text into blocks of `size` bytes, each extended to the end of its line."""
    start = 0
    while start < len(text):
        newline = text.find(b"\n", start + size - 1)
        stop = len(text) if newline < 0 else newline + 1
        yield text[start:stop]
        start = stop


@dataclass(frozen=True, kw_only=True)
class CorpusRecipe:
    """One corpus.

    Attributes:
        name: what configs call it.
        title, licence: for people.
        extra: the pip extra that brings its file.
        units: builds the text and yields its units (= documents) in order; raises
            MissingExtraError or DataError when its file is not there or not right.
        cycle: see `split_of`.
        text_sha256: of all units joined.
        split_sha256: of the units of each split, joined; not every split need have one.
        split_bytes: bytes of each split.
    """

    name: str
    title: str
    licence: str
    extra: str
    units: Callable[[], Iterable[bytes]]
    cycle: int = 20
    text_sha256: str
    split_sha256: Mapping[str, str]
    split_bytes: Mapping[str, int]

    def splits(self) -> dict[str, list[bytes]]:
        """Documents of all splits, every hash checked."""
        units = list(self.units())
        check_hash(f"the text built for {self.name}", b"".join(units), self.text_sha256)
        found: dict[str, list[bytes]] = {split: [] for split in SPLITS}
        for number, unit in enumerate(units):
            found[split_of(number, cycle=self.cycle)].append(unit)
        for split, wanted in self.split_sha256.items():
            check_hash(f"{self.name} {split}", b"".join(found[split]), wanted)
        return found


def check_split(split: str) -> str:
    """`split` itself; ConfigError unless it is train, valid or test."""
    if split not in SPLITS:
        raise ConfigError("split", split, f"one of {', '.join(SPLITS)}")
    return split
