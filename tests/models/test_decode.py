"""Cached decoding: however a text is cut, rows get what whole rows get (P10)."""

import dataclasses
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.data.compressed_vocab import CompressedVocab
from memjax.errors import ConfigError, ShapeError
from memjax.layers.block import HyperConfig
from memjax.layers.cross_attention import CedConfig
from memjax.layers.decode_piece import CACHE
from memjax.layers.engram import EngramConfig
from memjax.layers.experts import ExpertsConfig
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.layers.precision import PrecisionConfig
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.layers.record import METRICS, record
from memjax.models.config import ModelConfig
from memjax.models.decode import decoder, init_cache, reset_rows
from memjax.models.language_model import LanguageModel
from memjax.models.memories import KINDS
from memjax.models.parameters import split_variables
from tests.models.parameters import filled
from tests.models.test_memories import SMALL

BASE = ModelConfig(
    vocab_size=17, n_layers=2, d_model=16, n_heads=2, n_kv_heads=2, d_ff=12
)
ENGRAM = EngramConfig(n_heads=2, rows_per_head=53, row_width=4)  # n = 3, width 4
KEYS = {"n_sub_keys": 5, "key_width": 4, "n_heads": 2, "k": 3}
BATCH_NORM = ProductKeyConfig(**KEYS, query_norm="batch")
KEY = jax.random.key(0)
CLASSES = CompressedVocab(np.arange(17) // 2)


def with_memory(memory, layers=(1,), **changes):
    memory = dataclasses.replace(memory, layers=layers)
    return dataclasses.replace(BASE, memories=(memory,), **changes)


def with_kinds(**layers):
    memories = tuple(
        dataclasses.replace(SMALL[kind], layers=(layer,), place=place)
        for kind, (layer, place) in layers.items()
    )
    return dataclasses.replace(BASE, memories=memories)


CONFIGS = {
    "engram": with_memory(ENGRAM),
    "fast_weight": with_memory(SMALL["fast_weight"]),
    "product keys": with_kinds(
        product_key=(0, "beside_feed_forward"),
        memory_plus=(1, "before_attention"),
        peer=(1, "instead_of_feed_forward"),
    ),
    "n-grams": with_kinds(
        ngram_embedding=(0, "before_attention"), byte_engram=(1, "after_feed_forward")
    ),
    "n-gram keys, hot n-grams": with_kinds(
        ngram_keys=(0, "before_attention"), hot_engram=(1, "before_attention")
    ),
    "window, fewer key heads, no convolution": with_memory(
        dataclasses.replace(ENGRAM, form="v41"), window=3, n_kv_heads=1
    ),
    "scanned, remat, experts by bigram": dataclasses.replace(
        BASE,
        remat=True,
        window=4,
        experts=ExpertsConfig(n_experts=4, top_k=2, d_ff=6, routing="bigram"),
    ),
    "memory on all streams": with_memory(
        dataclasses.replace(ENGRAM, n_branches=2),
        hyper=HyperConfig(n_streams=2, form="single_pass"),
    ),
    "encoder and decoder, local window, streams": with_memory(
        ENGRAM,
        ced=CedConfig(first_decoder=1, local_window=2),
        hyper=HyperConfig(n_streams=2, form="single_pass"),
    ),
    "streams, batch statistics": with_memory(
        BATCH_NORM, hyper=HyperConfig(n_streams=2)
    ),
    "probability, rows": with_memory(
        dataclasses.replace(ENGRAM, table_mode="rows"),
        layers=(2,),
        arrangement="probability",
    ),
    "three branches, token classes": with_memory(
        dataclasses.replace(ENGRAM, n_token_classes=9), arrangement="three_branch"
    ),
}
# Rows 0 and 2 hold one document of eleven tokens, row 1 one of six and one of five.
TOKENS = (jnp.arange(33) ** 2 * 5 % 17).reshape(3, 11)
SEGMENTS = jnp.ones_like(TOKENS).at[1, 6:].set(2)
CUTS = ((11,), (1, 10), (4, 4, 3), (1,) * 11)


class Machine(NamedTuple):
    """A model with numbers in it: whole rows, and steps of the same with a cache."""

    whole: object
    step: object
    empty: dict


def keep_row_ids(call, args, kwargs, context):
    if context.method_name == "read" and args[1].rows_BTC is not None:
        record(context.module, "row_ids", args[1].rows_BTC)
    return call(*args, **kwargs)


def row_ids(metrics):
    leaves = jax.tree_util.tree_leaves_with_path(metrics)
    return [leaf for path, leaf in leaves if path[-1].key == "row_ids"]


@functools.cache
def machine(config, n_places=12):
    variables = split_variables(filled(config), config)
    if BATCH_NORM in config.memories:
        abstract = jax.eval_shape(LanguageModel(config).init, KEY, TOKENS)
        variables["batch_stats"] = jax.tree.map(
            lambda leaf: jnp.linspace(0.5, 2, leaf.size).reshape(leaf.shape),
            abstract["batch_stats"],
        )
    whole = LanguageModel(config, classes=CLASSES)
    cached = decoder(whole, n_places)

    @jax.jit
    def all_at_once(tokens, segments):
        with nn.intercept_methods(keep_row_ids):
            out, state = whole.apply(variables, tokens, segments, mutable=[METRICS])
        return out, row_ids(state[METRICS])

    @jax.jit
    def step(cache, tokens, segments):
        with nn.intercept_methods(keep_row_ids):
            out, state = cached.apply(
                variables | {CACHE: cache},
                tokens,
                segments,
                mutable=[CACHE, METRICS],
            )
        return out, row_ids(state[METRICS]), state[CACHE]

    return Machine(all_at_once, step, init_cache(cached, len(TOKENS)))


def padded(array):
    """Eleven wide, or one: a model is then compiled twice, and not for each length."""
    width = 1 if array.shape[1] == 1 else max(11, array.shape[1])
    return jnp.pad(array, ((0, 0), (0, width - array.shape[1])))


def feed(machine, cache, tokens, segments):
    """(logits, row ids, cache) of one more piece."""
    n = tokens.shape[1]
    out, ids, cache = machine.step(cache, padded(tokens), padded(segments))
    return out[:, :n], [rows[:, :n] for rows in ids], cache


def close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_every_kind_of_memory_is_decoded_here():
    seen = {type(m) for config in CONFIGS.values() for m in config.memories}
    assert seen == set(KINDS)


@pytest.mark.parametrize("name", CONFIGS)
def test_p10_step_by_step_equals_all_at_once(name):
    m = machine(CONFIGS[name])
    want, want_ids = m.whole(TOKENS, SEGMENTS)
    for cut in CUTS:
        cache, start = m.empty, 0
        for length in cut:
            here = slice(start, start + length)
            got, ids, cache = feed(m, cache, TOKENS[:, here], SEGMENTS[:, here])
            close(got, want[:, here])
            for a, b in zip(ids, want_ids, strict=True):
                np.testing.assert_array_equal(a, b[:, here])
            start += length
    np.testing.assert_array_equal(cache["place"]["position"], [11, 5, 11])


@pytest.mark.parametrize("name", CONFIGS)
def test_p10_rejected_guesses_leave_no_trace(name):
    """Feed 8, feed 3 guesses, reject the last 2, feed 2 other tokens."""
    m = machine(CONFIGS[name])
    guesses = jnp.concatenate([TOKENS[:, 8:9], (TOKENS[:, 9:] + 5) % 17], axis=1)
    want, _ = m.whole(TOKENS, SEGMENTS)
    _, _, before = feed(m, m.empty, TOKENS[:, :8], SEGMENTS[:, :8])
    guessed, _, _ = feed(m, before, guesses, SEGMENTS[:, 8:])
    assert np.abs(guessed[:, 1:] - want[:, 9:]).max() > 1e-3
    one, _, accepted = feed(m, before, guesses[:, :1], SEGMENTS[:, 8:9])
    close(one, want[:, 8:9])
    got, _, _ = feed(m, accepted, TOKENS[:, 9:], SEGMENTS[:, 9:])
    close(got, want[:, 9:])


@pytest.mark.parametrize("name", CONFIGS)
def test_p10_idle_and_reused_rows(name):
    """Row 2 is fed every second time, then reset; rows 0 and 1 never notice."""
    m = machine(CONFIGS[name])
    want, _ = m.whole(TOKENS, SEGMENTS)
    cache, seen = m.empty, 0
    for t in range(11):
        here, awake = slice(t, t + 1), t % 2 == 1
        tokens = TOKENS[:, here].at[2].set(TOKENS[2, seen] if awake else 16)
        segments = SEGMENTS[:, here].at[2].set(int(awake))
        got, _, cache = feed(m, cache, tokens, segments)
        close(got[:2], want[:2, here])
        if awake:
            close(got[2, 0], want[2, seen])
            seen += 1
    assert seen == 5
    cache = reset_rows(cache, jnp.array([True, False, True]))
    other = TOKENS.at[0].set(TOKENS[2]).at[2].set(TOKENS[0])
    got, _, cache = feed(m, cache, other, SEGMENTS.at[1].set(0))
    close(got[0], want[2])
    close(got[2], want[0])
    np.testing.assert_array_equal(cache["place"]["length"], 11)


def test_p10_pieces_of_their_own_lengths():
    """Compiled for 11, 10, 4, 3 and 1 tokens, without padding."""
    m = machine(CONFIGS["engram"])
    want, want_ids = m.whole(TOKENS, SEGMENTS)
    for cut in CUTS:
        cache, start = m.empty, 0
        for length in cut:
            here = slice(start, start + length)
            got, ids, cache = m.step(cache, TOKENS[:, here], SEGMENTS[:, here])
            close(got, want[:, here])
            np.testing.assert_array_equal(ids[0], want_ids[0][:, here])
            start += length


@pytest.mark.parametrize("kind", ["engram", "fast_weight"])
def test_padding_may_stand_anywhere(kind):
    m = machine(CONFIGS[kind])
    want, _ = m.whole(TOKENS, SEGMENTS)
    first, second = jnp.array([0, 2, 3, 7]), jnp.array([4, 5, 6, 8, 9, 10])
    _, _, cache = feed(m, m.empty, TOKENS[:, :1], SEGMENTS[:, :1])
    for places, tokens in ((first, slice(1, 5)), (second, slice(5, 11))):
        spread = jnp.full_like(TOKENS, 3).at[:, places].set(TOKENS[:, tokens])
        segments = jnp.zeros_like(TOKENS).at[:, places].set(SEGMENTS[:, tokens])
        got, _, cache = feed(m, cache, spread, segments)
        close(got[:, places], want[:, tokens])


@pytest.mark.parametrize("kind", ["engram", "fast_weight"])
def test_a_document_is_new_although_its_number_was_used_before(kind):
    m = machine(CONFIGS[kind])
    segments = jnp.array([1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1])[None].repeat(3, 0)
    fresh = jnp.where(jnp.arange(11) < 6, segments, 3)
    want, _ = m.whole(TOKENS, fresh)
    got, _, _ = feed(m, m.empty, TOKENS, segments)
    close(got, want)
    cache, pieces = m.empty, []
    for t in range(11):
        out, _, cache = feed(m, cache, TOKENS[:, t : t + 1], segments[:, t : t + 1])
        pieces.append(out)
    close(jnp.concatenate(pieces, axis=1), want)


def test_tokens_beyond_the_cache_are_nan_and_only_they():
    m = machine(CONFIGS["engram"])
    want, _ = m.whole(TOKENS, SEGMENTS)
    _, _, cache = feed(m, m.empty, TOKENS, SEGMENTS)
    cache = reset_rows(cache, jnp.array([False, True, True]))
    got, _, cache = feed(m, cache, TOKENS, SEGMENTS)
    assert np.isfinite(got[0, 0]).all() and np.isnan(got[0, 1:]).all()
    close(got[1:], want[1:])
    got, _, cache = feed(m, cache, TOKENS[:, :1], SEGMENTS[:, :1])
    assert np.isnan(got[0]).all() and np.isfinite(got[1:]).all()
    got, _, _ = feed(m, reset_rows(cache, jnp.ones(3, bool)), TOKENS, SEGMENTS)
    close(got, want)


@pytest.mark.parametrize("kind", ["engram", "fast_weight"])
def test_nothing_of_a_reset_row_is_read_not_even_nan(kind):
    m = machine(CONFIGS[kind])
    want, _ = m.whole(TOKENS, SEGMENTS)
    bad, _, cache = feed(m, m.empty, TOKENS.at[:, 3].set(17), SEGMENTS)
    assert np.isnan(bad[:, 5]).all()
    cache = reset_rows(cache, jnp.ones(3, bool))
    for t in range(3):
        got, _, cache = feed(m, cache, TOKENS[:, t : t + 1], SEGMENTS[:, t : t + 1])
        close(got, want[:, t : t + 1])


def test_an_empty_cache_is_zeros_in_the_dtypes_of_the_model():
    config = with_memory(ENGRAM, precision=PrecisionConfig(compute="bfloat16"))
    model = decoder(LanguageModel(config), 5)
    cache = init_cache(model, 2)
    keys = cache["block_0"]["attention"]["keys"]
    assert keys.shape == (2, 5, 2, 8) and keys.dtype == jnp.bfloat16
    # What the convolution reads is gated in the dtype of the accumulation.
    assert cache["block_1"]["memory"]["conv_input_0"].dtype == jnp.float32
    assert cache["place"]["history"].shape == (2, 2)
    assert not any(leaf.any() for leaf in jax.tree.leaves(cache))
    scanned = init_cache(decoder(LanguageModel(BASE), 5), 2)
    assert scanned["blocks_0_1"]["attention"]["values"].shape == (2, 2, 5, 2, 8)
    assert scanned["place"]["history"].shape == (2, 0)


def test_what_cannot_be_decoded_says_so():
    shared = FastWeightConfig(**KEYS, chunk=2, state="shared", initial="fixed")
    model = LanguageModel(with_memory(shared))
    with pytest.raises(ConfigError, match=r"model\.memories\.0\.state = 'shared'"):
        decoder(model, 5)
    plain = LanguageModel(BASE)
    with pytest.raises(ConfigError, match="cache_tokens = 0"):
        decoder(plain, 0)
    with pytest.raises(ConfigError, match="cache_tokens = None"):
        init_cache(plain, 2)
    cached = decoder(plain, 5)
    with pytest.raises(ShapeError, match="rows_B"):
        reset_rows(init_cache(cached, 2), jnp.ones(3, bool))
    tokens = jnp.zeros((2, 1), jnp.int32)
    for options, message in (
        ({"positions_BT": tokens}, "positions_BT = 'given'"),
        ({"train": True}, "train = True"),
    ):
        call = functools.partial(cached.init, **options)
        with pytest.raises(ConfigError, match=message):
            jax.eval_shape(call, KEY, tokens)
