"""Own text into a prepared folder, and recipes into the cache."""

import dataclasses
import hashlib
import json
import logging

import numpy as np
import pytest

from memjax.data import cache, folder
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.corpora import CORPORA
from memjax.data.pipeline import eval_batches, prepare, train_batches
from memjax.data.prepare import prepare_text
from memjax.data.text import TextCounts
from memjax.errors import ConfigError, DataError


@pytest.fixture
def source(tmp_path):
    """Two files with 30 and 15 lines."""
    (tmp_path / "text").mkdir()
    for name, numbers in (("a.txt", range(30)), ("b.txt", range(30, 45))):
        lines = "".join(f"line number {i}\n" for i in numbers)
        (tmp_path / "text" / name).write_text(lines)
    return tmp_path / "text"


def texts(store):
    return [bytes(ids.astype(np.uint8)).decode() for ids in store]


def left_behind(path):
    return [entry.name for entry in path.iterdir() if entry.name.startswith(".")]


def test_documents_go_to_the_splits_by_number(source, tmp_path):
    told = []
    done = prepare_text([source], tmp_path / "out", progress=told.append)
    assert not done.reused
    assert done.counts == TextCounts(n_documents=45)
    number = {
        s: [int(t.split()[-1]) for t in texts(done.stores[s])] for s in done.stores
    }
    assert number["valid"] == [9, 29]
    assert number["test"] == [19, 39]
    assert number["train"] == [i for i in range(45) if i % 10 != 9]
    assert [line.rsplit("/", 1)[1] for line in told] == [
        "a.txt: 30 documents",
        "b.txt: 15 documents",
    ]
    assert left_behind(tmp_path) == []


def test_the_folder_is_a_corpus(source, tmp_path):
    prepare_text([source], tmp_path / "out")
    corpora = (CorpusConfig(name=str(tmp_path / "out")),)
    config = DataConfig(corpora=corpora, context=8, eval_stride=4, n_threads=0)
    assert next(train_batches(config))["tokens"].shape == (8, 8)
    assert eval_batches(config).names == ("out",)
    assert eval_batches(config).n_bytes == len("line number 9") + len("line number 29")


def test_the_same_again_is_reused_and_anything_else_is_refused(source, tmp_path):
    out = tmp_path / "out"
    first = prepare_text([source], out, shard_tokens=100)
    again = prepare_text([source], out, shard_tokens=100)
    assert again.reused and again.counts == first.counts
    for split, store in first.stores.items():
        assert again.stores[split].fingerprint == store.fingerprint
    before = sorted(path.stat().st_mtime_ns for path in out.rglob("*"))
    with pytest.raises(DataError, match="prepared with different shard_tokens"):
        prepare_text([source], out)
    with pytest.raises(DataError, match="prepared with different files"):
        prepare_text([source / "a.txt"], out, shard_tokens=100)
    with pytest.raises(DataError, match="prepared with different documents"):
        prepare_text([source], out, shard_tokens=100, documents="file")
    (source / "a.txt").write_text("changed\n" * 30)
    with pytest.raises(DataError, match="prepared with different files"):
        prepare_text([source], out, shard_tokens=100)
    assert before == sorted(path.stat().st_mtime_ns for path in out.rglob("*"))


def test_an_error_leaves_nothing_behind(source, tmp_path):
    out = tmp_path / "out"
    (source / "c.txt").write_bytes(b"good\nb\xffd\n")
    with pytest.raises(DataError, match=r"c\.txt: byte 6 is not UTF-8"):
        prepare_text([source], out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]
    done = prepare_text([source], out, errors="replace")
    assert done.counts.n_replaced == 1


def test_other_things_in_the_way_are_left_alone(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="is there and is no prepared corpus"):
        prepare_text([source], out)
    (out / "mine.txt").unlink()
    assert not prepare_text([source], out).reused
    with pytest.raises(DataError, match="cannot be written"):
        prepare_text([source], source / "a.txt" / "out")


def test_p25_d_all_files_empty_is_an_error(tmp_path, caplog):
    """If all files are empty: error; one of several: a warning."""
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"\n \n")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    with pytest.raises(DataError, match=r"no document in .*a\.txt, .*b\.txt"):
        prepare_text(files, tmp_path / "out")
    (tmp_path / "b.txt").write_text("x\n" * 20)
    caplog.clear()
    done = prepare_text(files, tmp_path / "out")
    assert done.counts == TextCounts(n_documents=20, n_empty_files=1)
    assert "a.txt holds no document" in caplog.text


def test_too_few_documents_are_an_error_or_a_warning(tmp_path, caplog):
    path = tmp_path / "a.txt"
    path.write_text("x\n" * 9)
    with pytest.raises(DataError, match="9 documents are too few"):
        prepare_text([path], tmp_path / "out")
    path.write_text("x\n" * 10)
    with caplog.at_level(logging.WARNING):
        done = prepare_text([path], tmp_path / "out")
    assert "10 documents leave the test part empty" in caplog.text
    assert [done.stores[s].n_documents for s in ("train", "valid", "test")] == [9, 1, 0]


def test_wrong_settings_are_errors(source, tmp_path):
    with pytest.raises(ConfigError, match="shard_tokens = 0"):
        prepare_text([source], tmp_path / "out", shard_tokens=0)
    with pytest.raises(ConfigError, match=r"data\.tokenizer = 'no\.json'"):
        prepare_text([source], tmp_path / "out", tokenizer="no.json")


def test_unknown_and_repeated_corpora_are_errors(source, tmp_path):
    prepare_text([source], tmp_path / "out")
    own = CorpusConfig(name=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"data\.corpora = .* once, out is there"):
        prepare(DataConfig(corpora=(own, own)))
    with pytest.raises(
        ConfigError, match="'bible' .* one of kjv, wikiart, gcide, core"
    ):
        prepare(DataConfig(corpora=(CorpusConfig(name="bible"),)))
    cache = tmp_path / "cache"
    corpora = (CorpusConfig(name="kjv"), CorpusConfig(name="bible"))
    with pytest.raises(ConfigError, match="bible"):
        prepare(DataConfig(corpora=corpora, cache_dir=str(cache)))
    assert not cache.exists()


def test_a_folder_of_another_tokenizer_is_an_error(source, tmp_path):
    prepare_text([source], tmp_path / "out")
    about = tmp_path / "out" / folder.ABOUT
    content = json.loads(about.read_text())
    about.write_text(json.dumps({**content, "tokenizer": "tokenizers-1"}))
    config = DataConfig(corpora=(CorpusConfig(name=str(tmp_path / "out")),))
    with pytest.raises(DataError, match=r"data\.tokenizer = 'bytes'.*made with token"):
        prepare(config)
    about.write_text("{")
    with pytest.raises(DataError, match=r"corpus\.json is damaged"):
        prepare(config)


class TestCache:
    """Recipes are built once; a small recipe stands in for the real ones."""

    @pytest.fixture
    def config(self, tmp_path, monkeypatch):
        built = []

        def units():
            built.append(1)
            return [f"unit {i}\n".encode() for i in range(40)]

        self.built = built
        self.recipe = dataclasses.replace(
            CORPORA["kjv"],
            units=units,
            text_sha256=hashlib.sha256(b"".join(units())).hexdigest(),
            split_sha256={},
        )
        built.clear()
        self.monkeypatch = monkeypatch
        return DataConfig(cache_dir=str(tmp_path / "cache"), n_threads=0)

    def use(self, **changes):
        recipe = dataclasses.replace(self.recipe, **changes)
        self.monkeypatch.setattr(cache, "CORPORA", {"kjv": recipe})

    def test_a_recipe_is_built_once(self, config, tmp_path):
        self.use()
        told = []
        prepared = prepare(config, progress=told.append)
        assert told[0] == "building kjv" and len(told) == 4
        assert prepare(config).parts == prepared.parts
        assert self.built == [1]
        assert texts(prepared.store("kjv", "valid")) == ["unit 9\n", "unit 29\n"]
        assert left_behind(tmp_path / "cache") == []

    def test_a_wrong_hash_stops_and_leaves_nothing(self, config, tmp_path):
        self.use(text_sha256="0" * 64)
        with pytest.raises(
            DataError, match=r"text built for kjv has sha256 .* wanted 0"
        ):
            prepare(config)
        assert list((tmp_path / "cache").iterdir()) == []
        self.use(split_sha256={"valid": "1" * 64})
        with pytest.raises(DataError, match=r"kjv valid has sha256 .* wanted 1"):
            prepare(config)

    def test_a_mixture_is_its_parts(self, config):
        parts = {
            name: dataclasses.replace(self.recipe, name=name)
            for name in ("kjv", "wikiart", "gcide")
        }
        self.monkeypatch.setattr(cache, "CORPORA", parts)
        mixture = (CorpusConfig(name="core28", weight=2.0),)
        config = dataclasses.replace(config, corpora=mixture, context=8, eval_stride=8)
        prepared = prepare(config)
        assert [part.name for part in prepared.parts] == list(parts)
        assert [part.weight for part in prepared.parts] == [2.0] * 3
        batches = eval_batches(config, prepared=prepared)
        assert batches.names == tuple(parts)
        assert batches.part("gcide").n_bytes * 3 == batches.n_bytes
        with_kjv = (*mixture, CorpusConfig(name="kjv"))
        with pytest.raises(ConfigError, match="each corpus once, kjv is there"):
            prepare(dataclasses.replace(config, corpora=with_kjv))

    def test_the_place_of_the_cache(self, config, tmp_path, monkeypatch):
        monkeypatch.setenv("MEMJAX_CACHE", str(tmp_path / "env"))
        assert cache.cache_root(None) == tmp_path / "env"
        assert cache.cache_root("/chosen").as_posix() == "/chosen"
        monkeypatch.delenv("MEMJAX_CACHE")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache.cache_root(None) == tmp_path / ".cache" / "memjax"

    def test_a_cache_that_cannot_be_written(self, config, tmp_path):
        self.use()
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(DataError, match="cannot be written"):
            prepare(config)


def test_of_two_that_write_a_folder_the_first_wins(tmp_path):
    target = tmp_path / "out"

    def write_slowly(scratch):
        (scratch / "who").write_text("second")

        def write_fast(scratch):
            (scratch / "who").write_text("first")

        assert folder.write_folder(target, {"name": "first"}, write_fast)

    assert not folder.write_folder(target, {"name": "second"}, write_slowly)
    assert (target / "who").read_text() == "first"
    assert folder.read_about(target)["name"] == "first"
    assert left_behind(tmp_path) == []
