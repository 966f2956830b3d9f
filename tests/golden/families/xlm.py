"""Family xlm: product-key memories of arXiv:1907.05242's release, flat ones too."""

import re
from typing import Any

import numpy as np

from memjax.layers.product_key_config import ProductKeyConfig
from tests.golden.case import Case, Settings
from tests.golden.families.products import Arrays, Flat, reproduce

_BOTH = (False, True)
_KEYS = {"uniform": "uniform_half", "gaussian": "gaussian", "binary": "binary"}
_MODULE = re.compile(r"query_proj\.\w+?\.([\d.]+)\.(\w+)")
_AVERAGES = {"running_mean": "mean", "running_var": "var"}


def run(case: Case) -> None:
    settings, arrays = case.settings, Arrays(case)
    config = _config(settings, arrays["grad_out"].shape[-1])
    assert config.n_slots == settings.take("n_indices")
    assert config.n_rows == settings.take("mem_size")
    assert arrays["x"].shape[-1] == settings.take("input_dim")
    assert arrays["out"].shape[-1] == settings.take("output_dim")
    train = settings.take("mode", one_of=("eval", "train")) == "train"
    dropouts = (config.input_dropout, config.query_dropout, config.value_dropout)
    assert not (train and any(dropouts)), "dropout cannot be reproduced"
    # No case has a tie; these say how far from one it is.
    for name in ("topk_boundary_gap_min", "topk_order_gap_min"):
        if name in settings:
            settings.number(name, 0, np.inf)
    constants = {}
    if config.permutation_seed is not None:
        constants["permutations"] = arrays["buffer.head_permutations"]

    def flat_of(kind: str) -> Flat:
        flat = {"table": arrays[kind + "values.weight"]}
        if config.key_learned:
            flat["keys"] = arrays[kind + "keys"]
        elif kind == "param.":
            name = "buffer.keys" if "buffer.keys" in arrays else "param.keys"
            flat["fixed_keys"] = arrays[name]
        return flat | _query(arrays, config, kind)

    reproduce(
        arrays,
        config,
        flat_of,
        stats_of=lambda kind: _averages(arrays, config, kind),
        constants=constants,
        train=train,
    )
    arrays.done()


def _config(settings: Settings, out_width: int) -> ProductKeyConfig:
    # How values are shared, stored and trained does not change the layer.
    for name in ("mem_share_values", "mem_sparse"):
        settings.take(name, one_of=_BOTH)
    settings.take("mem_values_optimizer")
    for name, only in (
        ("mem_input2d", False),
        ("mem_query_kernel_sizes", ""),
        ("mem_query_residual", False),
    ):
        settings.take(name, one_of=(only,))
    kinds = ("pq_fast", "pq_default", "flat")
    flat = settings.take("mem_implementation", one_of=kinds) == "flat"
    settings.take("mem_product_quantization", one_of=(not flat,))
    v_dim = settings.take("mem_v_dim")
    assert v_dim in (-1, out_width), f"settings.mem_v_dim = {v_dim} is unknown"
    modulo = settings.take("mem_modulo_size")
    return ProductKeyConfig(
        n_sub_keys=settings.take("mem_n_keys"),
        key_width=settings.take("mem_k_dim"),
        n_heads=settings.take("mem_heads"),
        k=settings.take("mem_knn"),
        flat=flat,
        value_width=out_width,
        **_query_options(settings),
        normalize_query=settings.take("mem_normalize_query"),
        detach_input=settings.take("mem_query_detach_input"),
        key_init=_KEYS[settings.take("mem_keys_type", one_of=tuple(_KEYS))],
        key_normalized=settings.take("mem_keys_normalized_init"),
        key_shared=not settings.take("mem_use_different_keys"),
        key_learned=settings.take("mem_keys_learn"),
        activation="softmax" if settings.take("mem_score_softmax") else "none",
        temperature=settings.take("mem_temperature"),
        subtract=settings.take("mem_score_subtract") or "none",
        normalize=settings.take("mem_score_normalize"),
        permutation_seed=0 if settings.take("mem_shuffle_indices") else None,
        modulo_rows=modulo if modulo > 0 else None,
        value_init="zeros" if settings.take("mem_value_zero_init") else "normal",
        input_dropout=settings.take("mem_input_dropout"),
        query_dropout=settings.take("mem_query_dropout"),
        value_dropout=settings.take("mem_value_dropout"),
    )


def _query_options(settings: Settings) -> dict[str, Any]:
    sizes = settings.take("mem_query_layer_sizes")
    if isinstance(sizes, str):
        sizes = [int(size) for size in sizes.split(",") if size]
    hidden = tuple(sizes[1:-1])
    by_halves = settings.take("mem_multi_query_net", one_of=_BOTH)
    grouped = settings.take("mem_grouped_conv", one_of=_BOTH)
    assert by_halves or not grouped, "settings.mem_grouped_conv needs groups"
    shuffled = settings.take("mem_shuffle_query", one_of=_BOTH)
    assert not (shuffled and sizes), "settings.mem_shuffle_query needs no query net"
    if not sizes:
        query = "shuffled" if shuffled else "identity"
    else:
        assert len(sizes) >= 2 and sizes[0] == sizes[-1] == 0, f"sizes {sizes}"
        query = "per_head_half" if by_halves else "mlp" if hidden else "linear"
    normed = settings.take("mem_query_batchnorm", one_of=_BOTH)
    learned = settings.take("mem_query_net_learn", one_of=_BOTH)
    return dict(
        query=query,
        hidden_sizes=hidden,
        query_bias=settings.take("mem_query_bias", one_of=_BOTH),
        # Batch norm follows linear maps, and an identity has none to be learned.
        query_norm="batch" if normed and sizes else "none",
        query_learned=learned or not sizes,
    )


def _query(arrays: Arrays, config: ProductKeyConfig, kind: str) -> Flat:
    """The query network's parameters, or their gradients, under our paths."""
    folder = "query" if config.query_learned else "fixed_query"
    if kind == "grad." and not config.query_learned:
        return {}
    flat, n_linear, n_norm = {}, 0, 0
    for names in _modules(arrays, kind, "weight"):
        weight = _stacked(arrays, config, names)
        biases = [name.removesuffix("weight") + "bias" for name in names]
        has_bias = biases[0] in arrays
        bias = _stacked(arrays, config, biases) if has_bias else None
        if arrays[names[0]].ndim == 1:
            flat[f"{folder}/norm_{n_norm}/scale"] = weight
            flat[f"{folder}/norm_{n_norm}/bias"] = bias
            n_norm += 1
        else:
            if arrays[names[0]].ndim == 3:
                weight = weight[..., 0]
            flat[f"{folder}/kernel_{n_linear}"] = np.swapaxes(weight, -1, -2)
            if has_bias:
                flat[f"{folder}/bias_{n_linear}"] = bias
            n_linear += 1
    return flat


def _averages(arrays: Arrays, config: ProductKeyConfig, kind: str) -> Flat:
    folder = "query" if config.query_learned else "fixed_query"
    flat = {}
    for theirs, ours in _AVERAGES.items():
        for i, names in enumerate(_modules(arrays, kind, theirs)):
            flat[f"{folder}/norm_{i}/{ours}"] = _stacked(arrays, config, names)
    for names in _modules(arrays, kind, "num_batches_tracked"):
        for name in names:  # torch counts; with a momentum it does not use it
            assert arrays[name].size == 1
    return flat


def _modules(arrays: Arrays, kind: str, leaf: str) -> list[list[str]]:
    """Names of `leaf` by place in a network, each with one name for every network."""
    found: dict[int, dict[int, str]] = {}
    for name in arrays.case.data:
        match = _MODULE.fullmatch(name.removeprefix(kind))
        if name.startswith(kind) and match and match[2] == leaf:
            *net, place = map(int, match[1].split("."))
            found.setdefault(place, {})[net[0] if net else 0] = name
    return [[nets[g] for g in sorted(nets)] for _, nets in sorted(found.items())]


def _stacked(arrays: Arrays, config: ProductKeyConfig, names: list[str]) -> np.ndarray:
    """One array of all networks, [G, ...]; without that axis for a single network."""
    if config.query != "per_head_half":
        (name,) = names
        return arrays[name]
    n_nets = 2 * config.n_heads
    if len(names) == n_nets:
        return np.stack([arrays[name] for name in names])
    (name,) = names  # a grouped convolution: all networks in one array
    array = arrays[name]
    return array.reshape(n_nets, array.shape[0] // n_nets, *array.shape[1:])
