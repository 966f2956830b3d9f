"""A model whose feed-forwards are mixtures of experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.experiment import Experiment, shrink
from memjax.layers.experts import ExpertsConfig
from memjax.layers.memory_plus import MemoryPlusConfig
from memjax.layers.record import LOSSES, METRICS
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.parameters import abstract_params, cost, labels
from memjax.models.runs import runs
from tests.models.parameters import filled

EXPERTS = ExpertsConfig(n_experts=4, top_k=2, d_ff=12)
BASE = ModelConfig(
    vocab_size=17, n_layers=3, d_model=16, n_heads=2, n_kv_heads=2, d_ff=12
)
TOKENS = (jnp.arange(20) * 7 % 17).reshape(2, 10)
COUNTS = tuple(range(17, 0, -1))


def model_with(**options):
    return dataclasses.replace(BASE, experts=dataclasses.replace(EXPERTS, **options))


def outcome(config, params, tokens=TOKENS, segments=None):
    """Logits, records and losses."""
    model = LanguageModel(config, counts=COUNTS)
    apply = jax.jit(functools.partial(model.apply, mutable=[METRICS, LOSSES]))
    out, state = apply({"params": params}, tokens, segments)
    return out, state[METRICS], state.get(LOSSES, {})


def test_one_expert_is_the_dense_feed_forward():
    config = model_with(n_experts=1, top_k=1)
    params = filled(config)
    blocks = dict(params["blocks_0_2"])
    blocks["feed_forward"] = {
        name: {"kernel": leaf["kernel"][:, 0]}
        for name, leaf in blocks["feed_forward"].items()
        if name != "router"
    }
    dense = {"params": params | {"blocks_0_2": blocks}}
    want = jax.jit(LanguageModel(BASE).apply)(dense, TOKENS)
    out, _, _ = outcome(config, params)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


def test_scanned_blocks_hand_out_loads_and_losses_by_layer():
    config = model_with()
    params = filled(config)
    segments = jnp.ones_like(TOKENS).at[1, 7:].set(0)
    out, records, losses = outcome(config, params, TOKENS, segments)
    load = records["blocks_0_2"]["feed_forward"]["load"]
    assert load.shape == (3, 4)
    np.testing.assert_array_equal(load.sum(1), 17 * 2)
    balance = losses["blocks_0_2"]["feed_forward"]["balance"]
    assert balance.shape == (3,) and (balance >= 0.01 - 1e-6).all()
    single = {k: v for k, v in params.items() if k != "blocks_0_2"}
    for i in range(3):
        single[f"block_{i}"] = jax.tree.map(lambda x, i=i: x[i], params["blocks_0_2"])
    apart = dataclasses.replace(config, scan_layers=False)
    other, _, _ = outcome(apart, single, TOKENS, segments)
    np.testing.assert_allclose(other, out, atol=1e-4)
    quiet = model_with(balance_weight=0.0)
    assert outcome(quiet, params)[2] == {}


@pytest.mark.parametrize("routing", ["random", "balanced", "sliced", "bigram"])
def test_hash_routing_follows_the_tokens_alone(routing):
    config = model_with(routing=routing, weights="uniform")
    params = filled(config)
    out, records, _ = outcome(config, params)
    assert np.isfinite(out).all()
    load = records["blocks_0_2"]["feed_forward"]["load"]
    np.testing.assert_array_equal(load[0], load[2])
    _, again, _ = outcome(config, jax.tree.map(lambda x: -0.5 * x, params))
    np.testing.assert_array_equal(again["blocks_0_2"]["feed_forward"]["load"], load)
    assert "router" not in params["blocks_0_2"]["feed_forward"]
    if routing == "balanced":
        with pytest.raises(ConfigError, match="counts_V"):
            LanguageModel(config).apply({"params": params}, TOKENS)


def test_experts_in_some_blocks_only():
    config = dataclasses.replace(model_with(), expert_layers=(1,))
    assert [length for _, length, _ in runs(config)] == [1, 1, 1]
    params = abstract_params(config)
    assert "router" in params["block_1"]["feed_forward"]
    assert "router" not in params["block_0"]["feed_forward"]
    kinds = set(jax.tree.leaves(labels(params)["block_1"]["feed_forward"]))
    assert kinds == {"matrix"}
    dense, mixed = cost(BASE, 10), cost(config, 10)
    used = 3 * 16 * 12 * 2 + 16 * 4
    assert mixed.flops_per_token - dense.flops_per_token == 2 * (used - 3 * 16 * 12)
    for change in (
        {"expert_layers": (3,)},
        {"expert_layers": (1, 0)},
        {"expert_layers": (1.5,)},
        {"experts": None},
    ):
        with pytest.raises(ConfigError, match=r"model\.expert_layers"):
            dataclasses.replace(config, **change)
    with pytest.raises(ConfigError, match=r"experts\.balance_weight = -1"):
        dataclasses.replace(EXPERTS, balance_weight=-1)
    for name in ("experts", "ced", "hyper"):
        with pytest.raises(ConfigError, match=rf"model\.{name} = "):
            dataclasses.replace(BASE, **{name: {"n_experts": 4}})


def test_experts_that_a_memory_would_replace_are_refused():
    keys = MemoryPlusConfig(
        layers=(1,), place="instead_of_feed_forward", n_sub_keys=5, key_width=4, k=3
    )
    config = dataclasses.replace(model_with(), memories=(keys,), expert_layers=(0, 2))
    with pytest.raises(ConfigError, match=r"model\.expert_layers = \(0, 1\)"):
        dataclasses.replace(config, expert_layers=(0, 1))
    small = shrink(
        Experiment(name="e", model=dataclasses.replace(config, vocab_size=257))
    )
    assert small.model.expert_layers == (1,) and small.model.memories[0].layers == (0,)
    for name in ("window", "starve_window"):
        with pytest.raises(ConfigError, match=rf"model\.{name} = 'wide'"):
            dataclasses.replace(BASE, **{name: "wide"})
