"""What the leaves of the model's parameter tree are.

What: a label per leaf for the optimizer, counts, and costs per token.
Why: groups follow from the model, so a model without memory has no empty group.
When not: renaming groups is the user's label rules, in the optimizer's config.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from memjax.layers.table import CODES, FP8_BLOCK, SCALES, TABLES, TABLES_FP8
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.layouts import table_reads

_LABELS = {
    "kernel": "matrix",
    "embedding": "embedding",
    "head": "embedding",
    "memory_head": "embedding",
}
_MULTIPLIED = ("kernel", "keys", "fixed_keys")
FIXED = "fixed_"
STATE = ("batch_stats", "fast_weights")
_COLLECTIONS = (TABLES, TABLES_FP8, *STATE)


def labels(params: Any) -> Any:
    """A tree of labels with the structure of `params`, from the leaves' names.

    "table": value tables; "matrix": kernels of dense layers (stacked ones, [L, in,
    out], too); "embedding": token embedding and output heads; "frozen": what stands
    under a name that starts with `fixed_`, and tables in FP8; "vector": all else
    (gains, biases, scalars, sub-keys, the taps of short convolutions).
    """

    def label(path: tuple[Any, ...], _: Any) -> str:
        names = [str(part.key) for part in path]
        if any(name.startswith(FIXED) for name in names) or _in_fp8(names[-1]):
            return "frozen"
        if _is_table(names[-1]):
            return "table"
        return _LABELS.get(_kind(names[-1]), "vector")

    return jax.tree_util.tree_map_with_path(label, params)


def _share_used(path: tuple[str, ...], config: ModelConfig) -> float:
    """The part of a kernel that a token is multiplied by: top_k of all experts."""
    if config.experts is None or "feed_forward" not in path:
        return 1.0
    layer = int(path[0].split("_")[1])
    if not config.has_experts(layer) or path[-2] == "router" or "shared" in path:
        return 1.0
    return config.experts.top_k / config.experts.n_experts


def _is_table(name: str) -> bool:
    return name == "table" or name.endswith("_table")


def _in_fp8(name: str) -> bool:
    """Whether it is one of the two leaves of a table in mode "fp8"."""
    return any(
        _is_table(name.removesuffix(part)) and name.endswith(part)
        for part in (CODES, SCALES)
    )


def _kind(name: str) -> str:
    """The name of a leaf without its number: kernel_0 is a kernel."""
    return re.sub(r"_\d+$", "", name)


@lru_cache(maxsize=64)
def abstract_variables(config: ModelConfig) -> Any:
    """Shapes and dtypes of the collections of a model, as its `init` makes them."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(LanguageModel(config).init, key, tokens)


def abstract_params(config: ModelConfig) -> Any:
    """Shapes and dtypes of the parameters; touches no device, allocates nothing.

    Tables in mode "rows" stand among them where they would in mode "dense", in the
    dtype they are stored in (uint16 for bfloat16), and those in mode "fp8" as two
    leaves, `table_codes` and `table_scales`. Running statistics and carried fast
    weights are no parameters.
    """
    variables = abstract_variables(config)
    return merge_variables(
        {name: tree for name, tree in variables.items() if name not in STATE}
    )


def row_tables(config: ModelConfig) -> dict[str, int]:
    """{path: rows without padding} of the tables in mode "rows"."""
    leaves = jax.tree_util.tree_leaves_with_path(
        abstract_variables(config).get(TABLES, {})
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape[0]
        for path, leaf in leaves
    }


def state_collections(config: ModelConfig) -> tuple[str, ...]:
    """Names of the collections that the forward pass of the model changes."""
    return tuple(name for name in STATE if abstract_variables(config).get(name))


def merge_variables(variables: Any) -> Any:
    """One tree of the collections of a model: parameters, tables, state."""
    flat = flatten_dict(variables["params"])
    for name in _COLLECTIONS:
        flat |= flatten_dict(variables.get(name, {}))
    return unflatten_dict(flat)


def split_variables(tree: Any, config: ModelConfig) -> dict[str, Any]:
    """The collections of a model, from one tree of them: "params" and the others.

    The inverse of `merge_variables`. Collections that the model lacks are left out, and
    leaves that `tree` lacks are not missed, so that a part of it can be split as well.
    """
    abstract = abstract_variables(config)
    held = [name for name in _COLLECTIONS if abstract.get(name)]
    if not held:
        return {"params": tree}
    flat = flatten_dict(tree, sep="/")
    found: dict[str, Any] = {}
    for name in held:
        paths = flatten_dict(abstract[name], sep="/")
        of_name = {path: flat.pop(path) for path in paths if path in flat}
        if of_name:
            found[name] = unflatten_dict(of_name, sep="/")
    return {"params": unflatten_dict(flat, sep="/"), **found}


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Sizes and arithmetic of a model.

    Attributes:
        dense_params, table_params: counts; dense_bytes, table_bytes: as stored (the
            scales of tables in FP8 are bytes, and no parameters).
        flops_per_token: of a forward pass, 2 per multiply-add, in matrix products,
            scores of sub-keys, weighted sums of rows, and in attention over `context`
            tokens (each query sees half of them, or its window; in a decoder block half
            of its source and, beside it, its local window). A training step costs about
            three times that.
        table_bytes_per_token: table bytes read per token in a forward pass.
    """

    dense_params: int
    table_params: int
    dense_bytes: int
    table_bytes: int
    flops_per_token: int
    table_bytes_per_token: int


def cost(config: ModelConfig, context: int) -> ModelCost:
    """Count parameters, bytes and arithmetic; see `ModelCost`. No device touched."""
    params = abstract_params(config)
    leaves = jax.tree.leaves(params)
    sizes = [int(np.prod(leaf.shape, dtype=np.int64)) for leaf in leaves]
    nbytes = [n * leaf.dtype.itemsize for n, leaf in zip(sizes, leaves, strict=True)]
    paths = [
        tuple(str(part.key) for part in path)
        for path, _ in jax.tree.leaves_with_path(params)
    ]
    is_table = [_is_table(path[-1]) or _in_fp8(path[-1]) for path in paths]
    is_value = [
        table and not path[-1].endswith(SCALES)
        for table, path in zip(is_table, paths, strict=True)
    ]
    multiplied = sum(
        n * _share_used(path, config)
        for n, path in zip(sizes, paths, strict=True)
        if _kind(path[-1]) in _MULTIPLIED
    )
    reads = table_reads(config).values()
    multiplied += sum(read.rows * read.width for read in reads if read.weighed)
    inner = sum(len(m.layers) * m.inner_flops for m in config.memories)
    heads = 1 + (config.arrangement == "probability")
    flops = int(2 * multiplied) + inner
    flops += 2 * heads * config.vocab_size * config.d_model
    flops += int(4 * _keys_seen(config, context) * config.d_model)
    itemsize = jnp.dtype(config.precision.tables).itemsize
    per_token = sum(
        read.rows
        * (
            read.width + read.width // FP8_BLOCK
            if read.mode == "fp8"
            else read.width * itemsize
        )
        for read in reads
    )
    return ModelCost(
        dense_params=sum(n for n, t in zip(sizes, is_table, strict=True) if not t),
        table_params=sum(n for n, v in zip(sizes, is_value, strict=True) if v),
        dense_bytes=sum(n for n, t in zip(nbytes, is_table, strict=True) if not t),
        table_bytes=sum(n for n, t in zip(nbytes, is_table, strict=True) if t),
        flops_per_token=flops,
        table_bytes_per_token=per_token,
    )


def _keys_seen(config: ModelConfig, context: int) -> float:
    """Keys that a query sees: mean over `context` tokens, summed over blocks."""

    def of(window: int | None) -> float:
        seen = min(context, window or context)
        return seen - seen * (seen - 1) / (2 * context)

    n_decoder = sum(config.decodes(layer) for layer in range(config.n_layers))
    found = (config.n_layers - n_decoder) * of(config.window)
    if config.ced is not None:
        local = config.ced.local_window
        found += n_decoder * (of(None) + (0 if local is None else of(local)))
    return found
