"""Turns, choice of form, memory and a missing peer, on workers with made-up times."""

import numpy as np
import pytest

from memjax.benchmarks import catalog, duel
from memjax.benchmarks.duel import NO_PEER, Duel
from memjax.benchmarks.entry import Entry, Session
from memjax.benchmarks.figure import Figure, Target, Work
from memjax.benchmarks.process import BenchmarkError, Program
from memjax.errors import ConfigError


class Scripted:
    """A contender with the milliseconds and the output of its program's arguments."""

    log: list = []
    variables: list = []

    def __init__(self, program, huge_pages):
        self.script, self.name = program.arguments, program.name
        self.huge_pages, self.asked = huge_pages, ["describe"]
        self.variables.append(dict(program.variables))
        self.n_turns = 0
        self.log.append((self.name, "open"))

    def ask(self, *asked):
        self.asked = list(asked)
        self.log.append((self.name, *asked[:1]))

    def answer(self):
        call, *arguments = self.asked
        script = self.script
        if call == "describe":
            return {
                "framework": "jax",
                "version": "1",
                "device": script.get("device", "cpu"),
                "threads": 2,
            }
        if call == "outputs":
            np.savez(arguments[0], out=np.full(3, script.get("out", 1.0)))
            return True
        if call == "choose":
            return {"quick": script["ms"] / 1e3, "slow": 1.0}
        if call == "seconds":
            self.n_turns += 1
            return [self.n_turns * script["ms"] / 1e3] * arguments[0]
        if call == "measure":
            return {"copy_gb_s": 10.0, "matmul_gflops": 100.0}
        return {"peak_bytes": 5, "huge_page_frac": None}

    def close(self):
        self.log.append((self.name, "close"))


@pytest.fixture(autouse=True)
def log():
    Scripted.log, Scripted.variables = [], []
    return Scripted.log


def side(name, need=0, **script):
    return Program(target="m:f", arguments=script, name=name, need_bytes=need)


def session(**changes):
    rates = {"copy_gb_s": 10.0, "matmul_gflops": 100.0}
    fixed = dict(rates=rates, n_turns=3, turn_seconds=0.02, open_worker=Scripted)
    return Session(**(fixed | changes))


def test_sides_take_turns_and_the_faster_forms_count():
    forms = {
        "dense": (side("a", ms=4), side("b", ms=20)),
        "rows": (side("c", ms=6), side("d", ms=10)),
    }
    work = Work(words="rows", flops=1e8, copied=2.5e6, moved=5e6, ms=0.5)
    figure = Duel(name="x", forms=forms, work=work, target=Target(value=3)).measure(
        session()
    )
    # Turns take 1, 2 and 3 times the script's milliseconds.
    assert (figure.ours_ms, figure.ours_min_ms, figure.ours_form) == (8, 4, "dense")
    assert (figure.theirs_ms, figure.theirs_form, figure.ratio) == (20, "rows", 2.5)
    assert figure.floor_ms == pytest.approx(1 + 1 + 0.5)
    assert figure.of_floor == pytest.approx(2.5 / 8) and figure.calls == 15
    said = figure.json()
    assert said["target"] == "ratio >= 3" and said["target_met"] is False
    assert said["forms"]["dense"]["ratio"] == 5 and said["difference"] == 0
    assert said["forms"]["rows"]["theirs"]["variant"] == "quick"
    assert said["forms"]["rows"]["ours"]["threads"] == 2
    first = [entry for entry in Scripted.log if entry[0] in "ab"]
    assert first == [
        *((name, "open") for name in "ab"),
        *((name, "start") for name in "ab"),
        *((name, "outputs") for name in "ab"),
        *((name, "choose") for name in "ab"),
        *((name, "seconds") for _ in range(3) for name in "ab"),
        *((name, "finish") for name in "ab"),
        *((name, "close") for name in "ba"),
    ]
    assert Scripted.log.index(("c", "open")) > Scripted.log.index(("a", "close"))


def test_calls_of_a_turn_follow_the_time_of_a_call():
    assert session().calls(0.005) == 4 and session().calls(1.0) == 2
    assert session().calls(1e-9) == 50


def test_sides_that_compute_different_things_are_an_error():
    one = Duel(name="x", forms={"f": (side("a", ms=1, out=1.1), side("b", ms=1))})
    with pytest.raises(BenchmarkError, match=r"x, f: .* differ by 1\.0e-01"):
        one.measure(session())
    nan = Duel(name="x", forms={"f": (side("a", ms=1, out=np.nan), side("b", ms=1))})
    with pytest.raises(BenchmarkError, match="differ by nan"):
        nan.measure(session())
    wide = Duel(name="x", forms=one.forms, max_difference=0.2)
    assert wide.measure(session()).difference == pytest.approx(0.1)
    assert Scripted.log.count(("a", "close")) == 3


def test_without_torch_ours_stands_alone():
    one = Duel(name="x", forms={"f": (side("a", ms=1), side("b", ms=2))})
    figure = one.measure(session(with_peer=False))
    assert figure.ours_ms == 2 and figure.theirs_ms is None and figure.ratio is None
    assert figure.notes == (NO_PEER,) and "memjax[bench]" in NO_PEER
    assert "b" not in {name for name, *_ in Scripted.log}


def test_other_devices_are_not_compared():
    one = Duel(name="x", forms={"f": (side("a", ms=1, device="gpu"), side("b", ms=2))})
    figure = one.measure(session())
    assert figure.theirs_ms is None and "ours on gpu, theirs on cpu" in figure.notes[0]


def test_memory_decides_who_runs_beside_whom(monkeypatch):
    monkeypatch.setattr(duel, "free_bytes", lambda: int(10e9))
    large, small = int(8e9), int(1e9)
    alone = Duel(
        name="x", forms={"f": (side("a", large, ms=1), side("b", large, ms=3))}
    ).measure(session())
    assert alone.ratio == 3 and "one side after the other" in alone.notes[0]
    assert Scripted.log.index(("b", "open")) > Scripted.log.index(("a", "close"))
    forms = {
        "huge": (side("c", int(2e10), ms=1), None),
        "small": (side("d", small, ms=2), None),
    }
    figure = Duel(name="x", forms=forms).measure(session())
    assert figure.ours_form == "small" and figure.skipped is None
    assert figure.notes == ("c needs 20.0 GB, and 10.0 GB of memory are free",)
    none = Duel(name="x", forms={"huge": forms["huge"]}).measure(session())
    assert none.ours_ms is None and "20.0 GB" in none.skipped
    assert none.json()["target_met"] is None


def test_targets_of_other_numbers_and_signs():
    figure = Figure(ours_ms=2.0, more={"overhead": 0.3})
    target = Target(of="overhead", sign="<=", value=0.25)
    assert target.met(figure.json()) is False and str(target) == "overhead <= 0.25"
    assert Target(of="of_floor", value=0.8).met(figure.json()) is None
    assert figure.json()["overhead"] == 0.3 and figure.json()["target"] is None


def test_figures_of_a_command():
    target = Target(value=1)
    entries = [
        Duel(name="x/a", forms={"f": (side("a", ms=1), None)}, target=target).entry(),
        Entry(name="x/b", measure=lambda session: Figure(ours_ms=session.n_turns)),
    ]
    figures = catalog.measure_entries(
        entries, short=True, huge_pages=False, open_worker=Scripted
    )
    assert list(figures) == ["machine", "x/a", "x/b"]
    machine = figures["machine"]
    assert machine["rates"]["copy_gb_s"] == 10 and machine["huge_pages"] is False
    assert figures["x/b"]["ours_ms"] == 3 and figures["x/a"]["target"] is None
    full = catalog.measure_entries(
        entries[:1],
        short=False,
        huge_pages=True,
        cache_dir="here",
        open_worker=Scripted,
    )
    assert Scripted.variables == [{}, {}] + 2 * [{"MEMJAX_CACHE": "here"}]
    assert full["x/a"]["target"] == "ratio >= 1" and full["machine"]["huge_pages"]


def test_names():
    assert catalog.names_of(["bag", "bag", "all"])[0] == "bag"
    assert set(catalog.names_of(["all"])) == set(catalog.BENCHMARKS)
    for word, allowed in (
        ("bags", "did you mean bag?"),
        ("zzz", "one of table_rows, product_keys"),
        ("bag/none", "the beginning of one of"),
        ("table_rows/x", "no parts"),
    ):
        with pytest.raises(ConfigError, match="name = ") as caught:
            catalog.chosen(catalog.names_of([word]), short=True)
        assert allowed in str(caught.value)
    assert [x.name for x in catalog.chosen(["bag/row"], short=True)] == [
        "bag/row_sums/256x128x64"
    ]
    assert catalog.chosen(["table_rows"], short=True) == []


@pytest.mark.parametrize("name", sorted(set(catalog.BENCHMARKS) - {"table_rows"}))
def test_every_benchmark_lists_its_entries_in_both_forms(name):
    for short in (False, True):
        names = [entry.name for entry in catalog.chosen([name], short=short)]
        assert names and len(set(names)) == len(names)
        assert all(entry.startswith(f"{name}/") for entry in names)
