"""The saved place of a stream of batches (P24)."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from memjax.data.config import CorpusConfig
from memjax.data.pipeline import train_batches
from memjax.data.state import state_for_readers
from memjax.errors import ConfigError, DataError
from tests.data.conftest import write_prepared
from tests.data.test_readers import FIELDS, same, take

# Lengths that leave most windows beginning and ending inside a document.
DOCUMENTS = [bytes(range(i, i + 3 + i)) for i in range(14)]

CHILD = """
import json, sys
import numpy as np
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.pipeline import train_batches

assert "jax" not in sys.modules
settings, state, out = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
corpora = tuple(CorpusConfig(**c) for c in settings.pop("corpora"))
batches = train_batches(DataConfig(corpora=corpora, **settings))
batches.restore(state)
arrays = {}
for i in range(5):
    arrays.update({f"{i}-{name}": a for name, a in next(batches).items()})
np.savez(out, **arrays)
"""


def test_p24_a_new_process_goes_on_bit_for_bit(make_config, tmp_path):
    """7 packed batches, save, 5 more: the same 5 in a new process, shuffled, from the
    middle of a document and across the end of an epoch."""
    config = make_config(DOCUMENTS)
    batches = train_batches(dataclasses.replace(config, n_threads=2))
    assert batches.steps_per_epoch == 9
    take(batches, 7)
    state = json.loads(json.dumps(batches.state()))
    wanted = take(batches, 5)
    batches.close()
    assert any((batch["tokens"][:, 0] != 256).any() for batch in wanted)
    assert any((batch["segments"] > 1).any() for batch in wanted)
    out = tmp_path / "five.npz"
    settings = json.dumps(dataclasses.asdict(config))
    command = [sys.executable, "-W", "error", "-c", CHILD]
    subprocess.run([*command, settings, json.dumps(state), str(out)], check=True)
    with np.load(out) as arrays:
        got = [{name: arrays[f"{i}-{name}"] for name in FIELDS} for i in range(5)]
    assert same(got, wanted)


def test_p24_two_epochs_have_different_orders(make_config):
    config = make_config(DOCUMENTS)
    batches = train_batches(config)
    first, second = take(batches, 9), take(batches, 9)
    assert not same(first, second)
    ordered = train_batches(dataclasses.replace(config, shuffle_documents=False))
    assert same(take(ordered, 9), take(ordered, 9))


def test_p24_another_place_is_an_error_that_names_the_field(make_config, tmp_path):
    """Another number of readers, tokenizer or list of files, and all other settings."""
    config = make_config(DOCUMENTS)
    state = train_batches(config).state()
    write_prepared(tmp_path / "other" / "own", [*DOCUMENTS[1:], DOCUMENTS[0]])
    other = (CorpusConfig(name=str(tmp_path / "other" / "own")),)
    heavier = (dataclasses.replace(config.corpora[0], weight=2.0),)
    changes = {
        "corpora": ({"corpora": other}, {"corpora": heavier}),
        "context": ({"context": 5},),
        "batch_size": ({"batch_size": 2},),
        "seed": ({"seed": 1},),
        "shuffle_documents": ({"shuffle_documents": False},),
    }
    for field, settings in changes.items():
        for setting in settings:
            batches = train_batches(dataclasses.replace(config, **setting))
            with pytest.raises(DataError, match=f"of the data has {field} = "):
                batches.restore(state)
    with pytest.raises(DataError, match="n_readers = 1, this run has 2; state_for"):
        train_batches(config, n_readers=2).restore(state)
    for field, value in (("tokenizer", "tokenizers-1"), ("step", -1), ("step", None)):
        with pytest.raises(DataError, match=f"{field} = {value!r}"):
            train_batches(config).restore({**state, field: value})


def test_a_state_can_be_rewritten_for_other_readers(make_config):
    config = make_config(DOCUMENTS)
    batches = train_batches(config)
    take(batches, 7)
    state = state_for_readers(batches.state(), 2)
    wanted = next(batches)
    for reader in range(2):
        half = train_batches(config, reader=reader, n_readers=2)
        half.restore(state)
        rows = slice(2 * reader, 2 * reader + 2)
        assert same([next(half)], [{name: wanted[name][rows] for name in FIELDS}])
    for n_readers in (3, 0):
        with pytest.raises(ConfigError, match=f"n_readers = {n_readers}"):
            state_for_readers(state, n_readers)


def test_reading_ahead_does_not_move_the_state(make_config):
    config = make_config(DOCUMENTS, n_threads=2)
    with train_batches(config) as batches:
        take(batches, 3)
        assert batches.state()["step"] == batches.step == 3
        wanted = next(batches)
        batches.seek(3)
        assert same([next(batches)], [wanted])
