"""A worker in a process of its own: its answers, its errors, its environment."""

import numpy as np
import pytest

from memjax.benchmarks.machine import free_bytes, huge_page_frac, machine_facts
from memjax.benchmarks.process import BenchmarkError, Local, Process, environment
from memjax.benchmarks.rates import Rates, rates_program
from memjax.benchmarks.table_rows import program_of
from memjax.benchmarks.table_step import TableCase, save_batches

CASE = TableCase(optimizer="adam", n_rows=2048, width=8)


@pytest.fixture
def program(tmp_path):
    tokens = np.full((2, 8), 97, np.int32)
    save_batches(tmp_path / "b.npz", [{"tokens": tokens, "segments": tokens}])
    return program_of(CASE, tmp_path / "b.npz")


def test_process_answers_like_a_local_worker_and_reports_errors(program, tmp_path):
    broken = Process(program_of(CASE, tmp_path / "no.npz"), False)
    process, local = Process(program, True), Local(program, True)
    try:
        described, here = process.answer(), local.answer()
        assert described["need_bytes"] == here["need_bytes"] > 0
        counts = []
        for worker in (process, local):
            for call, *n in (("start",), ("steps", 2), ("finish",)):
                worker.ask(call, *n)
                answer = worker.answer()
                assert call != "steps" or (len(answer) == 2 and min(answer) > 0)
            counts.append(answer)
        assert counts[0]["unique_rows"] == counts[1]["unique_rows"] > 0
        with pytest.raises(BenchmarkError, match=r"adam with 2048 rows: .*no\.npz"):
            broken.answer()
        broken.ask("start")
        with pytest.raises(BenchmarkError, match="ended with code 1: File.*no.npz"):
            broken.answer()
        with pytest.raises(ValueError, match="no method for others"):
            local.ask("_run", 1)
            local.answer()
        process._process.kill()
        process.ask("steps", 1)
        with pytest.raises(BenchmarkError, match="memory runs out; choose fewer"):
            process.answer()
    finally:
        process.close()
        broken.close()
    assert process._process.returncode == -9


def test_environment_sets_huge_pages_and_keeps_the_rest():
    before = {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=2:glibc.x=1"}
    on, off = environment(before, True), environment(before, False)
    assert on["GLIBC_TUNABLES"] == "glibc.x=1:glibc.malloc.hugetlb=1"
    assert off["GLIBC_TUNABLES"] == "glibc.x=1" and off["A"] == "b"
    assert environment({}, True)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"


def test_machine_facts_are_there_or_none():
    facts = machine_facts()
    assert facts["cores"] >= 1 and facts["jax"] and facts["processor"]
    for value in (free_bytes(), facts["memory_bytes"]):
        assert value is None or value > 2**20
    frac = huge_page_frac()
    assert frac is None or 0 <= frac <= 1


def test_rates_of_a_machine_are_positive():
    rates = Rates(n_bytes=2**16, side=32, n_times=2)
    assert set(rates.describe()) == {"backend", "device"}
    found = rates.measure()
    assert set(found) == {"copy_gb_s", "matmul_gflops"} and min(found.values()) > 0
    full = rates_program(short=False)
    assert full.make()._n_bytes == 2**28  # more than any cache holds
