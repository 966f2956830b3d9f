"""What the leaves of the model's parameter tree are.

What: a label per leaf for the optimizer, counts, and costs per token.
Why: groups follow from the model, so a model without memory has no empty group.
When not: renaming groups is the user's label rules, in the optimizer's config.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from memjax.layers.table import TABLES
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel

_LABELS = {
    "table": "table",
    "kernel": "matrix",
    "embedding": "embedding",
    "head": "embedding",
    "memory_head": "embedding",
}


def labels(params: Any) -> Any:
    """A tree of labels with the structure of `params`, from the leaves' names.

    "table": value tables; "matrix": kernels of dense layers (stacked ones, [L, in,
    out], too); "embedding": token embedding and output heads; "vector": all else
    (gains, biases, scalars, the taps of short convolutions).
    """

    def label(path: tuple[Any, ...], _: Any) -> str:
        return _LABELS.get(str(path[-1].key), "vector")

    return jax.tree_util.tree_map_with_path(label, params)


@lru_cache(maxsize=64)
def _abstract_variables(config: ModelConfig) -> Any:
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(LanguageModel(config).init, key, tokens)


def abstract_params(config: ModelConfig) -> Any:
    """Shapes and dtypes of the parameters; touches no device, allocates nothing.

    Tables in mode "rows" stand among them where they would in mode "dense", in the
    dtype they are stored in (uint16 for bfloat16).
    """
    return merge_tables(_abstract_variables(config))


def row_tables(config: ModelConfig) -> dict[str, int]:
    """{path: rows without padding} of the tables in mode "rows"."""
    leaves = jax.tree_util.tree_leaves_with_path(
        _abstract_variables(config).get(TABLES, {})
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape[0]
        for path, leaf in leaves
    }


def table_layer(path: str, config: ModelConfig) -> int:
    """The block that reads the table at `path`; n_layers for that of the head."""
    module = path.split("/")[0]
    return config.n_layers if module == "memory" else int(module.split("_")[1])


def merge_tables(variables: Any) -> Any:
    """One tree of parameters and tables, from the two collections of a model."""
    flat = flatten_dict(variables["params"])
    return unflatten_dict(flat | flatten_dict(variables.get(TABLES, {})))


def split_tables(params: Any, config: ModelConfig) -> dict[str, Any]:
    """The variables {"params", "tables"} of the model, from one tree of both.

    The inverse of `merge_tables`; without tables in mode "rows", only "params".
    """
    paths = row_tables(config)
    if not paths:
        return {"params": params}
    flat = flatten_dict(params, sep="/")
    tables = {path: flat.pop(path) for path in paths}
    return {
        "params": unflatten_dict(flat, sep="/"),
        TABLES: unflatten_dict(tables, sep="/"),
    }


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Sizes and arithmetic of a model.

    Attributes:
        dense_params, table_params: counts; dense_bytes, table_bytes: as stored.
        flops_per_token: of a forward pass, 2 per multiply-add, in matrix products and
            in attention over `context` tokens (each query sees half of them, or its
            window). A training step costs about three times that.
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
    kinds = jax.tree.leaves(labels(params))
    sizes = [int(np.prod(leaf.shape, dtype=np.int64)) for leaf in leaves]
    nbytes = [n * leaf.dtype.itemsize for n, leaf in zip(sizes, leaves, strict=True)]
    is_table = [kind == "table" for kind in kinds]
    matrix_params = sum(
        n for n, kind in zip(sizes, kinds, strict=True) if kind == "matrix"
    )
    heads = 1 + (config.arrangement == "probability")
    seen = min(context, config.window or context)
    pairs = seen - seen * (seen - 1) / (2 * context)
    flops = 2 * matrix_params + 2 * heads * config.vocab_size * config.d_model
    flops += int(4 * config.n_layers * pairs * config.d_model)
    itemsize = jnp.dtype(config.precision.tables).itemsize
    per_token = sum(
        len(memory.layers) * memory.n_columns * memory.row_width * itemsize
        for memory in config.memories
    )
    return ModelCost(
        dense_params=sum(n for n, t in zip(sizes, is_table, strict=True) if not t),
        table_params=sum(n for n, t in zip(sizes, is_table, strict=True) if t),
        dense_bytes=sum(n for n, t in zip(nbytes, is_table, strict=True) if not t),
        table_bytes=sum(n for n, t in zip(nbytes, is_table, strict=True) if t),
        flops_per_token=flops,
        table_bytes_per_token=per_token,
    )
