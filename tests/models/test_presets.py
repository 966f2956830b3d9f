"""The published Engrams: exact layouts and sizes, by shapes alone."""

import dataclasses

import jax
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.layers.block import HyperConfig
from memjax.models.config import ModelConfig
from memjax.models.layouts import layouts, table_reads
from memjax.models.parameters import abstract_params, cost, labels
from memjax.models.presets import (
    DEEPSEEK_CLASSES,
    DEEPSEEK_IDS,
    engram_27b,
    engram_demo,
    hash_500k,
    v41_flash,
)


def model_of(memory, d_model=64, **changes):
    """A model with as many blocks and streams as the memory asks for."""
    streams = memory.n_branches
    return ModelConfig(
        vocab_size=DEEPSEEK_IDS,
        n_layers=memory.layers[-1] + 1,
        d_model=d_model,
        n_heads=2,
        n_kv_heads=2,
        d_ff=32,
        memories=(memory,),
        hyper=HyperConfig(n_streams=streams) if streams > 1 else None,
        **changes,
    )


def test_v41_flash_has_the_rows_of_the_release():
    model = model_of(v41_flash(), d_model=5120)
    first, last = (layouts(model)[layer] for layer in (1, 14))
    assert (first.n_rows, last.n_rows) == (384006168, 384016682)
    assert first.flat_primes[0] == 16000057 and first.flat_primes[-1] == 16000463
    assert last.flat_primes[0] == 16000477 and last.flat_primes[-1] == 16000889
    assert first.vocab_size == DEEPSEEK_CLASSES and first.pad_id == 2
    assert first.multipliers == (
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    )
    params = abstract_params(model)
    memory = params["block_1"]["memory"]
    assert memory["table"].shape == (384006168, 256)
    assert memory["kv"]["kernel"].shape == (6144, 5 * 5120)
    assert params["block_14"]["memory"]["table"].shape == (384016682, 256)
    assert cost(model, 16).table_params == (384006168 + 384016682) * 256


def test_v41_flash_in_fp8_has_the_bytes_of_the_release():
    memory = dataclasses.replace(v41_flash(), table_mode="fp8")
    model = model_of(memory)
    found = abstract_params(model)
    table = found["block_1"]["memory"]
    assert table["table_codes"].shape == (384006168, 256)
    assert table["table_scales"].shape == (384006168, 8)
    named = labels(found)["block_1"]["memory"]
    assert named["table_codes"] == named["table_scales"] == "frozen"
    sizes = cost(model, 16)
    n_rows = 384006168 + 384016682
    assert sizes.table_params == n_rows * 256
    assert sizes.table_bytes == n_rows * (256 + 8)
    assert sizes.table_bytes_per_token == 2 * 24 * (256 + 8)
    rows = cost(model_of(v41_flash()), 16)
    assert sizes.dense_params == rows.dense_params
    assert sizes.flops_per_token == rows.flops_per_token


def test_the_demo_has_the_primes_of_the_release():
    memory = engram_demo()
    found = layouts(model_of(memory, d_model=1024))
    assert found[1].primes[0][0] == 646403
    flat = [*found[1].flat_primes, *found[15].flat_primes]
    assert len(set(flat)) == 32 and min(flat) >= 646400
    # 512 wide an order.
    assert memory.row_width * memory.n_heads == 512
    assert memory.table_std == 1.0 and memory.conv_init == "uniform"


@pytest.mark.parametrize(
    ("preset", "n_params"), [(engram_27b, 5.79e9), (hash_500k, 128e6)]
)
def test_sizes_are_those_that_the_papers_quote(preset, n_params):
    sizes = cost(model_of(preset()), 16)
    np.testing.assert_allclose(sizes.table_params, n_params, rtol=1e-3)


def test_hash_500k_has_one_table_and_a_gate_for_each_layer():
    memory = hash_500k()
    model = model_of(memory)
    found = layouts(model)
    assert found[2] is found[4] is found[6]
    assert found[2].primes[0] == (500009, 500029)
    params = abstract_params(model)
    tables = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, label in jax.tree_util.tree_leaves_with_path(labels(params))
        if label == "table"
    ]
    assert tables == ["shared_hash_500k/table"]
    for layer in memory.layers:
        assert "value" in params[f"block_{layer}"]["memory"]
    assert table_reads(model)["shared_hash_500k/table"].rows == 3 * 4
    other = dataclasses.replace(memory, layers=(1,))
    with pytest.raises(ConfigError, match=r"memories\.1\.shared_table.*first layer 1"):
        dataclasses.replace(model, memories=(memory, other))
