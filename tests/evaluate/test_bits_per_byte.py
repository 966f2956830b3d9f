"""Bits per byte: the formula, weights, and independence from batching."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from memjax.evaluate.bits_per_byte import Score, make_scorer, score, token_nats


def test_token_nats_is_minus_log_softmax_and_takes_log_probabilities():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    targets = jnp.array([[0, 4, 2], [1, 1, 3]])
    want = -np.log(np.asarray(jax.nn.softmax(logits)))
    want = np.take_along_axis(want, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(token_nats(logits, targets), want, rtol=1e-5)
    log_p = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(token_nats(log_p, targets), want, rtol=1e-5)
    assert token_nats(logits.astype(jnp.bfloat16), targets).dtype == jnp.float32


def test_a_uniform_model_of_256_symbols_has_8_bits_a_byte():
    scorer = make_scorer(lambda params, batch: jnp.zeros((2, 4, 256)))
    batch = {
        "targets": np.zeros((2, 4), np.int32),
        "weights": np.array([[1, 1, 1, 1], [1, 0, 0, 0]], np.float32),
    }
    scored = score(scorer, None, [batch, batch])
    assert scored.n_tokens == 10
    np.testing.assert_allclose(scored.bpb(1.0), 8, rtol=1e-6)
    np.testing.assert_allclose(scored.bpb(2.0), 4, rtol=1e-6)


def test_unscored_targets_do_not_count_even_when_not_finite():
    def apply_fn(params, batch):
        return jnp.zeros((1, 2, 4)).at[0, 1].set(jnp.nan)

    batch = {"targets": np.zeros((1, 2), np.int32), "weights": np.array([[1.0, 0.0]])}
    scored = score(make_scorer(apply_fn), None, [batch])
    np.testing.assert_allclose(scored.nats, math.log(4), rtol=1e-6)


def test_nothing_scored_is_not_a_number():
    assert math.isnan(Score(0.0, 0).bpb(1.0))


def test_batches_wait_for_results_so_that_few_are_on_the_devices():
    """Three sums are added; a batch is not asked for before all but one of those
    before it are fetched."""
    asked, fetched = [], []

    class Sum(float):
        def __array__(self, dtype=None, copy=None):
            fetched.append(float(self))
            return np.asarray(float(self), dtype)

    def batches():
        for number in (1.0, 2.0, 4.0):
            asked.append((number, len(fetched)))
            yield number

    scored = score(lambda _, batch: (Sum(batch), 1), None, batches())
    assert scored == Score(7.0, 3)
    assert asked == [(1.0, 0), (2.0, 0), (4.0, 1)]
