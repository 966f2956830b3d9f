"""Family normalizer: normal form and class key of single texts."""

from memjax.data.normal_form import class_key, normalize
from tests.golden.case import Case

_KEYS = {"text", "normalized", "key"}


def run(case: Case) -> None:
    case.expect_arrays({"cases"})
    for entry in case.data["cases"]:
        assert set(entry) == _KEYS, f"keys of {entry} are not {sorted(_KEYS)}"
        text = entry["text"]
        got = {"text": text, "normalized": normalize(text), "key": class_key(text, "")}
        assert got == entry, f"{got} for {entry}"
