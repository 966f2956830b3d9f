"""Measurements of a whole split on a small model with two memories.

What: figures equal those counted token by token here, from what the model records.
Why: a figure that is summed over batches, heads and memories is easily counted twice.
When not: the parts; each has its own file.
"""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.data.store import write_store
from memjax.data.tokenizer import ByteTokenizer
from memjax.errors import ConfigError
from memjax.evaluate.bits_per_byte import token_nats
from memjax.evaluate.memory_health import make_health
from memjax.evaluate.memory_measures import measure
from memjax.evaluate.memory_records import hashed_layouts, slot_tables
from memjax.layers.engram import EngramConfig
from memjax.layers.peer import PeerConfig
from memjax.layers.record import METRICS
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.parameters import merge_variables
from memjax.ops.ngram_hash import host_ngram_rows
from memjax.report.memory import memory_text
from tests.oracles.usage import usage

T = 8


def batch_of(seed, n_rows=2):
    """Bytes a to d; the second half of row 0 is context only, row 1 ends in padding."""
    rng = np.random.default_rng(seed)
    segments = np.array([[1] * 3 + [2] * 5, [1] * 6 + [0] * 2], np.int32)
    weights = (segments > 0).astype(np.float32)
    weights[0, 5:] = 0
    return {
        "tokens": rng.integers(97, 101, (n_rows, T)).astype(np.int32),
        "targets": rng.integers(97, 101, (n_rows, T)).astype(np.int32),
        "segments": segments,
        "positions": np.tile(np.arange(T, dtype=np.int32), (n_rows, 1)),
        "weights": weights,
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train") / "store"
    return write_store(folder, [b"abcabcabcd", b"aabb", b"abc"], ByteTokenizer())


HASHED = EngramConfig(layers=(0,), n_heads=1, rows_per_head=7, row_width=4)
EXPERTS = PeerConfig(
    layers=(0,), n_sub_keys=3, n_heads=2, k=2, gate="none", separate_tables=True
)
ENGRAM, PEER = "layer_0/memory_0", "layer_0/memory_1"
N_SLOTS = 9


def losses(model, params, batch, **options):
    """(nats per token, what the memories recorded)."""
    logits, state = model.apply(
        {"params": params},
        *(batch[name] for name in ("tokens", "segments", "positions")),
        mutable=[METRICS],
        **options,
    )
    return token_nats(logits, batch["targets"]), state[METRICS]


@pytest.fixture(scope="module")
def model():
    options = {"d_model": 8, "n_heads": 2, "n_kv_heads": 2, "d_ff": 8}
    config = ModelConfig(n_layers=1, memories=(HASHED, EXPERTS), **options)
    return LanguageModel(config)


@pytest.fixture(scope="module")
def params(model):
    tokens = jnp.zeros((1, 1), jnp.int32)
    return merge_variables(jax.jit(model.init)(jax.random.key(0), tokens))


@pytest.fixture(scope="module")
def batches(model, params):
    """Batches, with the losses and records of the model beside each."""
    found = []
    both = jax.jit(
        lambda params, batch: (
            losses(model, params, batch),
            losses(model, params, batch, drop_memory=True)[0],
        )
    )
    for seed in (0, 1):
        batch = batch_of(seed)
        (nats, metrics), without = jax.device_get(both(params, batch))
        found.append((batch, nats, without, metrics))
    return found


@pytest.fixture(scope="module")
def measured(model, params, batches, store):
    def gradients(params, batch, key):
        del key

        def nats(params):
            return jnp.sum(losses(model, params, batch)[0] * batch["weights"])

        value, grads = jax.value_and_grad(nats)(params)
        return (value, {"weight": jnp.sum(batch["weights"])}), (grads, {})

    return measure(
        model,
        params,
        iter([batch for batch, *_ in batches]),
        gradients=gradients,
        train_stores=[store],
        train_batch=batches[0][0],
        order=2,
    )


def reads_of(batches, mask, heads=(0, 1)):
    """(slot, weight) pairs of the tokens for which mask(batch) holds."""
    for batch, _, _, metrics in batches:
        found = metrics["block_0"]["memory_1"]
        for b, t in np.argwhere(mask(batch)):
            for h in heads:
                shift = N_SLOTS * h if len(heads) > 1 else 0
                slots, weights = found["slots"][b, t, h], found["weights"][b, t, h]
                yield from zip((slots + shift).tolist(), weights.tolist(), strict=True)


def test_losses_are_those_of_the_model_with_and_without_its_memories(measured, batches):
    nats, without = (
        np.concatenate([batch[i][batch[0]["weights"] > 0] for batch in batches])
        for i in (1, 2)
    )
    loss = measured["loss"]
    assert loss["n_tokens"] == len(nats) == 22
    assert loss["nats"] == pytest.approx(nats.mean(), rel=1e-5)
    assert loss["nats_without"] == pytest.approx(without.mean(), rel=1e-5)
    assert abs(loss["gain"]) > 1e-3
    gates = [found["gate"]["buckets"] for found in measured["memories"].values()]
    assert [len(buckets) for buckets in gates] == [10, 1]
    for buckets in (*gates, measured["frequency"]["buckets"]):
        held = [b for b in buckets if b["n_tokens"]]
        assert sum(b["n_tokens"] for b in held) == 22
        gain = sum(b["share"] * b["gain"] for b in held)
        assert gain == pytest.approx(loss["gain"], abs=1e-6)


def test_gates_are_those_of_scored_positions(measured, batches):
    gates = [
        metrics["block_0"]["memory_0"]["gate"][batch["weights"] > 0].reshape(-1)
        for batch, _, _, metrics in batches
    ]
    found = measured["memories"][ENGRAM]["gate"]["quantiles"]
    want = np.quantile(np.concatenate(gates), [0.05, 0.5, 0.99])
    got = [found[q] for q in ("q05", "q50", "q99")]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    constant = measured["memories"][PEER]["gate"]["quantiles"]
    assert set(constant.values()) == {1.0}


def test_slots_count_once_per_scored_token_by_head_and_together(measured, batches):
    found = measured["memories"][PEER]["usage"]
    assert list(found) == ["all", "0", "1"]
    for who, heads in (("all", (0, 1)), ("0", (0,)), ("1", (1,))):
        reads = reads_of(batches, lambda batch: batch["weights"] > 0, heads)
        want = usage(list(reads), N_SLOTS * len(heads))
        assert found[who] == {k: pytest.approx(v, abs=1e-6) for k, v in want.items()}
    assert measured["memories"][PEER]["non_finite_scores"] == 0
    assert "usage" not in measured["memories"][ENGRAM]


def test_slots_of_a_memory_follow_from_its_config(model):
    assert slot_tables(model.config) == {PEER: (N_SLOTS, True)}
    shared = dataclasses.replace(EXPERTS, separate_tables=False)
    config = dataclasses.replace(model.config, memories=(shared,))
    assert slot_tables(config) == {"layer_0": (N_SLOTS, False)}


def test_frequencies_and_collisions_are_those_of_the_training_text(
    measured, batches, model
):
    documents = [[256, *text] for text in (b"abcabcabcd", b"aabb", b"abc")]
    pairs = [(a, b) for ids in documents for a, b in zip(ids, ids[1:], strict=False)]
    want = {"cut": 0, "0": 0, "1": 0, "2-3": 0, "4-15": 0, "16+": 0}
    for batch, *_ in batches:
        for b, t in np.argwhere(batch["weights"] > 0):
            if t == 0 or batch["segments"][b, t - 1] != batch["segments"][b, t]:
                want["cut"] += 1
                continue
            n = pairs.count(tuple(batch["tokens"][b, t - 1 : t + 1].tolist()))
            name = "0" if n == 0 else "1" if n == 1 else "2-3" if n < 4 else "4-15"
            want[name] += 1
    buckets = measured["frequency"]["buckets"]
    assert {b["bucket"]: b["n_tokens"] for b in buckets} == want
    assert measured["frequency"]["exact"] and want["4-15"] > 0
    columns = measured["memories"][ENGRAM]["collisions"]
    two, three = columns
    assert (two["order"], three["order"]) == (2, 3)
    assert two["distinct_ngrams"] == len({*pairs, (256, 256)})
    assert two["n_tokens"] == sum(map(len, documents))
    (layout,) = hashed_layouts(model.config).values()
    rows = [host_ngram_rows(np.array([ids]), layout)[0, :, 0] for ids in documents]
    assert two["distinct_rows"] == len(set(np.concatenate(rows).tolist()))


def test_the_gradient_is_divided_and_all_is_plain_data(measured):
    parts = dict(measured["gradient_share"])
    assert parts.pop("norm") > 0
    assert sum(parts.values()) == pytest.approx(1, abs=1e-6)
    assert min(parts.values()) > 0
    assert json.loads(json.dumps(measured))["loss"] == measured["loss"]
    text = memory_text(measured)
    for words in (
        "gate quantiles",
        f"loss by gate of {ENGRAM}",
        "the token's 2-gram stands in train",
        f"share a row of {ENGRAM}",
        "usage of slots",
        "scores that were not finite: 0",
        "squared gradient norm",
    ):
        assert words in text, words
    assert "nan" not in text


def test_health_of_a_batch_has_its_usage_and_p04_counts_what_is_not_a_number(
    model, params, batches
):
    """Then one NaN in the query's weights, which spoils every selection."""

    def loss(params, batch, key, drop_memory=False):
        del batch, key, drop_memory
        return jnp.sum(params["embedding"]), {"weight": 1.0}

    batch = batches[0][0]
    health = make_health(model, loss)
    found = health(params, batch)
    reads = list(reads_of(batches[:1], lambda batch: batch["segments"] > 0))
    want = usage(reads, 2 * N_SLOTS)
    for name in ("used_pct", "kl_w", "kl_u", "gini_w", "gini_u", "top90_w", "top90_u"):
        assert found[f"slot_{name}/{PEER}"] == pytest.approx(want[name], abs=1e-6)
    assert found[f"non_finite_scores/{PEER}"] == 0
    assert found[f"gate_q50/{PEER}"] == 1
    assert found[f"gate_q05/{ENGRAM}"] < found[f"gate_q95/{ENGRAM}"]
    assert found[f"rows_touched/{ENGRAM}"] > 0
    assert all(map(math.isfinite, found.values()))

    broken = jax.tree.map(lambda x: x, params)
    query = broken["block_0"]["memory_1"]["query"]
    query["kernel"] = query["kernel"].at[0, 0].set(jnp.nan)
    found = health(broken, batch)
    n_tokens = int((batch["segments"] > 0).sum())
    assert found[f"non_finite_scores/{PEER}"] == n_tokens
    assert f"slot_kl_w/{PEER}" in found


def test_a_model_without_memories_is_refused(store):
    with pytest.raises(ConfigError, match="model.memories = .* at least one memory"):
        measure(
            LanguageModel(ModelConfig()),
            None,
            [],
            gradients=lambda *_: None,
            train_stores=[store],
            train_batch={},
        )
