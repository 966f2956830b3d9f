"""Family fwd, V4.1 form: keys, gate, output with the residual, and gradients."""

from typing import Any

from memjax.layers.engram import Engram, EngramConfig
from memjax.ops.gates import gate_of
from tests.golden.case import Case
from tests.golden.families.fwd import compare, dtypes_of

_LAYOUT = (
    "[(M+1)*hidden, n_cols*head_dim]; first M*hidden outputs are keys "
    "(branch-major), last hidden outputs the shared value"
)
_PARAMS = ("table", "wkv", "q_weight", "k_weight")
_ARRAYS = {
    "row_ids",
    "x",
    "kv",
    "dot",
    "gate",
    "output",
    "cotangent",
    "grad_x",
    "token_mask",
} | {f"{kind}_{name}" for kind in ("param", "grad") for name in _PARAMS}


def run(case: Case) -> None:
    case.expect_arrays(_ARRAYS)
    settings, data = case.settings, case.data
    settings.take("wkv_layout", one_of=(_LAYOUT,))
    settings.take("clamp", one_of=(1e-6,))
    settings.take("dtype", default=case.dtype, one_of=(case.dtype,))
    n_branches, n_columns = settings.take("hc_mult"), settings.take("n_hash_cols")
    assert data["x"].shape[2:] == (n_branches, settings.take("hidden_size"))
    assert data["row_ids"].shape[-1] == n_columns
    config = EngramConfig(
        form="v41",
        row_width=settings.take("head_dim"),
        gate="signed_sqrt_copysign",
        norm_eps=settings.take("norm_eps"),
        n_branches=n_branches,
    )
    layer = Engram(config, len(data["param_table"]), dtypes_of(case), n_columns)
    options = {}
    if "token_mask" in data:
        options["token_mask_BT"] = data["token_mask"]
    records, called = compare(
        case,
        layer,
        method="__call__",
        hidden_key="x",
        tree_of=lambda prefix: _tree(data, prefix),
        rows=data["row_ids"],
        **options,
    )
    case.close("gate", records["gate"])
    case.close("kv", called["kv"])
    if not options:
        case.close("gate", gate_of(config.gate, data["dot"]))


def _tree(data: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {
        "table": data[prefix + "table"],
        "kv": {"kernel": data[prefix + "wkv"].T},
        "query_weight": data[prefix + "q_weight"],
        "key_weight": data[prefix + "k_weight"],
    }
