"""A trained model with its value tables in 8-bit floats, to be read and not trained.

What: `fp8_model`, the config; `quantize_tables`, its variables from a run's parameters;
    `refuse_training`.
Why: a quarter of float32, in the form that DeepSeek-V4.1 ships its tables in.
When not: codes and scales of one array; those are of `ops.fp8`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from memjax.errors import ConfigError
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.layers.table import CODES, FP8_BLOCK, SCALES, TABLES_FP8
from memjax.models.config import ModelConfig
from memjax.models.memories import Memory
from memjax.models.parameters import abstract_variables, split_variables
from memjax.ops.fp8 import quantize_rows

_ENTRIES_AT_A_TIME = 2**24


def fp8_model(config: ModelConfig) -> ModelConfig:
    """The model with all its value tables in mode "fp8".

    Fast weights stay as they are: their table is not read but written to.

    Raises:
        ConfigError: no memory has a value table, or one cannot be in FP8 (rows that are
            no multiple of 32 wide; product keys that read all slots).
    """
    tables = [not isinstance(memory, FastWeightConfig) for memory in config.memories]
    if not any(tables):
        found = [type(memory).__name__ for memory in config.memories]
        raise ConfigError("model.memories", found, "a memory with a table, for FP8")
    memories = tuple(
        replace(memory, table_mode="fp8") if has_table else memory
        for memory, has_table in zip(config.memories, tables, strict=True)
    )
    return replace(config, memories=memories)


def quantize_tables(
    params: Any, config: ModelConfig, entries_at_a_time: int = _ENTRIES_AT_A_TIME
) -> dict[str, Any]:
    """The variables of `fp8_model(config)`, from the parameters of a trained model.

    Args:
        params: one tree of parameters, tables and state, as `load_run` gives it; tables
            undivided, in mode "dense" or "rows" (bfloat16 as uint16). Not changed.
        config: of the trained model.
        entries_at_a_time: the float32 copy that the quantiser makes is not larger
            (but one row at least).

    Returns:
        {"params": .., "tables_fp8": .., and what state the model has}; leaves that are
        no tables are those of `params`.

    Raises:
        ConfigError: as `fp8_model`.

    Cost: as `ops.fp8.quantize_rows`; at its end codes and scales stand twice.
    """
    model = fp8_model(config)
    flat = flatten_dict(params, sep="/")
    for path in flatten_dict(abstract_variables(model)[TABLES_FP8], sep="/"):
        table = path.removesuffix(CODES)
        if path.endswith(CODES) and table in flat:
            codes, scales = _quantized(flat.pop(table), entries_at_a_time)
            flat |= {table + CODES: codes, table + SCALES: scales}
    return split_variables(unflatten_dict(flat, sep="/"), model)


def _quantized(table_RW: Any, entries: int) -> tuple[jax.Array, jax.Array]:
    n_rows, width = table_RW.shape
    step = max(1, entries // width)
    quantize = jax.jit(lambda rows_RW: quantize_rows(rows_RW, FP8_BLOCK))
    parts = [quantize(table_RW[i : i + step]) for i in range(0, n_rows, step)]
    codes, scales = zip(*parts, strict=True)
    return jnp.concatenate(codes), jnp.concatenate(scales)


def refuse_training(memories: Sequence[Memory]) -> None:
    """ConfigError for a memory whose tables can only be read."""
    for i, memory in enumerate(memories):
        if memory.table_mode == "fp8":
            raise ConfigError(
                f"model.memories.{i}.table_mode",
                "fp8",
                "'dense' or 'rows' in training; tables in FP8 are only read "
                "(`memjax eval RUN --fp8`)",
            )
