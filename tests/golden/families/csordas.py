"""Family csordas: product-key feed-forward layers of arXiv:2310.10837's release."""

import numpy as np

from memjax.layers.product_key_config import ProductKeyConfig
from tests.golden.case import Case
from tests.golden.families.products import Arrays, Flat, reproduce

_BOTH = (False, True)
# How values start for custom_init 0 to 5: normal or truncated, and the fan.
_STARTS = (
    ("normal", "width"),
    ("truncated_normal", "width"),
    ("truncated_normal", "reads"),
    ("truncated_normal", "slots"),
    ("normal", "reads"),
    ("normal", "slots"),
)


def run(case: Case) -> None:
    settings, arrays = case.settings, Arrays(case)
    d_model, heads = settings.take("n_dim"), settings.take("n_heads")
    n_keys, k = settings.take("n_keys"), settings.take("knn")
    all_slots = settings.take("dense_path", one_of=_BOTH)
    assert all_slots == (k == 0 or k >= n_keys), "settings.dense_path differs"
    activation = settings.take("activation", one_of=("relu", "softmax"))
    sliced = settings.take("slice_values", default=False, one_of=_BOTH)
    projected = settings.take("query_proj", one_of=_BOTH)
    bias = settings.take("query_bias", default=False, one_of=_BOTH)
    start = settings.take("custom_init", default=0, one_of=range(len(_STARTS)))
    value_init, value_fan = _STARTS[start]
    # A softmax goes over all heads, but for sliced values, and where heads are summed.
    joint = activation == "softmax" and not sliced and not all_slots
    config = ProductKeyConfig(
        n_sub_keys=n_keys,
        key_width=None,
        n_heads=heads,
        k=None if all_slots else k,
        query="linear" if projected else "identity",
        query_bias=bias,
        key_init=value_init,
        activation=activation,
        over="joint" if joint else "head",
        slice_values=sliced,
        value_init=value_init,
        value_fan=value_fan,
        value_width=arrays["grad_out"].shape[-1],
    )
    assert arrays["x"].shape[-1] == d_model

    def flat_of(kind: str) -> Flat:
        keys = [arrays[f"{kind}keys.{half}"] for half in (0, 1)]
        flat = {
            "table": arrays[kind + "values.weight"],
            "keys": np.stack(keys, axis=1),
        }
        if projected:
            flat["query/kernel_0"] = arrays[kind + "query_proj.weight"].T
            if bias:
                flat["query/bias_0"] = arrays[kind + "query_proj.bias"]
        return flat

    reproduce(arrays, config, flat_of)
    arrays.done()
