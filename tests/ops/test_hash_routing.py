"""Tables and hashes that choose experts by the token alone.

What: literal tables, the laws of load and distinctness, host equal to device, errors.
Why: a table that repeats an expert, or an id that wraps, is seen in no loss.
When not: what a layer does with the experts; tests/layers/test_experts.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, DataError, ShapeError
from memjax.ops.hash_routing import (
    balanced_table,
    bigram_experts,
    bigram_layout,
    random_table,
    sliced_table,
    table_experts,
    table_load,
)
from memjax.ops.look_back import BAD_ROW
from memjax.ops.routing import expert_load

V, E, K = 40, 6, 3


def distinct(experts):
    ordered = np.sort(np.asarray(experts), axis=-1)
    return (np.diff(ordered, axis=-1) > 0).all()


def test_random_experts_are_distinct_and_equally_likely():
    table = random_table(4000, E, K, seed=3)
    assert table.dtype == np.int32 and table.shape == (4000, K) and distinct(table)
    assert table.min() == 0 and table.max() == E - 1
    for column in table.T:
        assert abs(np.bincount(column, minlength=E) - 4000 / E).max() < 120
    np.testing.assert_array_equal(table, random_table(4000, E, K, seed=3))
    assert (table != random_table(4000, E, K, seed=4)).any()


def test_a_long_table_is_drawn_in_pieces_of_one_stream(monkeypatch):
    whole = random_table(V, E, K)
    monkeypatch.setattr("memjax.ops.hash_routing._DRAWN_AT_ONCE", 7 * E)
    np.testing.assert_array_equal(random_table(V, E, K), whole)


def test_balanced_table_by_hand():
    # 9 -> 0, 5 -> 1, 5 -> 2, then 4 to the lighter of 1 and 2: the lower index.
    assert balanced_table([5, 4, 9, 5], 3).tolist() == [[1], [1], [0], [2]]
    # Two experts a token: 9 -> 0, 1; 5 -> 2, 0 (5 beats 14); ...
    assert balanced_table([9, 5, 2], 3, 2).tolist() == [[0, 1], [2, 0], [2, 1]]


def test_balanced_loads_are_more_equal_than_random_ones():
    counts = (1000 / np.arange(1, 501)).astype(int)
    loads = [
        table_load(table, counts, 8)
        for table in (balanced_table(counts, 8, 2), random_table(500, 8, 2))
    ]
    assert loads[0].sum() == loads[1].sum() == 2 * counts.sum()
    fair = counts.sum() / 4
    assert loads[0].max() < 1.01 * fair < 1.1 * fair < loads[1].max()
    assert distinct(balanced_table(counts, 8, 2))


def test_slices_hold_one_choice_each():
    table = sliced_table(V, E, K, seed=1)
    np.testing.assert_array_equal(table // 2, np.tile(np.arange(K), (V, 1)))
    assert len(np.unique(table)) == E


@pytest.mark.parametrize("build", [random_table, sliced_table])
def test_the_load_of_a_text_is_that_of_its_token_histogram(build):
    table = build(V, E, K)
    ids = np.random.default_rng(0).integers(0, V, (3, 50))
    want = table_load(table, np.bincount(ids.ravel(), minlength=V), E)
    host = table_experts(table, ids)
    device = jax.jit(table_experts)(table, jnp.asarray(ids))
    np.testing.assert_array_equal(host, device)
    np.testing.assert_array_equal(expert_load(device, E), want)
    assert want.sum() == 3 * ids.size


def test_no_token_and_unknown_tokens_have_no_expert():
    table = random_table(V, E, K)
    assert (table_experts(table, np.array([-1])) == BAD_ROW).all()
    found = table_experts(table, jnp.array([-1, V, -V, 3]))
    assert (found[:3] == BAD_ROW).all() and (found[3] == table[3]).all()
    for bad in (V, -2):
        with pytest.raises(DataError, match=f"= {bad} is not allowed"):
            table_experts(table, np.array([bad]))


def test_bigram_experts_are_the_hash_modulo_e_then_of_those_left():
    layout = bigram_layout(vocab_size=V, pad_id=2, n_experts=E, k=K, seed=5)
    ids = np.random.default_rng(0).integers(0, V, 30)
    got = bigram_experts(ids, layout)
    before = np.concatenate([[2], ids[:-1]])
    for t, experts in enumerate(got):
        mix = int(ids[t]) * layout.multipliers[0]
        mix ^= int(before[t]) * layout.multipliers[1]
        left = list(range(E))
        want = [left.pop(mix % len(left)) for _ in range(K)]
        assert experts.tolist() == want
    device = jax.jit(lambda ids: bigram_experts(ids, layout))(jnp.asarray(ids))
    np.testing.assert_array_equal(device, got)
    assert got.dtype == np.int32 and distinct(got)
    other = bigram_layout(vocab_size=V, pad_id=2, n_experts=E, k=K, seed=6)
    assert (bigram_experts(ids, other) != got).any()


def test_all_experts_can_be_chosen_and_every_order_of_them_occurs():
    layout = bigram_layout(vocab_size=V, pad_id=0, n_experts=3, k=3)
    ids = np.random.default_rng(0).integers(0, V, 300)
    orders = np.unique(bigram_experts(ids, layout), axis=0)
    assert len(orders) == 6 and (np.sort(orders, axis=1) == [0, 1, 2]).all()


def test_bigrams_stop_at_documents_and_continue_from_a_history():
    layout = bigram_layout(vocab_size=V, pad_id=0, n_experts=E)
    ids = np.array([5, 6, 7, 8])
    segments = np.array([1, 1, 2, 2])
    both = bigram_experts(ids, layout, segments_BT=segments)
    np.testing.assert_array_equal(both[2:], bigram_experts(ids[2:], layout))
    later = bigram_experts(ids[2:], layout, history_BN=ids[1:2])
    np.testing.assert_array_equal(later, bigram_experts(ids, layout)[2:])
    bad = bigram_experts(jnp.array([3, V]), layout)
    assert bad[1, 0] == BAD_ROW and bad[0, 0] < E


def test_errors_name_the_field():
    for options, message in (
        ((V, 0), "n_experts = 0"),
        ((0, 4), "vocab_size = 0"),
        ((V, 4, 5), "k = 5"),
        ((V, 4, 0), "k = 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            random_table(*options)
    with pytest.raises(ConfigError, match="seed = -1"):
        random_table(V, 4, seed=-1)
    with pytest.raises(ConfigError, match="n_experts = 5.*multiple of k = 2"):
        sliced_table(V, 5, 2)
    with pytest.raises(ConfigError, match="k = 9"):
        bigram_layout(vocab_size=V, pad_id=0, n_experts=8, k=9)
    for counts in ([1.5, 2.0], [[1], [2]], [-1, 3]):
        with pytest.raises(ShapeError, match="counts"):
            balanced_table(counts, 2)
    with pytest.raises(ShapeError, match="table has shape"):
        table_load(random_table(V, E), np.ones(3, int), E)
