"""Rates of chips and forms of tables, against numbers worked out by hand.

What: the plan of two V4.1 Engrams on four machines, to the digits it was worked out in;
collectives on a torus, in a node and between nodes.
Why: a plan is arithmetic, and arithmetic is easily wrong by a factor of two.
When not: the plan of an experiment; see tests/build/test_planner.
"""

import math

import pytest

from memjax.errors import ConfigError
from memjax.report.chips import (
    CHIPS,
    all_reduce_s,
    bisection_rate,
    chip_named,
    exchange_s,
    scatter_s,
    torus_shape,
)
from memjax.report.table_forms import Table, form_costs, row_bytes, rows_read, update_s

TOKENS = 2**22
TABLES = [
    Table(f"block_{layer}/memory/table", rows, 256, 24, "rows", 2, 0, False)
    for layer, rows in ((1, 384006168), (14, 384016682))
]
# state GB (two forms), there, back, copies, row ids by row, update all, read, host: ms
WORKED = {
    ("v5p", 128): (10.8, 7.7, 4.2, 8.1, 0.9, 6.8, 8.9, 2.0, 28),
    ("v6e", 256): (5.4, 3.9, 4.2, 8.1, 0.8, 3.4, 7.7, 1.8, 14),
    ("h100", 64): (21.6, 15.5, 14.5, 28.2, 1.5, 0.0, 14.7, 3.4, 13),
    ("h200", 8): (172.8, 123.7, 12.9, 25.1, 9.2, 0.0, 91, 21, 104),
}


def agrees(got: float, worked: float) -> bool:
    """Whether `got` is `worked` in the digits that it was written with."""
    digits = 0 if isinstance(worked, int) else len(f"{worked}".split(".")[1])
    return abs(got - worked) <= 0.5001 * 10**-digits


@pytest.mark.parametrize(("name", "n_chips"), WORKED)
def test_two_v41_tables_on_four_machines(name: str, n_chips: int) -> None:
    chip = CHIPS[name]
    full, narrow, *_ = form_costs(TABLES, chip, n_chips, TOKENS)
    update = update_s(TABLES, chip, n_chips, TOKENS)
    rows_ms = 1e3 * chip.row_s * TOKENS * 48 / n_chips
    times = (full["forward_s"], full["back_s"], full["copies_s"])
    more = (update["all"], update["read"], full["host_s"])
    got = (
        full["state_bytes"] / 1e9,
        narrow["state_bytes"] / 1e9,
        *(1e3 * s for s in times),
        rows_ms,
        *(1e3 * s for s in more),
    )
    for value, worked in zip(got, WORKED[name, n_chips], strict=True):
        assert agrees(value, worked), (got, WORKED[name, n_chips])
    assert full["fits"] == (name != "h200") and narrow["fits"]


def test_a_token_and_a_step_of_v41() -> None:
    assert row_bytes(256, 1) == 264 and row_bytes(256, 2) == 512
    assert sum(t.reads * row_bytes(t.width, 1) for t in TABLES) == 12_672
    assert sum(t.reads * t.width * 2 for t in TABLES) == 24_576
    reads = TOKENS * sum(t.reads for t in TABLES)
    assert reads == 201_326_592  # 201.3 M
    full = form_costs(TABLES, CHIPS["v5p"], 128, TOKENS)[0]
    assert agrees(128 * full["rows_bytes"] / 1e9, 53.2)
    assert agrees(128 * full["gradient_bytes"] / 1e9, 103.1)
    read = sum(rows_read(t.rows, TOKENS * t.reads) for t in TABLES)
    assert agrees(read / 1e6, 177.1)
    for n_chips, sent in ((128, 102), (256, 103), (64, 101), (8, 90)):
        assert agrees(24_576 * TOKENS * (n_chips - 1) / n_chips / 1e9, sent)


def test_weighted_reads_return_one_vector() -> None:
    bag = Table("keys", 4096, 64, 32, "rows", 4, 0, True)
    (form, *_) = form_costs([bag], CHIPS["v5p"], 8, 1024)
    assert form["gradient_bytes"] == 1024 * 64 * 2 / 8
    assert form["rows_bytes"] == 1024 * 32 * row_bytes(64, 1) / 8


def test_rows_read_is_what_random_reads_find() -> None:
    assert rows_read(1000, 0) == 0
    assert rows_read(1000, 10) == pytest.approx(10, rel=0.01)
    assert rows_read(1000, 1e6) == pytest.approx(1000)
    never = (1 - 1 / 1000) ** 700
    assert rows_read(1000, 700) == pytest.approx(1000 * (1 - never), rel=1e-3)


def test_shapes_of_tori() -> None:
    assert torus_shape(128, 3) == (4, 4, 8)
    assert torus_shape(256, 2) == (16, 16)
    assert torus_shape(8, 2) == (2, 4)
    assert torus_shape(7, 3) == (1, 1, 7)
    assert all(math.prod(torus_shape(n, 3)) == n for n in range(1, 70))
    # 16 lines along the axis of 8, cut twice; a slice of 8 x 8 is cut once
    assert bisection_rate(CHIPS["v5p"], 128) == 3.2e12
    assert bisection_rate(CHIPS["v6e"], 256) == 3.2e12
    assert bisection_rate(CHIPS["v6e"], 64) == 8 * 100e9


def test_collectives_inside_a_node_and_between_nodes() -> None:
    chip = CHIPS["h100"]
    assert exchange_s(chip, 8e9, 1) == scatter_s(chip, 8e9, 1) == 0
    assert exchange_s(chip, 8e9, 8) == 7e9 / 450e9
    assert exchange_s(chip, 8e9, 16) == 4e9 / 50e9  # half of it leaves the node
    # neighbours 8 chips apart: nobody of the group is in the same node
    assert exchange_s(chip, 8e9, 4, stride=8) == 6e9 / 50e9
    assert exchange_s(chip, 8e9, 4, stride=2) == 6e9 / 450e9
    assert scatter_s(chip, 8e9, 8) == 7e9 / 450e9
    # between 8 nodes each of the 8 chips carries an eighth
    assert scatter_s(chip, 64e9, 64) == pytest.approx(7e9 / 50e9)
    assert all_reduce_s(chip, 64e9, 64) == 2 * scatter_s(chip, 64e9, 64)
    assert scatter_s(CHIPS["v6e"], 256e9, 256) == 255e9 / 400e9


def test_an_unknown_chip_names_those_there_are() -> None:
    with pytest.raises(ConfigError) as error:
        chip_named("b200")
    assert str(error.value).count("h100") == 1 and "b200" in str(error.value)
    assert all(chip.source for chip in CHIPS.values())
