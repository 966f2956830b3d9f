"""Family fwd, demo form: rows, every intermediate, output and gradients."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from memjax.layers.engram import Engram, EngramConfig
from memjax.ops.gates import combine
from memjax.ops.ngram_hash import host_ngram_rows
from memjax.ops.short_conv import short_conv
from tests.golden.case import Case
from tests.golden.families.fwd import compare, dtypes_of
from tests.golden.families.hash_ids import compressed_pad_id
from tests.golden.families.layout import layouts_of

_WEIGHTS = (
    "torch layout: Linear [out,in], conv [channels,1,k] "
    "with channel = branch*hidden + i"
)
_PARAMS = (
    "table",
    "value_weight",
    "value_bias",
    "key_weight",
    "key_bias",
    "key_norm",
    "query_norm",
    "conv_norm",
    "conv_weight",
)
_ARRAYS = {
    "input_ids",
    "compressed_ids",
    "hash_ids",
    "row_ids",
    "multipliers",
    "primes",
    "offsets",
    "hidden",
    "cotangent",
    "output",
    "grad_hidden",
    "rows",
    "value_shared",
    "gated_value",
    "short_conv_out",
    "gate",
} | {f"{kind}_{name}" for kind in ("param", "grad") for name in _PARAMS}


def run(case: Case) -> None:
    case.expect_arrays(_ARRAYS)
    settings, data = case.settings, case.data
    settings.take("weights", one_of=(_WEIGHTS,))
    assert settings.take("dtype") == case.dtype, "settings.dtype is not the file's"
    if settings.take("conv_zero", one_of=(False, True)):
        assert not data["param_conv_weight"].any(), "settings.conv_zero is wrong"
    rows_BTC, n_rows = _rows(case)
    n_branches = settings.take("hc_mult")
    assert data["hidden"].shape[2:] == (n_branches, settings.take("hidden_size"))
    # layouts_of has read the hash settings; here they are read again for the layer.
    config = EngramConfig(
        form="demo",
        orders=tuple(range(2, settings.take("max_ngram_size") + 1)),
        n_heads=settings.take("n_head_per_ngram"),
        rows_per_head=tuple(settings.take("engram_vocab_size")),
        row_width=settings.take("n_embed_per_ngram")
        // settings.take("n_head_per_ngram"),
        gate="signed_sqrt",
        norm_eps=settings.take("key_query_norm_eps"),
        kernel_size=settings.take("kernel_size"),
        dilation=settings.take("dilation"),
        conv_norm_eps=settings.take("conv_norm_eps"),
        n_branches=n_branches,
    )
    layer = Engram(config, n_rows, dtypes_of(case))
    records, called = compare(
        case,
        layer,
        method="branch",
        hidden_key="hidden",
        tree_of=lambda prefix: _tree(data, prefix, n_branches),
        rows=rows_BTC,
    )
    _check_intermediates(case, config, records, called)


def _rows(case: Case) -> tuple[np.ndarray, int]:
    settings, data = case.settings, case.data
    ids = {"raw": data["input_ids"], "compressed": data["compressed_ids"]}
    pad_id = compressed_pad_id(ids, settings.take("pad_id"))
    layout = layouts_of(settings, settings.take("vocab"), pad_id)[
        settings.take("layer")
    ]
    case.equal("multipliers", layout.multipliers)
    case.equal("primes", layout.primes)
    case.equal("offsets", layout.offsets)
    assert layout.n_rows == len(data["param_table"])
    rows_BTC = host_ngram_rows(data["compressed_ids"], layout)
    case.equal("row_ids", rows_BTC)
    case.equal("hash_ids", rows_BTC - np.array(layout.offsets))
    return rows_BTC, layout.n_rows


def _check_intermediates(
    case: Case, config: EngramConfig, records: Any, called: Any
) -> None:
    case.close("rows", jnp.reshape(records["rows"], case.data["rows"].shape))
    case.close("gate", records["gate"])
    case.close("value_shared", called["value"])
    shape = case.data["gated_value"].shape
    value_BTMD = jnp.broadcast_to(called["value"][:, :, None, :], shape)
    gated_BTMD = combine(value_BTMD, records["gate"], None, mode="sum")
    case.close("gated_value", gated_BTMD)
    convolved = short_conv(
        called["conv_norm"].reshape(*shape[:2], -1),
        _conv(case.data["param_conv_weight"]),
        dilation=config.dilation or max(config.orders),
    )
    case.close("short_conv_out", convolved.reshape(shape))


def _conv(weight: np.ndarray) -> np.ndarray:
    return weight[:, 0, :].T


def _tree(data: dict[str, Any], prefix: str, n_branches: int) -> dict[str, Any]:
    def dense(weight: np.ndarray, bias: np.ndarray) -> dict[str, np.ndarray]:
        return {"kernel": weight.T, "bias": bias}

    get = {name: data[prefix + name] for name in _PARAMS}
    keys = {
        f"key_{m}": dense(get["key_weight"][m], get["key_bias"][m])
        for m in range(n_branches)
    }
    return keys | {
        "table": get["table"],
        "value": dense(get["value_weight"], get["value_bias"]),
        "key_norm": {"scale": get["key_norm"]},
        "query_norm": {"scale": get["query_norm"]},
        "conv_norm": {"scale": get["conv_norm"]},
        "conv": _conv(get["conv_weight"]),
    }
