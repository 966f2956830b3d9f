"""Evaluation windows: every token once, with the stated context, inside a document."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from memjax.data.packing import empty_batch
from memjax.data.pipeline import eval_batches
from memjax.data.scoring import ScoredRows
from memjax.data.store import write_store
from memjax.data.tokenizer import ByteTokenizer


@given(
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_every_token_is_scored_once_with_its_context(
    tmp_path_factory, sizes, context, stride
):
    """Documents whose bytes count upwards, so that a token tells its own place."""
    stride = min(stride, context)
    documents = [bytes(range(40 * i, 40 * i + size)) for i, size in enumerate(sizes)]
    folder = tmp_path_factory.mktemp("store") / "valid"
    store = write_store(folder, documents, ByteTokenizer(), shard_tokens=11)
    rows = ScoredRows(store, context=context, stride=stride)
    assert rows.n_bytes == rows.n_targets == sum(sizes)
    batch = empty_batch(rows.n_rows, context)
    for row in range(rows.n_rows):
        rows.fill(batch, row, row)
    scored = []
    for row in range(rows.n_rows):
        segments = batch["segments"][row]
        used = segments[segments > 0]
        assert len(used) and (segments[len(used) :] == 0).all()
        assert sorted(set(used)) == list(range(1, max(used) + 1))
        for place in range(context):
            if segments[place] == 0:
                assert batch["weights"][row, place] == 0
                continue
            token = int(batch["tokens"][row, place])
            target = int(batch["targets"][row, place])
            position = int(batch["positions"][row, place])
            assert target != 256
            # The input is the token before the target, or the separator at the start.
            assert token == (256 if target % 40 == 0 else target - 1)
            begins = place == 0 or segments[place - 1] != segments[place]
            before = -1 if begins else int(batch["positions"][row, place - 1])
            assert position == before + 1
            if batch["weights"][row, place]:
                scored.append(target)
                assert position + 1 >= min(target % 40 + 1, context - stride + 1)
    assert sorted(scored) == sorted(b for document in documents for b in document)


def test_short_documents_share_rows(tmp_path):
    store = write_store(tmp_path / "valid", [b"ab", b"c", b"def"], ByteTokenizer())
    rows = ScoredRows(store, context=4, stride=2)
    assert rows.n_rows == 2
    batch = empty_batch(1, 4)
    rows.fill(batch, 0, 0)
    assert batch["tokens"].tolist() == [[256, ord("a"), 256, 0]]
    assert batch["targets"].tolist() == [[ord("a"), ord("b"), ord("c"), 0]]
    assert batch["segments"].tolist() == [[1, 1, 2, 0]]
    assert batch["positions"].tolist() == [[0, 1, 0, 0]]
    assert batch["weights"].tolist() == [[1, 1, 1, 0]]


def test_stride_and_context_change_the_rows_not_the_bytes(make_config):
    config = make_config([b"x" * 40], valid=[b"y" * 40], context=8, eval_stride=8)
    for stride, n_windows in ((8, 5), (4, 9), (1, 33)):
        batches = eval_batches(dataclasses.replace(config, eval_stride=stride))
        total = sum(int(batch["weights"].sum()) for batch in batches)
        assert total == batches.n_targets == 40
        assert batches.n_batches == -(-n_windows // 16)
        assert len(list(batches)) == len(list(batches)) == len(batches)


def test_parts_are_reported_apart(make_config):
    one = make_config([b"x" * 40], valid=[b"abcde"], name="one")
    two = make_config([b"x" * 40], valid=[b"fgh", b"ij"], name="two")
    both = dataclasses.replace(one, corpora=one.corpora + two.corpora)
    batches = eval_batches(both)
    assert batches.names == ("one", "two")
    assert batches.n_bytes == 10
    assert batches.n_batches == 2
    assert batches.part("two").n_bytes == 5
    (batch,) = batches.part("two")
    scored = batch["targets"][batch["weights"] > 0]
    assert bytes(scored.tolist()) == b"fghij"
