"""What simple methods reach on the held-out parts, in bits per byte.

What: Kneser-Ney models and compressors per corpus, with the meaning of each column.
Why: a bits-per-byte figure means nothing without a mark beside it.
When not: corpora of your own; only the parts our recipes build were measured.

KN-n: interpolated modified Kneser-Ney over bytes (n - 1 bytes of context, three
discounts, uniform 1/256 at the bottom), trained on the train split of that corpus only.
PPMd, xz, zpaq: 8 * (size of C(train + valid) - size of C(train)) / bytes of valid, so
a compressor also learns from valid as it goes; a model with frozen weights does not.
Measured by us on exactly the splits of `memjax.data`.
"""

from typing import NamedTuple


class Yardstick(NamedTuple):
    """One method's figure on the valid part (`split="valid"`) of one corpus."""

    method: str
    bits_per_byte: float
    meaning: str


_MEANINGS = {
    "KN-1": "byte frequencies",
    "KN-3": "2 bytes of context: above it, nothing was learned",
    "KN-5": "4 bytes of context: a plain n-gram table",
    "KN-6": "5 bytes of context",
    "KN-8": "7 bytes of context",
    "xz -9e": "compressor, given train",
    "PPMd": "compressor, given train: the mark of a good small model",
    "zpaq -m5": "compressor, given train: the mark of a good small model",
}

_VALID: dict[str, tuple[tuple[str, float], ...]] = {
    "kjv": (
        ("KN-1", 4.367),
        ("KN-3", 2.521),
        ("KN-5", 1.681),
        ("KN-6", 1.544),
        ("KN-8", 1.443),
        ("xz -9e", 1.692),
        ("PPMd", 1.357),
        ("zpaq -m5", 1.354),
    ),
    "wikiart": (
        ("KN-1", 5.144),
        ("KN-3", 3.239),
        ("KN-5", 2.277),
        ("KN-6", 2.139),
        ("KN-8", 2.070),
        ("xz -9e", 2.107),
        ("PPMd", 1.790),
        ("zpaq -m5", 1.632),
    ),
    "gcide": (
        ("KN-1", 4.475),
        ("KN-3", 2.902),
        ("KN-5", 2.069),
        ("KN-6", 1.908),
        ("KN-8", 1.804),
        ("xz -9e", 1.976),
        ("PPMd", 1.673),
        ("zpaq -m5", 1.488),
    ),
}

# The test parts were measured for KN-8 only.
_TEST = {"kjv": 1.466, "wikiart": 2.246, "gcide": 1.806}

# Count models trained on the train parts of all three and scored on all valid parts.
_CORE28 = (("KN-5", 2.177), ("KN-8", 1.882))


def yardsticks(corpus: str, split: str = "valid") -> tuple[Yardstick, ...]:
    """The marks of one corpus, in the order listed; () when none were measured."""
    if split == "test":
        pairs = (("KN-8", _TEST[corpus]),) if corpus in _TEST else ()
    else:
        pairs = _CORE28 if corpus == "core28" else _VALID.get(corpus, ())
    return tuple(
        Yardstick(method, figure, _MEANINGS[method]) for method, figure in pairs
    )
