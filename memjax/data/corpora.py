"""The corpora that configs can name, and the text of their splits.

What: the table of recipes, core28 (three of them in order), and `build_corpus`.
Why: one place knows every name, and every hash is checked before a text is used.
When not: training reads token stores (`memjax.data.prepare`), not these lists.
"""

from collections.abc import Mapping

from memjax.data.package_file import check_hash
from memjax.data.recipe import SPLITS, CorpusRecipe, check_split
from memjax.data.recipes import gcide, kjv, wikiart
from memjax.errors import ConfigError

CORPORA: Mapping[str, CorpusRecipe] = {
    recipe.name: recipe for recipe in (kjv.RECIPE, wikiart.RECIPE, gcide.RECIPE)
}
# A mixture is its parts in this order, each split being the joined splits.
MIXTURES: Mapping[str, tuple[str, ...]] = {"core28": ("kjv", "wikiart", "gcide")}
_MIXTURE_SHA256 = {
    "core28": {
        "train": "96a74ac911b17687644b1595cf2d8feccb11247b7904a1bb2eca3c5782407adf",
        "valid": "00aa52deee5cc6f039d10398d70874d347b62fae809e030016fc9fe7ba205901",
        "test": "5990094cbe0aae8b8f4a81a7390c03505630f416162933cc86fc038a6a2c5352",
    }
}


def corpus_parts(name: str) -> tuple[str, ...]:
    """Recipes that make up `name`: itself, or the parts of a mixture.

    Raises:
        ConfigError: there is no corpus of this name.
    """
    if name in CORPORA:
        return (name,)
    if name in MIXTURES:
        return MIXTURES[name]
    known = ", ".join([*CORPORA, *MIXTURES])
    raise ConfigError(
        "data.corpora.name", name, f"one of {known}, or a folder of `memjax prepare`"
    )


def build_splits(name: str) -> dict[str, list[bytes]]:
    """Documents of every split of a corpus, hashes checked; see `build_corpus`."""
    parts = [CORPORA[part].splits() for part in corpus_parts(name)]
    joined = {split: [d for part in parts for d in part[split]] for split in SPLITS}
    for split, wanted in _MIXTURE_SHA256.get(name, {}).items():
        check_hash(f"{name} {split}", b"".join(joined[split]), wanted)
    return joined


def build_corpus(name: str, split: str) -> list[bytes]:
    """The documents of one split of a corpus, in order.

    Their concatenation is the split's text byte for byte. A document is the unit of
    the split: an article of wikiart, else a block of 32768 bytes that goes on to the
    end of its line.

    Args:
        name: `kjv`, `wikiart`, `gcide` or `core28`.
        split: `train`, `valid` or `test`; there is no default, so that nobody meets
            the test part by accident.

    Raises:
        ConfigError: unknown name or split.
        MissingExtraError: the package with the file is not installed.
        DataError: the file or the built text has another hash.

    Cost: the whole corpus is built in memory; gcide takes about 2 s and 0.2 GB.
    """
    check_split(split)
    return build_splits(name)[split]
