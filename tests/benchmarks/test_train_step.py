"""The benchmark of whole steps: compiled once, nothing synchronised, figures whole."""

import jax
import pytest

from memjax.benchmarks.entry import Session
from memjax.benchmarks.process import Local
from memjax.benchmarks.train_step import DEPTHS, TrainStep, entries, experiment


def test_figures_of_small_steps():
    session = Session(rates={}, n_turns=1, turn_seconds=0.0, open_worker=Local)
    (overhead, _) = entries(short=True)
    figures = overhead.measure(session).json()
    assert figures["ours_ms"] > 0 and figures["without_ms"] > 0
    ratio = figures["ours_ms"] / figures["without_ms"]
    assert figures["overhead"] == pytest.approx(ratio - 1)
    assert figures["tokens_s"] == pytest.approx(2 * 16 * 1e3 / figures["ours_ms"])
    assert 0 < figures["loader_ms"]


def test_steps_wait_for_no_transfer():
    step = TrainStep(memory=True, n_layers=3, short=True)
    step.start()
    with jax.transfer_guard("disallow"):
        assert min(step.seconds(2)) > 0


def test_what_is_compiled():
    assert DEPTHS == (2, 24)
    deep = experiment(memory=True, n_layers=24, short=False).model
    assert deep.scan_layers and len(deep.memories) == 1
    assert not experiment(memory=False, n_layers=3, short=False).model.memories
