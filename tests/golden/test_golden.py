"""Every recorded case of every manifest reproduces.

The recorded numbers come from the published reference code run on CPU, or from own
transcriptions of published algorithms; each manifest entry states its provenance and
each manifest its versions. Integers must be equal, float64 agree to 1e-9 and float32 to
2e-5 of the array's largest value.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.golden.case import Case, Manifest, Settings
from tests.golden.conftest import DEFAULT_ROOTS
from tests.golden.families import BUILT, NOT_BUILT, run


def test_recorded_case(case: Case, request: pytest.FixtureRequest) -> None:
    if case.dtype == "float64":
        errors = request.getfixturevalue("float64_errors")
        error = errors[case.manifest.root, case.name]
        assert not error, error
    else:
        run(case)


def test_every_case_of_a_manifest_is_run_or_listed(
    root: Path, planned: tuple[list[Case], list[Case]]
) -> None:
    run_names, listed_names = (
        [case.name for case in cases if case.manifest.root == root] for cases in planned
    )
    assert len(run_names) + len(listed_names) == len(Manifest(root).entries)
    assert sorted(run_names + listed_names) == sorted(Manifest(root).entries)


@pytest.mark.parametrize("folder", DEFAULT_ROOTS, ids=lambda folder: folder.name)
def test_every_file_here_stands_in_the_manifest(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names - {"manifest.json"} == set(Manifest(folder).entries)


def test_every_folder_of_recorded_numbers_is_run_by_default() -> None:
    folders = {path.parent for path in Path(__file__).parent.glob("*/manifest.json")}
    assert folders == set(DEFAULT_ROOTS)


def test_no_family_is_both_built_and_not() -> None:
    assert not set(BUILT) & set(NOT_BUILT)
    assert len(set(NOT_BUILT)) == len(NOT_BUILT)


def _folder(tmp_path: Path, source: Case, **changes: object) -> Case:
    """A folder with one copy of `source` under another name, its entry changed."""
    entry = dict(source.manifest.entries[source.name])
    entry |= changes
    name = "renamed" + Path(source.name).suffix
    data = (source.manifest.root / source.name).read_bytes()
    (tmp_path / name).write_bytes(data)
    text = json.dumps({"files": {name: entry}})
    (tmp_path / "manifest.json").write_text(text)
    return Manifest(tmp_path).case(name)


_LAYOUT = Manifest(DEFAULT_ROOTS[0]).case("layout_toy.json")


def test_a_case_runs_by_its_settings_not_its_name(tmp_path: Path) -> None:
    run(_folder(tmp_path, _LAYOUT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "unheard"}, "family 'unheard' is unknown"),
        ({"settings": {"rounds": 2}}, "settings.rounds differs"),
        ({"settings": {"seed": 6}}, "settings.seed differs"),
    ],
)
def test_an_unknown_family_or_setting_fails(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        run(_folder(tmp_path, _LAYOUT, **changes))


def test_a_setting_nobody_reads_or_of_unknown_value_fails() -> None:
    settings = Settings({"loss": "sum(output)", "rounds": 2})
    with pytest.raises(AssertionError, match="settings.loss = 'sum"):
        settings.take("loss", one_of=("sum(output*cotangent)",))
    with pytest.raises(AssertionError, match=r"without a meaning here: \['rounds'\]"):
        settings.done()
    with pytest.raises(AssertionError, match="settings.tau is missing"):
        settings.take("tau")


def test_a_wrong_number_fails(tmp_path: Path) -> None:
    case = _folder(tmp_path, _LAYOUT)
    case.data["layers"]["3"]["primes"][0][0] += 2
    with pytest.raises(AssertionError, match="primes: 1 of 9 differ"):
        run(case)


@pytest.mark.parametrize(("dtype", "allowed"), [("float64", 1e-9), ("float32", 2e-5)])
def test_floats_may_differ_by_a_share_of_the_largest(
    tmp_path: Path, dtype: str, allowed: float
) -> None:
    case = _folder(tmp_path, _LAYOUT)
    case.data.clear()
    want = np.array([1.0, -4.0], dtype)
    case.data["want"] = want
    case.close("want", want + np.array([0, 3 * allowed], np.float64))
    with pytest.raises(AssertionError, match="want: error"):
        case.close("want", want + np.array([5 * allowed, 0], np.float64))
    with pytest.raises(AssertionError, match="want: NaN"):
        case.close("want", want * np.nan)
