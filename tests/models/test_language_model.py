"""The language model: what sees what, arrangements, scanning, records, precision."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.layers.engram import EngramConfig
from memjax.layers.precision import PrecisionConfig
from memjax.layers.record import METRICS
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.layouts import layouts
from memjax.models.parameters import abstract_params, cost, labels
from memjax.models.runs import runs
from tests.models.parameters import filled

MEMORY = EngramConfig(
    layers=(1,), n_heads=1, rows_per_head=53, row_width=4, conv_init="uniform"
)
BASE = ModelConfig(
    vocab_size=17,
    n_layers=3,
    d_model=8,
    n_heads=2,
    n_kv_heads=1,
    d_ff=12,
    memories=(MEMORY,),
)
TOKENS = jax.random.randint(jax.random.key(5), (2, 10), 0, 17)


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("train", "drop_memory", "mutable")
)
def forward(config, params, *arrays, rngs=None, **options):
    """Logits, compiled."""
    return LanguageModel(config).apply(
        {"params": params}, *arrays, rngs=rngs, **options
    )


def init(config, seed=0):
    """(model, params)."""
    return LanguageModel(config), filled(config, seed)


@pytest.mark.parametrize("arrangement", ["residual", "three_branch", "probability"])
def test_causal_in_every_arrangement(arrangement):
    layers = (3,) if arrangement == "probability" else (1,)
    memory = dataclasses.replace(MEMORY, layers=layers, mode="convex")
    config = dataclasses.replace(BASE, arrangement=arrangement, memories=(memory,))
    model, params = init(config)
    out, changed = (
        forward(model.config, params, t)
        for t in (TOKENS, TOKENS.at[:, 6].set((TOKENS[:, 6] + 1) % 17))
    )
    np.testing.assert_allclose(out[:, :6], changed[:, :6], atol=1e-6)
    assert np.abs(out[:, 6:] - changed[:, 6:]).max() > 1e-4


def test_packed_documents_equal_the_documents_alone():
    model, params = init(BASE)
    segments = jnp.array([[1] * 4 + [2] * 5 + [0]] * 2)
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0]] * 2)
    packed = forward(model.config, params, TOKENS, segments, positions)
    np.testing.assert_allclose(
        packed[:, :4], forward(model.config, params, TOKENS[:, :4]), atol=2e-5
    )
    np.testing.assert_allclose(
        packed[:, 4:9], forward(model.config, params, TOKENS[:, 4:9]), atol=2e-5
    )


def test_a_window_limits_what_is_seen():
    config = dataclasses.replace(BASE, n_layers=1, window=3, memories=())
    model, params = init(config)
    out, changed = (
        forward(model.config, params, t)
        for t in (TOKENS, TOKENS.at[:, 2].set((TOKENS[:, 2] + 1) % 17))
    )
    assert np.abs(out[:, 4] - changed[:, 4]).max() > 1e-5
    np.testing.assert_allclose(out[:, 5:], changed[:, 5:], atol=1e-6)


def test_probability_mixes_two_distributions():
    memory = dataclasses.replace(MEMORY, layers=(3,))
    config = dataclasses.replace(
        BASE, arrangement="probability", memories=(memory,), memory_share=0.25
    )
    model, params = init(config)
    mixed = forward(model.config, params, TOKENS)
    np.testing.assert_allclose(jnp.exp(mixed).sum(-1), 1, rtol=1e-5)
    backbone = jax.nn.softmax(forward(model.config, params, TOKENS, drop_memory=True))
    share = (jnp.exp(mixed) - 0.75 * backbone) / 0.25
    np.testing.assert_allclose(share.sum(-1), 1, rtol=1e-4)
    assert share.min() > -1e-6
    assert np.abs(share - backbone).max() > 1e-3


def test_three_branch_weighs_attention_memory_and_feed_forward():
    config = dataclasses.replace(BASE, arrangement="three_branch")
    model, params = init(config)
    block = params["block_1"]
    assert {"w_attn", "w_mem", "w_ffn"} <= set(block)
    off = jax.tree.map(lambda x: x, params)
    off["block_1"] = {**block, "w_mem": jnp.zeros(())}
    np.testing.assert_allclose(
        forward(model.config, off, TOKENS),
        forward(model.config, params, TOKENS, drop_memory=True),
        atol=1e-5,
    )


def test_scanned_blocks_equal_single_blocks():
    config = dataclasses.replace(BASE, n_layers=5, memories=(MEMORY,))
    assert [(a, n) for a, n, _ in runs(config)] == [(0, 1), (1, 1), (2, 3)]
    model, params = init(config)
    plain = dict(params)
    stacked = plain.pop("blocks_2_4")
    for i in range(3):
        plain[f"block_{2 + i}"] = jax.tree.map(lambda x, i=i: x[i], stacked)
    single = LanguageModel(dataclasses.replace(config, scan_layers=False))
    np.testing.assert_allclose(
        forward(model.config, params, TOKENS),
        forward(single.config, plain, TOKENS),
        atol=1e-5,
    )


def test_the_program_does_not_grow_with_depth():
    def size(n_layers):
        config = dataclasses.replace(BASE, n_layers=n_layers, memories=())
        model = LanguageModel(config)
        params = abstract_params(config)
        lowered = jax.jit(model.apply).lower({"params": params}, TOKENS)
        return len(lowered.as_text().splitlines())

    assert size(24) <= 1.05 * size(2)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_rematerialised_gradients_are_the_same(scan_layers):
    config = dataclasses.replace(BASE, n_layers=4, scan_layers=scan_layers)
    model, params = init(config)

    def loss(config):
        def value(p):
            out = LanguageModel(config).apply(
                {"params": p}, TOKENS, train=True, rngs={"dropout": jax.random.key(0)}
            )
            return jnp.sum(jnp.sin(out))

        return jax.jit(jax.grad(value))(params)

    plain, remat = loss(config), loss(dataclasses.replace(config, remat=True))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        plain,
        remat,
    )
    text = str(
        jax.make_jaxpr(
            lambda p: LanguageModel(dataclasses.replace(config, remat=True)).apply(
                {"params": p}, TOKENS
            )
        )(params)
    )
    assert "remat" in text or "checkpoint" in text


def records(model, params, **options):
    """What the blocks record in one pass."""
    _, state = forward(model.config, params, TOKENS, mutable=METRICS, **options)
    return state[METRICS]


def test_p26_a_scanned_blocks_have_masks_of_their_own():
    """Three scanned blocks with dropout 0.5: three masks, the same for the same key.

    The blocks share weights whose branches hardly move the stream, so that their
    branches have equal RMS unless their masks differ.
    """
    config = dataclasses.replace(BASE, n_layers=3, dropout=0.5, memories=())
    model, params = init(config)
    blocks = jax.tree.map(
        lambda x: jnp.broadcast_to(x[:1], x.shape), params["blocks_0_2"]
    )
    for branch in ("attention", "feed_forward"):
        blocks[branch]["out"]["kernel"] *= 1e-4
    params = {**params, "blocks_0_2": blocks}

    def rms(seed, train=True):
        rngs = {"dropout": jax.random.key(seed)}
        found = records(model, params, train=train, rngs=rngs)
        return np.asarray(found["blocks_0_2"]["feed_forward_rms"])

    off = rms(0, train=False)
    np.testing.assert_allclose(off, off[0], rtol=1e-3)
    a, b, c = rms(0)
    assert min(abs(a / b - 1), abs(b / c - 1), abs(a / c - 1)) > 5e-3
    np.testing.assert_array_equal(rms(0), rms(0))
    assert (rms(0) != rms(1)).all()


def test_p26_b_records_of_scanned_blocks_have_the_layer_axis_in_front():
    """Two scanned blocks: shape (2,); after three steps one value, not three."""
    config = dataclasses.replace(BASE, n_layers=2, memories=())
    model, params = init(config)
    variables = {"params": params}
    for _ in range(3):
        _, state = model.apply(variables, TOKENS, mutable=[METRICS])
        variables |= state
        found = state[METRICS]["blocks_0_1"]
        assert set(found) == {"attention_rms", "feed_forward_rms", "stream_rms"}
        assert all(x.shape == (2,) for x in found.values())


def test_labels_follow_the_names_of_the_leaves():
    config = dataclasses.replace(BASE, n_layers=5)
    params = abstract_params(config)
    found = labels(params)
    assert found["embedding"] == found["head"] == "embedding"
    assert found["final_norm"]["scale"] == "vector"
    engram = found["block_1"]["memory"]
    assert engram["table"] == "table"
    assert engram["value"] == {"kernel": "matrix", "bias": "vector"}
    assert engram["conv"] == "vector"
    stacked = found["blocks_2_4"]
    assert stacked["attention"]["query"]["kernel"] == "matrix"
    assert stacked["attention_norm"]["scale"] == "vector"
    without = labels(abstract_params(dataclasses.replace(config, memories=())))
    assert set(jax.tree.leaves(without)) == {"matrix", "vector", "embedding"}


def test_cost_counts_what_is_there():
    _, params = init(BASE)
    sizes = cost(BASE, context=10)
    n_rows = layouts(BASE)[1].n_rows
    assert sizes.table_params == n_rows * 4
    total = sum(x.size for x in jax.tree.leaves(params))
    assert sizes.dense_params == total - n_rows * 4
    assert sizes.table_bytes == 4 * sizes.table_params
    assert sizes.table_bytes_per_token == 2 * 4 * 4
    dense_flops = jax.jit(LanguageModel(dataclasses.replace(BASE, memories=())).apply)
    plain = dataclasses.replace(BASE, memories=(), scan_layers=False)
    model, params = init(plain)
    dense_flops = jax.jit(model.apply).lower({"params": params}, TOKENS).compile()
    counted = dense_flops.cost_analysis()["flops"] / TOKENS.size
    said = cost(plain, context=10).flops_per_token
    assert said < counted < 3 * said, "ours counts matrix products only"


def test_low_precision_is_close_and_stored_as_asked():
    low = PrecisionConfig(params="bfloat16", compute="bfloat16", tables="bfloat16")
    config = dataclasses.replace(BASE, precision=low)
    model, params = init(config)
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16"}
    out = forward(model.config, params, TOKENS)
    assert out.dtype == jnp.float32
    wide = jax.tree.map(jnp.float32, params)
    full = forward(BASE, wide, TOKENS)
    np.testing.assert_allclose(out, full, atol=0.1)


def test_an_id_outside_the_vocabulary_is_visible():
    model, params = init(BASE)
    for bad in (17, -1):
        out = forward(model.config, params, TOKENS.at[0, 4].set(bad))
        assert np.isnan(np.asarray(out[0, 4:])).all()
        assert np.isfinite(np.asarray(out[1])).all()


def test_jit_equals_no_jit():
    memory = dataclasses.replace(MEMORY, layers=(0,))
    model, params = init(dataclasses.replace(BASE, n_layers=1, memories=(memory,)))
    with jax.disable_jit():
        eager = model.apply({"params": params}, TOKENS)
    np.testing.assert_allclose(eager, forward(model.config, params, TOKENS), atol=1e-5)
