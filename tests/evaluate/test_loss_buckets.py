"""Losses of groups of tokens: literal tables, ties, empty groups, a gate's trust."""

import math

import numpy as np
import pytest

from memjax.errors import ShapeError
from memjax.evaluate.loss_buckets import frequency_buckets, gate_buckets, quantiles


def test_quantiles_of_all_values():
    found = quantiles(np.arange(101, dtype=np.float32) / 100)
    want = {"q01": 0.01, "q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75}
    want |= {"q95": 0.95, "q99": 0.99, "mean": 0.5}
    assert found == {name: pytest.approx(value) for name, value in want.items()}
    assert all(map(math.isnan, quantiles(np.zeros(0)).values()))


def test_a_literal_table_of_gates():
    gates = np.array([0.9, 0.1, 0.2, 0.8], np.float32)
    nats = np.array([1.0, 4.0, 2.0, 2.0])
    without = np.array([3.0, 3.0, 2.0, 4.0])
    low, high = gate_buckets(gates, nats, without, 2)
    assert (low["bucket"], high["bucket"]) == ("0.1 to 0.2", "0.8 to 0.9")
    wanted = {"n_tokens": 2, "share": 0.5, "nats": 3.0, "nats_without": 2.5}
    assert {name: low[name] for name in wanted} == wanted
    assert (low["gain"], high["gain"]) == (-0.5, 2.0)


def test_groups_are_equal_cover_all_tokens_and_average_to_the_whole():
    rng = np.random.default_rng(0)
    gates, nats, without = rng.random((3, 1003))
    found = gate_buckets(gates, nats, without)
    sizes = [bucket["n_tokens"] for bucket in found]
    assert len(found) == 10 and sum(sizes) == 1003 and max(sizes) - min(sizes) <= 1
    for name, each in (("nats", nats), ("nats_without", without)):
        mean = sum(b["share"] * b[name] for b in found)
        assert mean == pytest.approx(each.mean())
    edges = [value for b in found for value in (b["low"], b["high"])]
    assert edges == sorted(edges)


def test_equal_gates_stay_together():
    assert len(gate_buckets(np.ones(50), np.zeros(50), np.ones(50))) == 1
    gates = np.array([0.0] * 60 + [0.5] * 5 + [1.0] * 35)
    found = gate_buckets(gates, np.zeros(100), np.ones(100))
    assert [bucket["n_tokens"] for bucket in found] == [60, 5, 35]
    assert [bucket["low"] for bucket in found] == [0, 0.5, 1]


def test_a_gate_that_is_not_a_number_is_in_no_group():
    gates = np.array([0.5, np.nan])
    (found,) = gate_buckets(gates, np.zeros(2), np.ones(2))
    assert found["n_tokens"] == 1 and found["share"] == 0.5
    assert gate_buckets(np.full(2, np.nan), np.zeros(2), np.ones(2)) == []


def test_a_literal_table_of_counts():
    counts = np.array([-1, 0, 1, 2, 3, 4, 15, 16, 10**12])
    nats = np.arange(9.0)
    found = frequency_buckets(counts, nats, nats + 1)
    assert [(b["bucket"], b["n_tokens"]) for b in found] == [
        ("cut", 1),
        ("0", 1),
        ("1", 1),
        ("2-3", 2),
        ("4-15", 2),
        ("16+", 2),
    ]
    assert [b["nats"] for b in found] == [0, 1, 2, 3.5, 5.5, 7.5]
    assert all(b["gain"] == 1 for b in found)
    empty = frequency_buckets(counts[:1], nats[:1], nats[:1])[1]
    assert empty["n_tokens"] == 0 and math.isnan(empty["gain"])


def test_unequal_lengths_are_an_error():
    with pytest.raises(ShapeError, match=r"tokens has shape \(2,\), expected \[3\]"):
        gate_buckets(np.zeros(2), np.zeros(2), np.zeros(3))
