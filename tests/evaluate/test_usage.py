"""Usage of slots: equal to a slow count, exact beyond 2^24, and its edges."""

import numpy as np
import pytest

from memjax.errors import DataError, ShapeError
from memjax.evaluate.usage import UsageCounter
from tests.oracles.usage import usage


def random_reads(seed, shape=(3, 7, 2, 4), n_slots=16):
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, n_slots - 3, shape).astype(np.int32)
    weights = rng.exponential(size=shape).astype(np.float32)
    weights[rng.random(shape) < 0.3] = 0
    return slots, weights


def pairs(slots, weights):
    return list(zip(slots.ravel().tolist(), weights.ravel().tolist(), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_all_heads_and_each_head_equal_a_slow_count(seed):
    slots, weights = random_reads(seed)
    counter = UsageCounter(16, 2)
    for batch in range(3):
        counter.add(slots[batch], weights[batch])
    heads = [usage(pairs(slots[..., h, :], weights[..., h, :]), 16) for h in (0, 1)]
    for got, want in (
        (counter.summary(), usage(pairs(slots, weights), 16)),
        *zip(counter.by_head(), heads, strict=True),
    ):
        assert set(got) == set(want)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, atol=1e-12, err_msg=name)


def test_heads_with_slots_of_their_own_are_one_long_memory():
    slots, weights = random_reads(0)
    counter = UsageCounter(16, 2, separate_heads=True)
    counter.add(slots, weights)
    shifted = slots + 16 * np.arange(2)[:, None]
    want = usage(pairs(shifted, weights), 32)
    got = counter.summary()
    assert got == {name: pytest.approx(value) for name, value in want.items()}


def test_counts_keep_growing_beyond_the_integers_of_float32():
    """2^24 + 2^20 reads of slot 1: a float32 count would stop at 2^24."""
    counter = UsageCounter(4)
    n = 1 << 20
    slots, weights = np.ones((1, n), np.int32), np.ones((1, n), np.float32)
    for _ in range(17):
        counter.add(slots, weights)
    counter.add([[0]], [[1.0]])
    found = counter.summary()
    assert found["n_reads"] == 17 * n + 1 > 2**24
    share = 1 / (17 * n + 1)
    want = np.log(4) + share * np.log(share) + (1 - share) * np.log1p(-share)
    np.testing.assert_allclose([found["kl_u"], found["kl_w"]], want, rtol=1e-14)
    assert found["collision_ratio"] == 17 * n / (17 * n + 1)


def test_literal_reads():
    """Slot 0 twice, slots 1 and 2 once, slot 2 with weight 0, slot 3 never."""
    counter = UsageCounter(4)
    counter.add([[[0, 1]], [[0, 2]]], [[[0.5, 1.0]], [[0.5, 0.0]]])
    found = counter.summary()
    assert found["used_pct"] == 50 and found["coverage"] == 0.75
    assert found["collision_ratio"] == 0.5
    np.testing.assert_allclose(found["kl_w"], np.log(2))
    np.testing.assert_allclose(found["kl_u"], np.log(4) - 1.5 * np.log(2))
    np.testing.assert_allclose(found["gini_w"], 1 - 2 * (0.5 + 1) / 4)
    assert (found["top50_w"], found["top90_w"]) == (2, 2)
    assert (found["top50_u"], found["top90_u"], found["top99_u"]) == (2, 3, 3)


def test_uniform_usage_and_a_single_slot_are_the_extremes():
    every = UsageCounter(8)
    every.add(np.arange(8)[:, None, None], np.ones((8, 1, 1)))
    found = every.summary()
    np.testing.assert_allclose([found["kl_w"], found["kl_u"]], 0, atol=1e-12)
    assert found["used_pct"] == 100 and found["collision_ratio"] == 0
    assert found["gini_u"] == pytest.approx(-1 / 8)
    one = UsageCounter(8)
    one.add(np.full((5, 1, 1), 3), np.ones((5, 1, 1)))
    found = one.summary()
    np.testing.assert_allclose(found["kl_u"], np.log(8))
    assert found["gini_w"] == pytest.approx(1 - 2 / 8)
    assert found["top99_w"] == 1 and found["collision_ratio"] == 1


def test_order_and_batching_do_not_matter():
    slots, weights = random_reads(5)
    weights = np.round(weights * 8) / 8
    whole, cut = UsageCounter(16, 2), UsageCounter(16, 2)
    whole.add(slots, weights)
    for t in reversed(range(slots.shape[1])):
        cut.add(slots[:, t], weights[:, t])
    assert whole.summary() == cut.summary() and whole.by_head() == cut.by_head()


def test_p03_a_weight_of_zero_does_not_use_a_slot():
    counter = UsageCounter(4)
    counter.add([[0, 2]], [[1.0, 0.0]])
    found = counter.summary()
    assert found["used_pct"] == 25 and found["coverage"] == 0.5


def test_p04_reads_that_are_not_finite_are_counted_apart():
    counter = UsageCounter(4)
    counter.add([[[0, 1]], [[2, 2]]], [[[np.nan, np.nan]], [[0.5, 0.5]]])
    assert counter.n_non_finite == 2
    alone = UsageCounter(4)
    alone.add([[[2, 2]]], [[[0.5, 0.5]]])
    assert counter.summary() == alone.summary()


def test_negative_weights_count_by_their_size():
    counter = UsageCounter(2)
    counter.add([[0, 1, 1]], [[-2.0, 1.0, -1.0]])
    found = counter.summary()
    assert found["used_pct"] == 100
    np.testing.assert_allclose(found["kl_w"], 0, atol=1e-12)


def test_masked_tokens_and_no_reads():
    counter = UsageCounter(4)
    counter.add([[[9]], [[1]]], [[[1.0]], [[1.0]]], [False, True])
    assert counter.summary()["n_reads"] == 1
    found = UsageCounter(4).summary()
    assert found["n_reads"] == found["used_pct"] == found["coverage"] == 0
    assert np.isnan([found["kl_w"], found["gini_u"], found["collision_ratio"]]).all()
    weightless = UsageCounter(4)
    weightless.add([[3]], [[0.0]])
    found = weightless.summary()
    assert np.isnan(found["kl_w"]) and found["kl_u"] == pytest.approx(np.log(4))


@pytest.mark.parametrize("slot", [-1, 4])
def test_p06_a_slot_outside_is_an_error_that_names_it(slot):
    with pytest.raises(DataError, match=f"slot {slot} is not allowed: 0 <= slot < 4"):
        UsageCounter(4).add([[slot]], [[1.0]])


def test_shapes_that_do_not_fit_are_errors():
    counter = UsageCounter(4, 2)
    with pytest.raises(ShapeError, match="slots has shape"):
        counter.add(np.zeros((3, 1, 2), int), np.zeros((3, 1, 2)))
    with pytest.raises(ShapeError, match="weights has shape"):
        counter.add(np.zeros((3, 2, 2), int), np.zeros((3, 2, 1)))
    with pytest.raises(ShapeError, match="mask has shape"):
        counter.add(np.zeros((3, 2, 2), int), np.zeros((3, 2, 2)), np.ones(2))
