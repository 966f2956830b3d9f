"""The best pairs of two sorted lists, both forms against a full sort with ties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.ops.best_pairs import Kept, best_by_counting, best_by_sorting, best_pairs

FORMS = {"plain": best_by_sorting, "cpu": best_by_counting, "chosen": best_pairs}
compiled = functools.cache(
    lambda form, n, k: jax.jit(functools.partial(FORMS[form], n=n, k=k))
)


def kept(scores: np.ndarray, length: int) -> Kept:
    """The best of every row by numpy: descending, lowest index first."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :length]
    best = np.take_along_axis(scores, order, -1)
    return Kept(jnp.asarray(best), jnp.asarray(order.astype(np.int32)))


def exhaustive(scores: np.ndarray, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best of all n * n sums of [..., 2, n], lowest slot first."""
    grid = scores[..., 0, :, None] + scores[..., 1, None, :]
    flat = grid.reshape(*grid.shape[:-2], n * n)
    slots = np.argsort(-flat, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(flat, slots, -1), slots


# 130 rows are more than one block of lanes; 32 of 40 take 119 pairs, 7 steps of 17.
CASES = [((130,), 6, 7), ((3, 5), 4, 16), ((), 9, 2), ((1, 1), 1, 1), ((20,), 40, 32)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lead, n, k", CASES)
def test_equals_a_sort_of_all_slots(form, lead, n, k) -> None:
    """Small integers: most sums are equal, and the lowest slots must win."""
    rng = np.random.default_rng(n)
    for most in (1, 3, 1000):
        scores = rng.integers(-most, most + 1, (*lead, 2, n)).astype(np.float32)
        length = min(n, k)
        lists = kept(scores[..., 0, :], length), kept(scores[..., 1, :], length)
        sums, slots = compiled(form, n, k)(*lists)
        want, want_slots = exhaustive(scores, n, k)
        assert sums.shape == slots.shape == (*lead, k) and slots.dtype == jnp.int32
        np.testing.assert_array_equal(sums, want)
        np.testing.assert_array_equal(slots, want_slots)


def test_minus_infinity_comes_last_and_no_slot_twice() -> None:
    scores = np.where(np.arange(5) < 2, 1.0, -np.inf).astype(np.float32)
    lists = kept(np.stack([scores] * 3), 5)
    for form in ("plain", "cpu"):
        sums, slots = compiled(form, 5, 12)(lists, lists)
        np.testing.assert_array_equal(sums, [[2.0] * 4 + [-np.inf] * 8] * 3)
        np.testing.assert_array_equal(slots[:, :4], [[0, 1, 5, 6]] * 3)
        assert all(len(set(row)) == 12 for row in np.asarray(slots))


def test_nothing_to_select_from() -> None:
    none = Kept(jnp.zeros((0, 3)), jnp.zeros((0, 3), jnp.int32))
    sums, slots = best_pairs(none, none, 9, 4)
    assert sums.shape == slots.shape == (0, 4) and slots.dtype == jnp.int32


def test_no_gradient_and_float64() -> None:
    with jax.enable_x64(True):
        scores = np.array([[0.0, 1e-12, -1.0]])
        lists = kept(scores, 3)
        for form in FORMS:
            sums, slots = compiled(form, 3, 3)(lists, lists)
            assert sums.dtype == jnp.float64
            np.testing.assert_array_equal(slots, [[4, 1, 3]])
    wide = Kept(jnp.ones((2, 3)), jnp.zeros((2, 3), jnp.int32))
    gradient = jax.grad(
        lambda scores: best_pairs(wide._replace(scores=scores), wide, 3, 2)[0].sum()
    )(wide.scores)
    np.testing.assert_array_equal(gradient, 0)
