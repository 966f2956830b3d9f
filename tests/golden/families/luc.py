"""Family luc: product-key memories of lucidrains/product-key-memory."""

import numpy as np

from memjax.layers.product_key_config import ProductKeyConfig
from tests.golden.case import Case
from tests.golden.families.products import Arrays, Flat, reproduce

_BOTH = (False, True)


def run(case: Case) -> None:
    settings, arrays = case.settings, Arrays(case)
    heads, half = settings.take("heads"), settings.take("dim_head")
    relu = settings.take("non_competitive_gates", default=False, one_of=_BOTH)
    config = ProductKeyConfig(
        n_sub_keys=settings.take("num_keys"),
        key_width=2 * half,
        n_heads=heads,
        k=settings.take("topk"),
        query_bias=False,
        query_norm="layer"
        if settings.take("use_layernorm", default=True, one_of=_BOTH)
        else "none",
        key_init="normal",
        key_std=half**-0.5,
        activation="relu" if relu else "softmax",
        input_norm=settings.take("pre_layernorm", default=False, one_of=_BOTH),
        output_norm=settings.take("norm_output", default=False, one_of=_BOTH),
        value_width=arrays["grad_out"].shape[-1],
    )
    assert arrays["x"].shape[-1] == settings.take("dim")
    norms = [("input_norm/", "pre_layernorm")] if config.input_norm else []
    norms += [("output_norm/", "output_norm")] if config.output_norm else []
    norms += [("query/norm_", "norm")] if config.query_norm == "layer" else []

    def flat_of(kind: str) -> Flat:
        weight = arrays[kind + "to_queries.weight"].reshape(2, heads, half, -1)
        flat = {
            "table": arrays[kind + "values.weight"],
            "keys": np.swapaxes(arrays[kind + "keys"], 1, 2),
            "query/kernel_0": weight.transpose(3, 1, 0, 2).reshape(
                weight.shape[-1], -1
            ),
        }
        for ours, theirs in norms:
            flat[f"{ours}scale"] = arrays[f"{kind}{theirs}.weight"]
            flat[f"{ours}bias"] = arrays[f"{kind}{theirs}.bias"]
        return flat

    reproduce(arrays, config, flat_of)
    arrays.done()
