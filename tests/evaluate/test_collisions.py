"""Shared rows: equal to a dictionary, over any cutting, and what chance would give."""

import numpy as np
import pytest

from memjax.evaluate.collisions import (
    CollisionCounter,
    collision_excess,
    collision_frac,
    expected_shared_frac,
)
from memjax.ops.modular_hash import ModularLayout
from memjax.ops.ngram_hash import host_ngram_rows, ngram_layouts


def toy_layout(**changes):
    options = {"vocab_size": 17, "pad_id": 16, "orders": (1, 3), "n_heads": 2}
    options |= {"rows_per_head": 13, "layer_ids": [0]}
    (layout,) = ngram_layouts(**options | changes)
    return layout


def toy_rows(seed):
    tokens = np.random.default_rng(seed).integers(0, 5, (2, 12))
    return tokens, np.array([[1] * 5 + [2] * 7, [1] * 8 + [0] * 4])


def slow_columns(batches, layout):
    """(order, head) -> (n-grams, rows, shared, shared tokens, tokens)."""
    found = {}
    for i, order in enumerate(layout.orders):
        for head in range(layout.n_heads):
            row_of, count = {}, {}
            for tokens, segments in batches:
                rows = host_ngram_rows(tokens, layout, segments_BT=segments)
                for b, t in np.argwhere(segments > 0):
                    gram = []
                    for k in range(order):
                        inside = t - k >= 0 and segments[b, t - k] == segments[b, t]
                        gram.append(int(tokens[b, t - k]) if inside else layout.pad_id)
                    gram = tuple(gram)
                    row_of[gram] = int(rows[b, t, i * layout.n_heads + head])
                    count[gram] = count.get(gram, 0) + 1
            used = list(row_of.values())
            shared = [gram for gram, row in row_of.items() if used.count(row) > 1]
            found[order, head] = (
                len(row_of),
                len(set(used)),
                len(shared) / len(row_of),
                sum(count[gram] for gram in shared) / sum(count.values()),
                sum(count.values()),
            )
    return found


@pytest.mark.parametrize("vocab", [17, 5_000_000])
def test_columns_are_those_of_a_dictionary(vocab):
    layout = toy_layout(vocab_size=vocab)
    counter = CollisionCounter(layout)
    assert counter.exact == (vocab == 17)
    batches = [toy_rows(seed) for seed in range(3)]
    for tokens, segments in batches:
        counter.add(tokens, segments)
    want = slow_columns(batches, layout)
    columns = counter.columns()
    assert [(c["order"], c["head"]) for c in columns] == list(want)
    for column in columns:
        got = (
            column["distinct_ngrams"],
            column["distinct_rows"],
            column["shared_frac"],
            column["shared_tokens_frac"],
            column["n_tokens"],
        )
        assert got == want[column["order"], column["head"]]
        assert column["n_rows"] in layout.flat_primes
    tokens, segments = batches[0]
    (one,) = [slow_columns(batches[:1], layout)]
    got = collision_frac(tokens, segments, layout)
    assert got == pytest.approx(
        np.mean([shared for _, _, shared, _, _ in one.values()])
    )
    assert collision_frac(tokens, np.zeros_like(segments), layout) == 0


def test_documents_cut_into_batches_differently_give_the_same():
    layout = toy_layout()
    tokens, segments = toy_rows(1)
    whole, cut = CollisionCounter(layout), CollisionCounter(layout)
    whole.add(tokens, segments)
    cut.add(tokens[1:, :8], segments[1:, :8])
    cut.add(tokens[:1, 5:], segments[:1, 5:])
    cut.add(tokens[:1, :5], segments[:1, :5])
    assert whole.columns() == cut.columns()


def test_expectation_is_that_of_random_rows():
    rng = np.random.default_rng(0)
    n, n_rows, shared = 40, 101, []
    for _ in range(400):
        rows = rng.integers(0, n_rows, n)
        shared.append(np.mean([(rows == row).sum() > 1 for row in rows]))
    assert expected_shared_frac(n, n_rows) == pytest.approx(np.mean(shared), abs=0.01)
    assert expected_shared_frac(1, 7) == expected_shared_frac(0, 7) == 0
    assert expected_shared_frac(2, 1) == 1


def test_the_hash_collides_as_often_as_chance():
    layout = toy_layout(orders=(2,), rows_per_head=211, vocab_size=257, pad_id=256)
    counter = CollisionCounter(layout)
    tokens = np.random.default_rng(2).integers(0, 257, (1, 120))
    counter.add(tokens, np.ones_like(tokens))
    for column in counter.columns():
        assert column["shared_frac"] == pytest.approx(
            column["expected_shared_frac"], abs=0.15
        )


def test_a_modular_hash_collides_at_multiples_of_the_vocabulary():
    """The spike of arXiv:2601.21204, on tokens of Zipf's frequencies."""
    vocab, rng = 60, np.random.default_rng(0)
    share = 1 / np.arange(1, vocab + 1)
    tokens = rng.choice(vocab, size=(4, 2000), p=share / share.sum())
    segments = np.ones_like(tokens)

    def excess(n_rows):
        layout = ModularLayout(vocab_size=vocab, orders=(3,), column_rows=((n_rows,),))
        return collision_excess(tokens, segments, layout)

    for multiple in (120, 200, 300):
        at, off = excess(multiple * vocab), excess(multiple * vocab + 25)
        assert at > 1.3 and at > 1.2 * off, (multiple, at, off)
    # Engram's hash does not mind.
    sizes = {"vocab_size": vocab, "pad_id": 0, "orders": (3,), "n_heads": 1}
    (mixed,) = ngram_layouts(**sizes, rows_per_head=300 * vocab, layer_ids=(0,))
    assert collision_excess(tokens, segments, mixed) == pytest.approx(1, abs=0.1)
    nothing = collision_excess(tokens, np.zeros_like(tokens), mixed)
    assert nothing == 1
