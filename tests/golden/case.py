"""One recorded case: a manifest entry and the file it names.

What: reads manifests, checks that every setting is known and used, compares arrays.
Why: cases are run by their settings alone, so unseen cases of the same form run too.
When not: what a family's numbers mean stands in families/.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = {"float64": 1e-9, "float32": 2e-5}


@dataclass(frozen=True)
class Manifest:
    """The cases of one folder."""

    root: Path

    @cached_property
    def entries(self) -> Mapping[str, Mapping[str, Any]]:
        return json.loads((self.root / "manifest.json").read_text("utf-8"))["files"]

    def case(self, name: str) -> "Case":
        entry = self.entries[name]
        settings = Settings(dict(entry.get("settings", {})))
        return Case(self, name, entry.get("family", ""), settings)

    def cases(self) -> list["Case"]:
        return [self.case(name) for name in self.entries]


@dataclass(frozen=True)
class Case:
    """A manifest entry with its file, an .npz of arrays or a .json of values."""

    manifest: Manifest = field(repr=False)
    name: str
    family: str
    settings: "Settings"

    @cached_property
    def data(self) -> dict[str, Any]:
        path = self.manifest.root / self.name
        if path.suffix == ".json":
            return json.loads(path.read_text("utf-8"))
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}

    @property
    def dtype(self) -> str:
        """The widest float in the file, "" when it holds integers only."""
        dtypes = {str(a.dtype) for a in self.data.values() if isinstance(a, np.ndarray)}
        return next((name for name in TOLERANCE if name in dtypes), "")

    def expect_arrays(self, known: set[str]) -> None:
        """Fail on arrays that nothing here reads."""
        unknown = sorted(set(self.data) - known)
        assert not unknown, f"arrays without a meaning here: {unknown}"

    def close(self, name: str, got: Any, want: Any = None) -> None:
        """`got` equals array `name` within the tolerance of the file's dtype."""
        want = self.data[name] if want is None else want
        got = np.asarray(got)
        assert got.shape == want.shape, f"{name}: shape {got.shape} for {want.shape}"
        assert not np.isnan(got).any(), f"{name}: NaN"
        if want.size == 0:
            return
        error = np.max(np.abs(got.astype(np.float64) - want))
        allowed = TOLERANCE[self.dtype] * np.max(np.abs(want))
        assert error <= allowed, f"{name}: error {error:.3g} above {allowed:.3g}"

    def equal(self, name: str, got: Any, want: Any = None) -> None:
        """`got` equals array `name` exactly."""
        want = self.data[name] if want is None else want
        got, want = np.asarray(got), np.asarray(want)
        assert got.shape == want.shape, f"{name}: shape {got.shape} for {want.shape}"
        n_different = int(np.sum(got != want))
        assert n_different == 0, f"{name}: {n_different} of {want.size} differ"


class Settings:
    """Settings of a case; `done` fails when one was never asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self._used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def take(self, key: str, *, default: Any = None, one_of: Any = None) -> Any:
        """The value of `key`, required unless a default is given."""
        self._used.add(key)
        if key not in self.values:
            assert default is not None, f"settings.{key} is missing"
            return default
        value = self.values[key]
        if one_of is not None:
            assert value in one_of, f"settings.{key} = {value!r} is unknown"
        return value

    def number(self, key: str, low: float, high: float) -> Any:
        """A value that describes the inputs and must lie in [low, high]."""
        value = self.take(key)
        assert not isinstance(value, str) and low <= value <= high, (
            f"settings.{key} = {value!r} is unknown"
        )
        return value

    def done(self) -> None:
        unknown = sorted(set(self.values) - self._used)
        assert not unknown, f"settings without a meaning here: {unknown}"
