"""The plain texts: aligned tables, yardsticks beside a run, the plan of a run."""

import pytest

from memjax.report.plan import bytes_text, count_text, plan_text
from memjax.report.results import results_table
from memjax.report.text_table import text_table
from memjax.report.yardsticks import yardsticks


def test_columns_align_and_markdown_has_a_rule():
    plain = text_table(["name", "x"], [["a", "1.5"], ["bb", "10.25"]])
    assert plain.splitlines() == [
        "name      x",
        "----  -----",
        "a       1.5",
        "bb    10.25",
    ]
    marked = text_table(["name", "x"], [["a", "1.5"]], markdown=True)
    assert marked.splitlines() == ["| name |   x |", "|------|----:|", "| a    | 1.5 |"]
    with pytest.raises(ValueError, match="2 cells"):
        text_table(["a", "b"], [["1"]])


def test_yardsticks_of_kjv():
    marks = {mark.method: mark.bits_per_byte for mark in yardsticks("kjv")}
    assert marks["KN-3"] == 2.521 and marks["KN-5"] == 1.681
    assert marks["KN-8"] == 1.443 and marks["PPMd"] == 1.357
    assert [mark.bits_per_byte for mark in yardsticks("kjv", "test")] == [1.466]
    assert yardsticks("my_notes") == ()


def test_our_run_stands_in_order_among_the_yardsticks():
    lines = results_table({"valid": {"kjv": 1.6}, "valid_bpb": 1.6}).splitlines()
    names = [line.split("  ")[0] for line in lines[2:]]
    assert names.index("KN-5") < names.index("this run") < names.index("KN-6")
    assert "1.600" in lines[2 + names.index("this run")]
    assert names[-1] == "zpaq -m5"


def test_several_corpora_have_a_column_each_and_one_for_all():
    result = {"valid": {"kjv": 1.5, "mine": 3.25}, "valid_bpb": 2.125}
    text = results_table(result, markdown=True)
    ours = next(line for line in text.splitlines() if "this run" in line)
    assert [cell.strip() for cell in ours.strip("|").split("|")][:4] == [
        "this run",
        "1.500",
        "3.250",
        "2.125",
    ]


def test_plan_keeps_dense_and_table_apart():
    text = plan_text(
        {
            "params_dense": 640_000,
            "params_table": 6_400_000,
            "bytes_dense": 2_560_000,
            "bytes_table": 25_600_000,
            "on_host": {"memory/table": {"rows": 100_000, "slots": 6144}},
            "flops_per_token": 1_280_000,
            "table_bytes_per_token": 2048,
            "tokens_per_step": 2048,
            "n_steps": 1000,
        }
    )
    assert "dense weights: 640.00 k parameters, 2.4 MiB" in text
    assert "memory tables: 6.40 M parameters, 24.4 MiB" in text
    assert "memory/table: on the host, 100.00 k rows; the device holds 6.14 k" in text
    assert "1.28 M FLOPs forward, 2.0 KiB read from tables" in text
    assert "2048 tokens; 1000 steps, 2.05 M tokens in all" in text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1e3, "1.00 k"), (2.5e12, "2.50 T")]
)
def test_counts(number, text):
    assert count_text(number) == text


def test_bytes():
    assert [bytes_text(n) for n in (0, 1023, 1536, 2**50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1024.0 TiB",
    ]
