"""Workers, readers, and what every batch holds (P23)."""

import dataclasses

import numpy as np
import pytest

from memjax.data.pipeline import eval_batches, prepare, train_batches
from memjax.errors import ConfigError, DataError

FIELDS = ("tokens", "targets", "segments", "positions", "weights")


def take(batches, n):
    return [next(batches) for _ in range(n)]


def same(left, right):
    return len(left) == len(right) and all(
        np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype
        for a, b in zip(left, right, strict=True)
        for name in FIELDS
    )


def text_of(n_windows, context=4):
    """One document that packs into exactly `n_windows` windows."""
    return bytes(i % 251 for i in range(n_windows * context))


def test_p23_a_batches_do_not_depend_on_workers(make_config):
    """34 records, batch 16: the same batches with 0, 1 and 2 workers; evaluation has
    three batches of 16 rows, the last with 14 rows of padding."""
    records = [bytes([i]) * 4 for i in range(34)]
    config = make_config(
        [text_of(34)], valid=records, batch_size=16, eval_batch_size=16
    )
    runs = []
    for n_workers, n_threads in ((0, 0), (0, 2), (1, 0), (2, 2)):
        settings = {"n_workers": n_workers, "n_threads": n_threads}
        with train_batches(dataclasses.replace(config, **settings)) as batches:
            assert batches.steps_per_epoch == 2
            assert batches.n_left_out == 2
            runs.append(take(batches, 5))
    assert all(batch["tokens"].shape == (16, 4) for batch in runs[0])
    assert all(same(runs[0], run) for run in runs[1:])

    scored = list(eval_batches(config))
    assert [batch["tokens"].shape for batch in scored] == [(16, 4)] * 3
    assert [int(batch["weights"].any(1).sum()) for batch in scored] == [16, 16, 2]
    assert same(scored, list(eval_batches(dataclasses.replace(config, n_threads=2))))


@pytest.mark.parametrize("eval_batch_size", [4, 8])
def test_p23_b_four_readers_see_each_record_once(make_config, eval_batch_size):
    """35 records over 4 readers: evaluation sees each exactly once, short readers pad;
    training gives all the same number of steps and says what is left out."""
    config = make_config(
        [text_of(35)],
        valid=[bytes([i]) * 4 for i in range(35)],
        eval_batch_size=eval_batch_size,
    )
    readers = [eval_batches(config, reader=r, n_readers=4) for r in range(4)]
    assert {reader.n_batches for reader in readers} == {-(-35 // eval_batch_size)}
    assert {reader.n_bytes for reader in readers} == {140}
    seen = []
    for reader in readers:
        for batch in reader:
            assert batch["tokens"].shape == (eval_batch_size // 4, 4)
            padding = batch["segments"] == 0
            assert not batch["weights"][padding].any()
            assert batch["weights"][~padding].all()
            seen += batch["targets"][~padding].tolist()
    assert sorted(seen) == [i for i in range(35) for _ in range(4)]

    whole = take(train_batches(config), 17)
    parts = [train_batches(config, reader=r, n_readers=4) for r in range(4)]
    assert [part.steps_per_epoch for part in parts] == [8] * 4
    assert [part.n_left_out for part in parts] == [3] * 4
    rows = [take(part, 17) for part in parts]
    joined = [
        {name: np.concatenate([row[i][name] for row in rows]) for name in FIELDS}
        for i in range(17)
    ]
    assert same(whole, joined)


def test_readers_out_of_range_and_uneven_batches_are_errors(make_config):
    config = make_config([text_of(8)], eval_batch_size=4)
    with pytest.raises(ConfigError, match=r"reader = 2 is not allowed: 0\.\.1"):
        train_batches(config, reader=2, n_readers=2)
    with pytest.raises(ConfigError, match=r"data\.batch_size = 4 .* the 3 readers"):
        train_batches(config, n_readers=3)
    with pytest.raises(ConfigError, match=r"data\.eval_batch_size = 4"):
        eval_batches(config, n_readers=3)
    with pytest.raises(ConfigError, match="n_readers = 0"):
        train_batches(config, n_readers=0)
    with pytest.raises(ConfigError, match="start = -1"):
        train_batches(config, start=-1)


def test_too_little_text_is_an_error_that_says_so(make_config):
    with pytest.raises(DataError, match="fewer than one batch: data.batch_size = 64"):
        train_batches(make_config([text_of(5)], batch_size=64))
    with pytest.raises(DataError, match=r"small train has fewer tokens .* = 9"):
        train_batches(make_config([b"12345678"], name="small", context=9))
    with pytest.raises(DataError, match="bare has no text in its valid split"):
        eval_batches(make_config([text_of(5)], name="bare", valid=[]))


def test_a_start_is_the_same_as_skipping(make_config):
    config = make_config([text_of(20), text_of(3)])
    skipped = train_batches(config)
    take(skipped, 9)
    assert same(take(skipped, 3), take(train_batches(config, start=9), 3))


def test_unknown_split_and_part_are_errors(make_config):
    config = make_config([text_of(5)])
    with pytest.raises(ConfigError, match="split = 'dev'"):
        eval_batches(config, "dev")
    with pytest.raises(ConfigError, match="part = 'kjv' is not allowed: one of own"):
        eval_batches(config).part("kjv")
    with pytest.raises(ConfigError, match="part = 'kjv' is not allowed: one of own"):
        prepare(config).store("kjv", "train")
    assert eval_batches(config, "test").n_bytes == len("kept for last")
