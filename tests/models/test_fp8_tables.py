"""A trained model with its tables in FP8: the same model with rounded rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.layers.engram import EngramConfig
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.layers.peer import PeerConfig
from memjax.layers.precision import PrecisionConfig
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.models.config import ModelConfig
from memjax.models.fp8_tables import fp8_model, quantize_tables, refuse_training
from memjax.models.language_model import LanguageModel
from memjax.models.parameters import merge_variables, split_variables
from memjax.ops.fp8 import dequantize_rows, quantize_rows
from tests.models.parameters import filled

KEYS = {"n_sub_keys": 5, "key_width": 4, "n_heads": 2, "k": 3}
ENGRAM = EngramConfig(layers=(0, 2), n_heads=1, rows_per_head=53, row_width=32)
PEER = PeerConfig(**KEYS, layers=(1,), place="beside_feed_forward")
POOL = ProductKeyConfig(
    **KEYS,
    layers=(1, 2),
    shared_table="pool",
    place="after_feed_forward",
)
FAST = FastWeightConfig(
    **KEYS, layers=(1,), value_width=6, chunk=2, place="before_attention"
)
MODEL = ModelConfig(
    vocab_size=17,
    n_layers=3,
    d_model=32,
    n_heads=2,
    n_kv_heads=2,
    d_ff=12,
    memories=(ENGRAM, PEER, POOL),
)
TOKENS = (jnp.arange(20) * 7 % 17).reshape(2, 10)
TABLES = (
    "block_0/memory/table",
    "block_1/memory_1/down_table",
    "block_1/memory_1/up_table",
    "block_2/memory_0/table",
    "shared_pool/table",
)


def names(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def rounded(table_RW):
    ids = np.arange(len(table_RW))
    return dequantize_rows(*quantize_rows(table_RW), ids).astype(table_RW.dtype)


def test_it_is_the_dense_model_of_rounded_rows():
    """Engram, experts, a shared table; all else stays as it is."""
    params = filled(MODEL)
    model = fp8_model(MODEL)
    assert [memory.table_mode for memory in model.memories] == ["fp8"] * 3
    variables = quantize_tables(params, MODEL)
    assert set(variables) == {"params", "tables_fp8"}
    assert list(names(variables["tables_fp8"])) == [
        f"{table}_{part}" for table in TABLES for part in ("codes", "scales")
    ]
    left = names(variables["params"])
    assert set(names(params)) - set(left) == set(TABLES)
    for name, leaf in left.items():
        assert leaf is names(params)[name]
    exact = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            rounded(leaf)
            if jax.tree_util.keystr(path, simple=True, separator="/") in TABLES
            else leaf
        ),
        params,
    )
    apply = jax.jit(LanguageModel(MODEL).apply)
    want = apply({"params": exact}, TOKENS)
    got = jax.jit(LanguageModel(model).apply)(variables, TOKENS)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    trained = apply({"params": params}, TOKENS)
    assert np.abs(got - trained).max() > 0.01
    merged = merge_variables(variables)
    again = split_variables(merged, model)
    jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_some_rows_at_a_time_and_from_any_storage():
    """From float32, from bfloat16 as uint16; in one piece or in many."""
    memory = dataclasses.replace(ENGRAM, layers=(0,), table_mode="rows")
    config = dataclasses.replace(
        MODEL, memories=(memory,), precision=PrecisionConfig(tables="bfloat16")
    )
    values = 0.3 * jax.random.normal(jax.random.key(0), (53 + 59, 32), jnp.bfloat16)
    stored = jax.lax.bitcast_convert_type(values, jnp.uint16)
    # A part of a tree is enough.
    params = {"block_0": {"memory": {"table": stored}}}
    for entries in (2**24, 32 * 50, 1):
        found = quantize_tables(params, config, entries)
        table = found["tables_fp8"]["block_0"]["memory"]
        codes, scales = quantize_rows(values)
        np.testing.assert_array_equal(table["table_codes"], codes)
        np.testing.assert_array_equal(table["table_scales"], scales)
    assert params["block_0"]["memory"]["table"] is stored


def test_fast_weights_stay_as_they_are():
    model = fp8_model(dataclasses.replace(MODEL, memories=(POOL, FAST)))
    assert [memory.table_mode for memory in model.memories] == ["fp8", "dense"]
    assert model.memories[1] == FAST


def test_what_has_no_table_in_fp8_is_refused():
    for memories in ((), (FAST,)):
        with pytest.raises(ConfigError, match="memories = .* a memory with a table"):
            fp8_model(dataclasses.replace(MODEL, memories=memories))
    narrow = dataclasses.replace(ENGRAM, row_width=16)
    with pytest.raises(ConfigError, match=r"memories\.1\.table_mode.*32.*table has 16"):
        fp8_model(dataclasses.replace(MODEL, memories=(PEER, narrow)))
    slots = dataclasses.replace(POOL, k=None, over="head")
    with pytest.raises(ConfigError, match="table_mode = 'fp8' .*all slots"):
        fp8_model(dataclasses.replace(MODEL, memories=(slots,)))
    with pytest.raises(ConfigError, match=r"memories\.0\.table_mode = 'fp8'.*training"):
        refuse_training(fp8_model(MODEL).memories)
    refuse_training(MODEL.memories)
