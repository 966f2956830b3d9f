"""What processes must agree on; tests/train/test_processes.py joins real ones."""

import pytest

from memjax.errors import ConfigError
from memjax.parallel import processes
from memjax.parallel.process_devices import check_devices, device_fault


def seen(*, n=2, host="a", platform="cpu", ids=(0, 1), visible=(None, None)):
    one = {"host": host, "platform": platform, "ids": list(ids)}
    return [{**one, "visible": list(visible)} for _ in range(n)]


def test_equal_parts_pass():
    device_fault(seen(), 4, 2, 2)
    device_fault(seen(), 4, 2, None)
    own = [*seen(n=1, platform="gpu", visible=("0,1", None))]
    own += seen(n=1, platform="gpu", visible=("2,3", None))
    device_fault(own, 4, 2, 2)
    # Behind cgroups both may call their GPUs 0 and 1.
    device_fault(seen(platform="gpu", visible=("0,1", None)), 4, 2, 2)
    apart = [*seen(n=1, platform="gpu"), *seen(n=1, platform="gpu", host="b")]
    device_fault(apart, 4, 2, 2)


@pytest.mark.parametrize(
    ("found", "counts", "said"),
    [
        (seen(), (4, 1, 2), "num-processes = 2 .*: 1, the processes among which the 4"),
        (seen(), (6, 2, 2), "devices = 6 .*process 0: 2, process 1: 2. x 2 processes"),
        (
            [*seen(n=1), *seen(n=1, ids=(0, 1, 2))],
            (5, 2, 2),
            "process 1: 3.*CUDA_VISIBLE_DEVICES on GPUs",
        ),
        (
            seen(platform="gpu"),
            (4, 2, 2),
            r"GPUs \[0, 1\] of a.*processes 0 and 1 both see them.*launch/local.sh",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(found, counts, said):
    with pytest.raises(ConfigError, match=said):
        device_fault(found, *counts)


def test_a_single_process_agrees_with_itself_and_has_not_failed():
    assert processes.exchange("anything", "text") == ["text"]
    processes.agree("anything", {"seed": 1})
    check_devices()
    assert not processes.failed()


def test_differences_are_named(monkeypatch):
    def exchange(name, text):
        return [text, '{"data": {"parts": [1, 2]}, "seed": 1}']

    monkeypatch.setattr(processes, "exchange", exchange)
    processes.agree("experiment", {"seed": 1, "data": {"parts": [1, 2]}})
    with pytest.raises(ConfigError) as caught:
        processes.agree("experiment", {"seed": 0, "data": {"parts": [1, 3]}})
    said = str(caught.value)
    assert "data.parts.1: 3 in process 0, 2 in process 1" in said
    assert "seed: 0 in process 0, 1 in process 1" in said


def test_a_taken_port_is_named():
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="coordinator = .*a free port"):
            processes._check_port(address)
    processes._check_port(address)
