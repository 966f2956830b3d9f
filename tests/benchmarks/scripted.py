"""A benchmark worker whose times are made up, and batches without a corpus."""

import contextlib

import numpy as np
import pytest

from memjax.benchmarks import table_rows
from memjax.benchmarks.table_step import TableCase


class Scripted:
    """A worker that answers with made-up times and notes what it was asked."""

    def __init__(self, program, huge_pages, log, need_bytes=1000):
        self.case = TableCase(**program.arguments["case"])
        self.log, self.need_bytes = log, need_bytes
        self.open, self.asked, self.n_calls = True, ("describe", 0), 0
        with np.load(program.arguments["batches"]) as arrays:
            self.n_batches = len(arrays["tokens"])
        log.append(self)

    def ask(self, call, n=0):
        assert self.open
        self.asked = (call, n)
        self.log.append((self.case.optimizer, self.case.n_rows, call, n))

    def answer(self):
        call, n = self.asked
        if call == "describe":
            need = self.need_bytes
            facts = {"backend": "cpu", "device": "chip"}
            return facts | {"need_bytes": need, "temp_bytes": 7}
        if call == "steps":
            # A machine that is slower and slower: twice the time at every turn.
            self.n_calls += 1
            factor = 30 if self.case.optimizer == "sinkhorn_dense" else 1
            ms = factor * (1 + (self.case.n_rows > 2000)) * 2.0**self.n_calls
            return (
                [1e9, 1e9, *[1e-3 * ms] * (n - 2)] if factor == 1 else [1e-3 * ms] * n
            )
        if call == "parts":
            return [[0.001, 0.002, 0.003]] * n
        counts = {"huge_page_frac": 0.5}
        if self.case.optimizer != "sinkhorn_dense":
            counts["unique_rows"] = 10
        if self.case.optimizer == "sinkhorn":
            counts |= {"active_rows": 100, "dense_steps": 0, "overflow_steps": 0}
        return counts

    def close(self):
        self.open = False


@pytest.fixture
def no_corpus(monkeypatch):
    """Batches without the data extra."""

    @contextlib.contextmanager
    def batches(config):
        tokens = np.zeros((config.batch_size, 4), np.int32)
        yield iter([{"tokens": tokens, "segments": tokens}] * 1000)

    monkeypatch.setattr(table_rows, "train_batches", batches)
