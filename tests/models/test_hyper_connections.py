"""A model with several residual streams: both forms, memories on one stream or all."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.layers.block import HyperConfig
from memjax.layers.engram import EngramConfig
from memjax.layers.memory_plus import MemoryPlusConfig
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.parameters import abstract_params, labels
from tests.models.parameters import filled

ENGRAM = EngramConfig(layers=(1,), n_heads=2, rows_per_head=53, row_width=4)
BASE = ModelConfig(
    vocab_size=17, n_layers=3, d_model=16, n_heads=2, n_kv_heads=2, d_ff=12
)
TOKENS = (jnp.arange(20) * 7 % 17).reshape(2, 10)
FORMS = ("own", "single_pass")


def logits(config, params, tokens=TOKENS, **options):
    apply = jax.jit(functools.partial(LanguageModel(config).apply, **options))
    return apply({"params": params}, tokens)


def streams(form, n_streams=2, **changes):
    hyper = HyperConfig(n_streams=n_streams, form=form)
    return dataclasses.replace(BASE, hyper=hyper, **changes)


def as_plain(params):
    """Mixing that a plain residual has: weights of 1, whatever the streams hold."""

    def fixed(path, leaf):
        names = [part.key for part in path]
        if not any(name.endswith("_mixing") for name in names):
            return leaf
        if names[-1] != "base":
            return jnp.zeros_like(leaf)
        return jnp.array([20.0, 0.0, 0.0] if leaf.size == 3 else leaf)

    return jax.tree_util.tree_map_with_path(fixed, params)


@pytest.mark.parametrize("form", FORMS)
def test_one_stream_with_unit_weights_is_the_plain_residual(form):
    config = streams(form, n_streams=1, scan_layers=False)
    params = as_plain(filled(config))
    plain = dataclasses.replace(BASE, scan_layers=False)
    kept = {
        name: {k: v for k, v in leaf.items() if not k.endswith("_mixing")}
        if isinstance(leaf, dict)
        else leaf
        for name, leaf in params.items()
    }
    want = logits(plain, kept)
    np.testing.assert_allclose(logits(config, params), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_streams_are_causal_and_scanned_blocks_equal_single_ones(form):
    scanned = streams(form)
    params = filled(scanned)
    out = logits(scanned, params)
    changed = logits(scanned, params, TOKENS.at[:, 7].add(1) % 17)
    np.testing.assert_allclose(changed[:, :7], out[:, :7], atol=1e-5)
    assert np.abs(changed[:, 7:] - out[:, 7:]).max() > 1e-4
    single = {k: v for k, v in params.items() if k != "blocks_0_2"}
    for i in range(3):
        single[f"block_{i}"] = jax.tree.map(lambda x, i=i: x[i], params["blocks_0_2"])
    apart = streams(form, scan_layers=False)
    np.testing.assert_allclose(logits(apart, single), out, atol=1e-4)
    again = streams(form, scan_layers=False, remat=True)
    np.testing.assert_allclose(logits(again, single), out, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_branches", [1, 2])
def test_memories_on_one_stream_or_on_all(form, n_branches):
    engram = dataclasses.replace(ENGRAM, n_branches=n_branches)
    keys = MemoryPlusConfig(
        layers=(1,), place="after_feed_forward", n_sub_keys=5, key_width=4, k=3
    )
    config = streams(form, memories=(engram, keys))
    params = filled(config)
    block = params["block_1"]
    assert ("memory_0_mixing" in block) == (n_branches == 1)
    assert "memory_1_mixing" in block
    assert block["memory_0"]["key_norm"]["scale"].shape == (n_branches, 16)
    out = logits(config, params)
    assert np.isfinite(out).all()
    assert np.abs(out - logits(config, params, drop_memory=True)).max() > 1e-4
    kinds = labels(abstract_params(config))["block_1"]["attention_mixing"]
    assert kinds == {"kernel": "matrix", "scale": "vector", "base": "vector"}


def test_what_does_not_fit_is_refused():
    three = dataclasses.replace(ENGRAM, n_branches=3)
    with pytest.raises(ConfigError, match=r"model\.memories\.0\.n_branches"):
        streams("own", memories=(three,))
    beside = dataclasses.replace(ENGRAM, n_branches=2, place="beside_feed_forward")
    with pytest.raises(ConfigError, match=r"model\.memories\.0\.place"):
        streams("own", memories=(beside,))
    with pytest.raises(ConfigError, match=r"model\.hyper"):
        streams("own", arrangement="three_branch")
    with pytest.raises(ConfigError, match=r"hyper\.form = 'both'"):
        HyperConfig(form="both")
    with pytest.raises(ConfigError, match=r"hyper\.n_streams = 0"):
        HyperConfig(n_streams=0)
