"""Datastores on disk: whole or not there, and of one model only.

What: what is written is read back; refusals name what differs; errors and kills in the
    middle leave nothing that could be opened.
Why: half a datastore, or another model's, scores without complaint.
When not: what the keys are; test_knn.
"""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from memjax.errors import CheckpointError, ConfigError, DataError
from memjax.evaluate.datastore import open_datastore, value_dtype, write_datastore

MODEL = {"model": {"step": 3, "parameters": "aa"}, "text": {"kjv": 10}, "key": "final"}
KEYS = np.arange(12, dtype=np.float32).reshape(6, 2)
TOKENS = np.array([5, 0, 40000, 65535, 1, 2])


def write(folder, chunks=None, *, about=MODEL, n_entries=6, vocab_size=65536, **more):
    if chunks is None:
        chunks = [(KEYS[:4], TOKENS[:4]), (KEYS[4:], TOKENS[4:])]
    write_datastore(
        folder, about, chunks, n_entries=n_entries, width=2, vocab_size=vocab_size,
        **more,
    )  # fmt: skip


def files(folder):
    return {
        path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("key_dtype", ["float16", "float32"])
def test_what_was_written_is_read_back(tmp_path, key_dtype):
    folder = tmp_path / "deep" / "store"
    write(folder, key_dtype=key_dtype)
    found = open_datastore(folder, MODEL)
    assert len(found) == 6 and found.keys.dtype == key_dtype
    assert isinstance(found.keys, np.memmap) and isinstance(found.values, np.memmap)
    np.testing.assert_array_equal(found.keys, KEYS)
    # 40000 and 65535 do not fit in the release's int16.
    np.testing.assert_array_equal(found.values, TOKENS)
    with pytest.raises(ValueError, match="read-only"):
        found.keys[0, 0] = 1
    assert {path.name for path in folder.parent.iterdir()} == {"store"}


def test_token_ids_are_wide_enough_for_the_vocabulary(tmp_path):
    sizes = [(257, "uint16"), (65536, "uint16"), (65537, "int32"), (267744, "int32")]
    for vocab_size, dtype in sizes:
        assert value_dtype(vocab_size) == dtype
        assert np.iinfo(dtype).max >= vocab_size - 1
    write(tmp_path / "s", [(KEYS[:1], [267743])], n_entries=1, vocab_size=267744)
    assert open_datastore(tmp_path / "s", MODEL).values[0] == 267743


def test_another_models_datastore_is_refused_by_what_differs(tmp_path):
    write(tmp_path / "store")
    other = {
        "model": {"step": 4, "parameters": "bb"},
        "text": {"kjv": 10, "gcide": 1},
        "key": "final",
    }
    with pytest.raises(CheckpointError) as caught:
        open_datastore(tmp_path / "store", other)
    text = str(caught.value)
    for part in (
        "model.parameters is 'aa' there and 'bb' now",
        "model.step is 3 there and 4 now",
        "text.gcide is 'absent' there and 1 now",
        "build it anew",
    ):
        assert part in text, text
    assert "key is" not in text and "text.kjv" not in text
    fewer = {name: MODEL[name] for name in ("model", "text")}
    with pytest.raises(CheckpointError, match="key is 'final' there and 'absent' now"):
        open_datastore(tmp_path / "store", fewer)


def test_a_new_one_takes_the_old_ones_place(tmp_path):
    write(tmp_path / "store")
    write(tmp_path / "store", [(KEYS[:1], TOKENS[:1])], about={"key": 1}, n_entries=1)
    assert len(open_datastore(tmp_path / "store", {"key": 1})) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def broken(error):
    yield KEYS[:4], TOKENS[:4]
    raise error


@pytest.mark.parametrize(
    ("chunks", "options", "error", "message"),
    [
        (broken(RuntimeError("out of memory")), {}, RuntimeError, "out of memory"),
        (broken(KeyboardInterrupt()), {}, KeyboardInterrupt, "^$"),
        ([(KEYS[:4], TOKENS[:4])], {}, DataError, "4 entries, not the 6"),
        ([(KEYS, TOKENS)] * 2, {}, DataError, "more entries than the 6"),
        ([(KEYS * np.nan, TOKENS)], {}, DataError, "not finite in knn.key_dtype"),
        ([(KEYS * 1e4, TOKENS)], {}, DataError, "only float32 holds them"),
        ([(KEYS, TOKENS)], {"vocab_size": 65535}, DataError, "token 65535 is not"),
        ([(KEYS, -TOKENS)], {}, DataError, "token -5 is not allowed"),
        ([], {"n_entries": 0}, ConfigError, "knn.n_tokens = 0"),
        ([], {"n_entries": 2**31}, ConfigError, "knn.n_tokens = 2147483648"),
        ([], {"key_dtype": "int8"}, ConfigError, "knn.key_dtype = 'int8'"),
    ],
)  # fmt: skip
def test_an_error_half_way_leaves_everything_as_it_was(
    tmp_path, chunks, options, error, message
):
    folder = tmp_path / "store"
    if isinstance(chunks, list):
        write(folder)
    before = files(tmp_path)
    with pytest.raises(error, match=message):
        write(folder, chunks, **options)
    assert files(tmp_path) == before
    assert folder.exists() == bool(before)
    assert len(list(tmp_path.iterdir())) == int(bool(before))


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from memjax.evaluate.datastore import write_datastore

def chunks():
    yield np.ones((2, 2)), np.ones(2)
    os.kill(os.getpid(), signal.SIGKILL)

write_datastore(Path(sys.argv[1]), {}, chunks(), n_entries=4, width=2, vocab_size=9)
"""


def test_a_process_killed_half_way_leaves_nothing_that_opens(tmp_path):
    folder = tmp_path / "store"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not folder.exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".store.") and left.name.endswith(".tmp")
    with pytest.raises(DataError, match="no whole datastore"):
        open_datastore(left, {})
    write(folder)
    assert len(open_datastore(folder, MODEL)) == 6


def test_damage_is_named(tmp_path):
    folder = tmp_path / "store"
    with pytest.raises(DataError, match="store holds no whole datastore"):
        open_datastore(folder, MODEL)
    write(folder)
    keys = folder / "keys.npy"
    whole = keys.read_bytes()
    keys.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="build it anew"):
        open_datastore(folder, MODEL)
    np.save(keys, KEYS[:5])
    with pytest.raises(DataError, match="damaged: keys"):
        open_datastore(folder, MODEL)
    keys.write_bytes(whole)
    about = json.loads((folder / "about.json").read_text())
    (folder / "about.json").write_text(json.dumps({**about, "format": 2}))
    with pytest.raises(DataError, match="format 1"):
        open_datastore(folder, MODEL)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write(tmp_path / "file" / "store")
