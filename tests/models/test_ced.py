"""A causal encoder-decoder: what it looks at, its cache, and its bounded replay."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.layers.cross_attention import CedConfig
from memjax.layers.engram import EngramConfig
from memjax.layers.memory_plus import MemoryPlusConfig
from memjax.models.config import ModelConfig
from memjax.models.decode import decoder, init_cache
from memjax.models.language_model import LanguageModel
from memjax.models.parameters import abstract_params, cost
from tests.models.parameters import filled

BASE = ModelConfig(
    vocab_size=17, n_layers=4, d_model=16, n_heads=4, n_kv_heads=2, d_ff=12
)
TOKENS = (jnp.arange(22) * 7 % 17).reshape(2, 11)
KINDS = {
    "own_kv": CedConfig(first_decoder=2),
    "share_kv": CedConfig(first_decoder=2, share_kv=True),
    "local": CedConfig(first_decoder=2, share_kv=True, local_window=3),
}


def model_with(kind, **changes):
    return dataclasses.replace(BASE, ced=KINDS[kind], **changes)


@functools.cache
def apply_of(config, last=None):
    return jax.jit(functools.partial(LanguageModel(config).apply, last=last))


def logits(config, params, *args, last=None):
    return apply_of(config, last)({"params": params}, *args)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_causal_and_stays_in_its_document(kind):
    config = model_with(kind)
    params = filled(config)
    segments = jnp.where(jnp.arange(11) < 6, 1, 2)[None].repeat(2, 0)
    positions = jnp.where(jnp.arange(11) < 6, jnp.arange(11), jnp.arange(11) - 6)
    positions = positions[None].repeat(2, 0)
    out = logits(config, params, TOKENS, segments, positions)
    later = logits(config, params, TOKENS.at[:, 8].add(1) % 17, segments, positions)
    np.testing.assert_allclose(later[:, :8], out[:, :8], atol=1e-5)
    assert np.abs(later[:, 8:] - out[:, 8:]).max() > 1e-4
    other = logits(config, params, TOKENS.at[:, 2].add(1) % 17, segments, positions)
    np.testing.assert_allclose(other[:, 6:], out[:, 6:], atol=1e-5)


def test_parameters_follow_what_is_shared():
    own, shared, local = (abstract_params(model_with(kind)) for kind in KINDS)
    stacked = own["blocks_2_3"]["attention"]
    assert set(stacked) == {"query", "out", "source"}
    assert set(shared["blocks_2_3"]["attention"]) == {"query", "out"}
    assert set(shared["source"]) == {"key", "value"}
    assert set(local["blocks_2_3"]["attention"]) == {"query", "out", "local"}
    assert set(shared["blocks_0_1"]["attention"]) == {"query", "key", "value", "out"}
    dense = cost(BASE, 11).flops_per_token
    assert cost(model_with("own_kv"), 11).flops_per_token == dense
    assert cost(model_with("share_kv"), 11).flops_per_token == dense - 2 * 2 * 16 * 8
    # The window is that of the encoder: a decoder query sees 6 of 11 keys in the mean.
    near = cost(model_with("own_kv", window=1), 11).flops_per_token
    assert dense - near == 4 * 2 * (6 - 1) * 16
    # Beside the source a query sees 3 keys of its own stream, fewer at the beginning.
    beside = cost(model_with("local"), 11).flops_per_token
    kernels = 2 * 2 * (2 * 16 * 8)
    pairs = 2 * (3 - (1 + 2) / 11)
    assert beside == int(dense - kernels / 2 + kernels + 4 * pairs * 16)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_every_decoder_block_reaches_the_source(kind):
    config = model_with(kind, scan_layers=False)
    params = filled(config)

    def loss(params):
        return jnp.sum(jnp.sin(LanguageModel(config).apply({"params": params}, TOKENS)))

    grads = jax.jit(jax.grad(loss))(params)
    shared = "source" in grads
    assert shared == (kind != "own_kv")
    found = (
        [grads["source"]]
        if shared
        else [grads[f"block_{i}"]["attention"]["source"] for i in (2, 3)]
    )
    for leaf in jax.tree.leaves(found):
        assert np.abs(leaf).max() > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [1, 3])
def test_bounded_replay_equals_the_full_forward(kind, last):
    """The decoder runs for the last tokens alone, with its memories."""
    keys = MemoryPlusConfig(layers=(3,), n_sub_keys=5, key_width=4, k=3)
    grams = EngramConfig(
        layers=(2,), n_heads=1, rows_per_head=53, row_width=4, kernel_size=0
    )
    config = model_with(kind, memories=(keys, grams))
    params = filled(config)
    want = logits(config, params, TOKENS)[:, -last:]
    got = logits(config, params, TOKENS, last=last)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_decoder_runs_for_the_last_tokens_only():
    """The arithmetic of a replay is the encoder's and, for one token, the rest."""
    config = dataclasses.replace(model_with("share_kv"), d_ff=256, scan_layers=False)
    params = filled(config)

    def flops(last):
        lowered = apply_of(config, last).lower({"params": params}, TOKENS)
        return lowered.compile().cost_analysis()["flops"]

    assert flops(1) < 0.7 * flops(None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_p10_cached_decoding_equals_the_full_forward(kind, scan_layers):
    config = model_with(kind, scan_layers=scan_layers)
    params = filled(config)
    want = logits(config, params, TOKENS)
    model = decoder(LanguageModel(config), 12)
    step = jax.jit(functools.partial(model.apply, mutable=["cache"]))
    for cuts in ((11,), (4, 4, 3), (1,) * 11):
        cache, pieces, start = init_cache(model, 2), [], 0
        for n in cuts:
            piece = TOKENS[:, start : start + n]
            out, state = step({"params": params, "cache": cache}, piece)
            cache, start = state["cache"], start + n
            pieces.append(out)
        np.testing.assert_allclose(jnp.concatenate(pieces, 1), want, atol=1e-5)


def test_starved_queries_see_no_further_in_their_own_stream_either():
    """Four blocks of windows of 2 reach 4 tokens back, whatever the local window."""
    config = model_with("local", starve_prob=1.0, starve_window=2)
    params = filled(config)
    apply = jax.jit(functools.partial(LanguageModel(config).apply, train=True))

    def starved(tokens):
        return apply({"params": params}, tokens, rngs={"dropout": jax.random.key(0)})

    moved = np.abs(starved(TOKENS.at[:, 2].add(1) % 17) - starved(TOKENS)).max((0, 2))
    assert moved[:7].tolist()[:2] == [0, 0] and (moved[2:7] > 1e-6).all()
    np.testing.assert_array_equal(moved[7:], 0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"model\.ced\.first_decoder = 4"):
        dataclasses.replace(BASE, ced=CedConfig(first_decoder=4))
    for options in ({"first_decoder": 0}, {"first_decoder": 1, "local_window": 0}):
        with pytest.raises(ConfigError, match=r"ced\."):
            CedConfig(**options)
    conv = EngramConfig(layers=(2,), n_heads=1, rows_per_head=53, row_width=4)
    config = model_with("own_kv", memories=(conv,))
    for bad in (1, 0, 12):
        with pytest.raises(ConfigError, match="last"):
            logits(config, filled(config), TOKENS, last=bad)
