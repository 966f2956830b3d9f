"""Sampling: greedy follows the model, keys repeat, the window slides, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.evaluate.generate import generate

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
