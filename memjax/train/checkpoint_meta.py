"""What a checkpoint belongs to, and whether that is what a run wants.

What: the JSON beside the arrays: every leaf's shape and dtype, the model's fingerprint.
Why: the library cuts, casts or fails with a message about argument types; we compare
    first and list every difference.
When not: reading the arrays themselves.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memjax.errors import CheckpointError
from memjax.train.state import TrainState, prng_implementation, state_leaves

_LISTED = 12


def plain(value: Any) -> Any:
    """`value` as JSON gives it back (tuples become lists); TypeError when it cannot."""
    return json.loads(json.dumps(value))


def make_meta(
    state: TrainState,
    fingerprint: Mapping[str, Any],
    progress: Mapping[str, Any],
    bpb: float | None,
    tables: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The meta item of a checkpoint; tables are their layout, where there are any."""
    leaves = state_leaves(state)
    meta = {
        "format": 1,
        "leaves": {path: _kind(leaf) for path, leaf in leaves.items()},
        "fingerprint": plain(fingerprint),
        "prng": prng_implementation(),
        "progress": plain(progress),
        "bpb": bpb,
        "tables": plain(tables),
    }
    return {**meta, "sha256": _sha256(meta)}


def read_meta(path: Path) -> dict[str, Any] | None:
    """The meta item of the step directory `path`, None when it cannot be read."""
    try:
        meta = json.loads((path / "meta" / "metadata").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(meta, dict):
        return None
    digest = meta.pop("sha256", None)
    return meta if digest == _sha256(meta) else None


def _sha256(meta: Mapping[str, Any]) -> str:
    text = json.dumps(meta, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def check_meta(
    path: Path,
    meta: Mapping[str, Any],
    wanted: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
) -> None:
    """Compare a checkpoint with what a run wants.

    Args:
        path: the step directory, for the message.
        meta: its meta item.
        wanted: path -> leaf with shape and dtype; only the saved leaves under the same
            first names (params, opt_state, ...) are compared.
        fingerprint: the fingerprint of the model as configured now.

    Raises:
        CheckpointError: lists every differing leaf or fingerprint field.
    """
    roots = {name.split("/")[0] for name in wanted}
    if "params" in roots and "step" in roots:
        roots |= {"ema", "opt_state", "table_state"}
    saved = {k: v for k, v in meta["leaves"].items() if k.split("/")[0] in roots}
    have = {name: _kind(leaf) for name, leaf in wanted.items()}
    lines = [f"{k}: saved {v}, wanted none" for k, v in saved.items() if k not in have]
    lines += [f"{k}: saved none, wanted {v}" for k, v in have.items() if k not in saved]
    lines += [
        f"{k}: saved {v}, wanted {have[k]}"
        for k, v in saved.items()
        if k in have and v != have[k]
    ]
    old, new = _flat(meta["fingerprint"]), _flat(plain(fingerprint))
    lines += [
        f"{k}: saved {_short(old.get(k))}, wanted {_short(new.get(k))}"
        for k in sorted(old.keys() | new.keys())
        if old.get(k) != new.get(k)
    ]
    if "step" in roots and meta["prng"] != prng_implementation():
        lines.append(
            f"PRNG implementation: saved {meta['prng']}, wanted {prng_implementation()}"
        )
    if lines:
        more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
        raise CheckpointError(
            f"{path} is a checkpoint of another configuration: "
            + "; ".join(sorted(lines)[:_LISTED])
            + more
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted name -> value."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat.update(_flat(inner, f"{prefix}.{name}" if prefix else str(name)))
    return flat


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
