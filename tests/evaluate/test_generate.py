"""Sampling, with and without a cache: keys repeat, the window slides, bad options."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.build.decoding import decoding as decoding_of
from memjax.build.parts import Parts
from memjax.errors import ConfigError
from memjax.evaluate.generate import Decoding, generate
from memjax.experiment import Experiment
from memjax.layers.engram import EngramConfig
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.models.config import ModelConfig
from tests.models.parameters import filled

VOCAB = 7


def successor(params, tokens, segments):
    """A model that is sure of (last token + params) mod VOCAB, and checks its mask."""
    used = segments.sum()
    position = jnp.arange(tokens.shape[1])[None]
    ok = (position < used) == (segments > 0)
    sure = 50.0 * jax.nn.one_hot((tokens + params) % VOCAB, VOCAB)
    return jnp.where(ok.all(), sure, jnp.nan)


def draw(prompt, n_tokens, **options):
    """Twelve-token window, step 2."""
    settings = {"context": 12, "vocab_size": VOCAB, "key": jax.random.key(0)} | options
    return generate(successor, 2, np.array(prompt), n_tokens=n_tokens, **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n_prompt", [1, 12, 30])
def test_follows_a_sure_model_past_the_window(temperature, n_prompt):
    prompt = np.arange(n_prompt) % VOCAB
    got = draw(prompt, 20, temperature=temperature)
    want = (prompt[-1] + 2 * np.arange(1, 21)) % VOCAB
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.int32


def flat(params, tokens, segments):
    """Token 1 three times as likely as each other one."""
    logits = jnp.zeros((*tokens.shape, VOCAB)).at[..., 1].set(jnp.log(3.0))
    return logits + params


def test_keys_repeat_and_frequencies_follow_the_temperature():
    def sample(seed, temperature, top_k=None):
        return generate(
            flat,
            0.0,
            np.array([0]),
            n_tokens=600,
            context=4,
            vocab_size=VOCAB,
            key=jax.random.key(seed),
            temperature=temperature,
            top_k=top_k,
        )

    np.testing.assert_array_equal(sample(0, 1.0), sample(0, 1.0))
    assert (sample(0, 1.0) != sample(1, 1.0)).any()
    assert abs(np.mean(sample(0, 1.0) == 1) - 3 / 9) < 0.07
    assert abs(np.mean(sample(0, 0.5) == 1) - 9 / 15) < 0.07
    assert set(sample(0, 1.0, top_k=1)) == {1}
    assert set(sample(0, 1.0, top_k=3)) == {0, 1, 2}, "ties: lowest ids first"


def test_no_tokens_and_bad_options():
    assert draw([3], 0).shape == (0,)
    for options, message in (
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_k": 8}, "top_k = 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            draw([3], 2, **options)
    with pytest.raises(ConfigError, match="n_tokens = -1"):
        draw([3], -1)
    with pytest.raises(ConfigError, match="prompt"):
        draw([], 2)
    with pytest.raises(
        ConfigError, match="prompt = -1 is not allowed: ids from 0 to 6"
    ):
        draw([2, -1], 2)
    with pytest.raises(ConfigError, match="prompt = 7"):
        draw([7], 2)


def counting(start_at=0):
    """`successor` with a cache that is the number of tokens read so far."""

    def step(params, read, tokens, segments):
        sure = 50.0 * jax.nn.one_hot((tokens + params) % VOCAB, VOCAB)
        read = read + segments.sum()
        return jnp.where(read <= 12, sure, jnp.nan), read

    return Decoding(lambda: jnp.int32(start_at), step)


def test_a_text_that_fits_goes_on_from_the_cache():
    decoding = counting()
    for n_prompt, n_tokens in ((1, 12), (5, 8), (12, 1), (3, 1)):
        prompt = np.arange(n_prompt) % VOCAB
        got = draw(prompt, n_tokens, temperature=0.0, decoding=decoding)
        want = (prompt[-1] + 2 * np.arange(1, n_tokens + 1)) % VOCAB
        np.testing.assert_array_equal(got, want)
        assert got.dtype == np.int32
    assert draw([3], 0, decoding=decoding).shape == (0,)


def test_a_window_that_slides_has_no_cache():
    """A cache that is full from the start would give NaN, of which 0 is drawn."""
    full = counting(start_at=13)
    np.testing.assert_array_equal(draw([3], 2, temperature=0.0, decoding=full), [0, 0])
    for n_prompt, n_tokens in ((1, 13), (12, 2), (30, 20)):
        prompt = np.arange(n_prompt) % VOCAB
        got = draw(prompt, n_tokens, temperature=0.0, decoding=full)
        want = draw(prompt, n_tokens, temperature=0.0)
        np.testing.assert_array_equal(got, want)


def test_with_a_cache_a_key_draws_the_same_tokens():
    engram = EngramConfig(layers=(0,), n_heads=2, rows_per_head=53, row_width=4)
    fast = FastWeightConfig(
        n_sub_keys=4, key_width=4, value_width=4, k=2, chunk=2, initial="fixed"
    )
    model = ModelConfig(
        n_layers=2,
        d_model=16,
        n_heads=2,
        n_kv_heads=1,
        d_ff=16,
        memories=(engram, fast),
    )
    parts = Parts(Experiment(name="x", model=model))
    params = filled(model)
    shared = dataclasses.replace(fast, state="shared", layers=(0,))
    without = dataclasses.replace(model, memories=(shared,))
    assert decoding_of(Parts(Experiment(name="x", model=without)), 16) is None

    def logits_fn(params, tokens, segments):
        batch = {"tokens": tokens, "segments": segments}
        return parts.logits(params, batch | {"positions": jnp.arange(16)[None]})

    def sample(seed, **options):
        prompt = np.array([256, 72, 101])
        return generate(
            logits_fn,
            params,
            prompt,
            n_tokens=14,
            context=16,
            vocab_size=257,
            key=jax.random.key(seed),
            temperature=1.5,
            **options,
        )

    decoding = decoding_of(parts, 16)
    got = sample(0, decoding=decoding)
    np.testing.assert_array_equal(got, sample(0))
    assert (got != sample(1, decoding=decoding)).any()
