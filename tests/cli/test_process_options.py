"""Options of several processes, refused before anything is joined."""

import pytest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--process-id", 0), "together with coordinator, num-processes"),
        (("--coordinator", "here"), "together with num-processes, process-id"),
        (("--cluster", "slurm"), "inside `srun`"),
        (("--cluster", "cloud"), "one of auto, none, slurm, tpu, kubernetes"),
        (("--start-timeout", 0), "start-timeout = 0 is not allowed: at least 1 second"),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval", "doctor"])
def test_half_given_options_are_one_line(memjax, tiny_file, command, words, said):
    outcome = memjax(command, tiny_file, *words)
    assert outcome.code == 1
    assert said in outcome.err and outcome.err.count("\n") == 1


def test_numbers_are_numbers(memjax, tiny_file):
    outcome = memjax("train", tiny_file, "--num-processes", "two")
    assert outcome.code == 2 and "num-processes" in outcome.err


def test_variables_are_options_too(memjax, tiny_file, monkeypatch):
    monkeypatch.setenv("MEMJAX_COORDINATOR", "host:99999999")
    monkeypatch.setenv("MEMJAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("MEMJAX_PROCESS_ID", "1")
    outcome = memjax("train", tiny_file)
    assert outcome.code == 1 and "HOST:PORT, port 1..65535" in outcome.err


def test_several_processes_measure_no_memory(memjax, tiny_file):
    joined = ("--coordinator", "h:1", "--num-processes", 2, "--process-id", 0)
    outcome = memjax("eval", tiny_file, "--memory", *joined)
    assert outcome.code == 2 and "are for one process" in outcome.err


def test_doctor_says_that_it_is_alone(memjax):
    outcome = memjax("doctor")
    assert outcome.code == 0 and "one, joined to no other" in outcome.out
