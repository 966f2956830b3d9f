"""Family usage: how evenly slots are used, from recorded reads and weights."""

from memjax.evaluate.usage import TOP_PERCENT, UsageCounter
from tests.golden.case import TOLERANCE, Case

# Recorded name -> ours. The two KL of reads are one figure from two sources.
_NAMES = {
    "mem_used": "used_pct",
    "fwpkm_collision_ratio": "collision_ratio",
    "fwpkm_coverage_ratio": "coverage",
    "fwpkm_kld": "kl_u",
} | {
    f"mem_{figure}_{kind}": f"{figure}_{kind}"
    for figure in ("kl", "gini", *(f"top{percent}" for percent in TOP_PERCENT))
    for kind in ("w", "u")
}


def run(case: Case) -> None:
    case.expect_arrays({"in.indices", "in.weights"} | set(_NAMES))
    slots, weights = case.data["in.indices"], case.data["in.weights"]
    settings = case.settings
    axes = ("batches", "tokens", "heads", "knn")
    assert slots.shape == tuple(settings.take(axis) for axis in axes)
    counter = UsageCounter(settings.take("memory_size"), settings.take("heads"))
    for batch in zip(slots, weights, strict=True):
        counter.add(*batch)
    found = counter.summary()
    # The figures are stored in float64 but were added up in the entry's dtype.
    computed = case.manifest.entries[case.name]["compute_dtype"]
    for recorded, name in _NAMES.items():
        (want,) = case.data[recorded]
        error, allowed = abs(found[name] - want), TOLERANCE[computed] * abs(want)
        assert error <= allowed, f"{recorded}: error {error:.3g} above {allowed:.3g}"
    assert counter.n_non_finite == 0
