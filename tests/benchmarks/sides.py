"""Both sides of a duel in this process, at tiny sizes.

What: `outputs_of`, what a side computes; `compare`, that both compute the same.
Why: a peer that does something else is no peer, and a process a side costs seconds.
When not: turns and clocks; see test_duel.py.
"""

import importlib.util

import numpy as np
import pytest

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs the extra bench"
)


def started(program):
    contender = program.make()
    contender.start()
    return contender


def outputs_of(program, folder):
    """{name: array} of a side, before its first call, which is then made."""
    contender = started(program)
    file = folder / "outputs.npz"
    assert contender.outputs(str(file))
    taken = contender.choose()
    assert min(taken.values()) > 0
    assert all(seconds > 0 for seconds in contender.seconds(2))
    with np.load(file) as arrays:
        return dict(arrays)


def compare(duel, folder, tolerance=1e-5):
    """Every form's sides agree, and no output is empty or constant."""
    for ours, theirs in duel.forms.values():
        a, b = outputs_of(ours, folder), outputs_of(theirs, folder)
        assert set(a) == set(b) and a
        for name in a:
            assert a[name].shape == b[name].shape
            assert np.linalg.norm(a[name]) > 0
            error = np.linalg.norm(a[name] - b[name]) / np.linalg.norm(a[name])
            assert error < tolerance, (name, error)
