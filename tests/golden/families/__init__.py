"""Which families of recorded cases are built, and which are not yet.

What: family name -> function that runs one case, and the list of those to come.
Why: a case of a family that stands in neither fails, so none is skipped unseen.
When not: the functions themselves stand one family a file.
"""

from collections.abc import Callable, Mapping

from tests.golden.case import Case
from tests.golden.families import (
    alg1,
    compression,
    csordas,
    fnv,
    fp8,
    fwd_demo,
    fwd_v41,
    fwpkm,
    gate,
    hash_ids,
    knnlm,
    layout,
    luc,
    meta,
    mhc,
    normalizer,
    peer,
    usage,
    xlm,
)


def _forward(case: Case) -> None:
    (fwd_v41 if "norm_eps" in case.settings else fwd_demo).run(case)


BUILT: Mapping[str, Callable[[Case], None]] = {
    "layout": layout.run,
    "hash_ids": hash_ids.run,
    "fnv": fnv.run,
    "gate": gate.run,
    "fwd": _forward,
    "alg1": alg1.run,
    "meta": meta.run,
    "fwpkm": fwpkm.run,
    "peer": peer.run,
    "usage": usage.run,
    "xlm": xlm.run,
    "luc": luc.run,
    "csordas": csordas.run,
    "knnlm": knnlm.run,
    "compression": compression.run,
    "normalizer": normalizer.run,
    "fp8": fp8.run,
    "mhc": mhc.run,
}

NOT_BUILT: tuple[str, ...] = ()


def run(case: Case) -> None:
    """Run one case; AssertionError, or the error of our function, when it fails."""
    assert case.family in BUILT, f"family {case.family!r} is unknown"
    BUILT[case.family](case)
    case.settings.done()
