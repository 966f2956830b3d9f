"""Classes of tokens: the normal form, vocabularies of several kinds, their use.

The normal form is compared with the steps of the `tokenizers` library where that is
installed, and the DeepSeek vocabulary with the published number of classes.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.data.compressed_vocab import (
    CompressedVocab,
    compress_tokenizer,
    compress_vocab,
    token_texts,
)
from memjax.data.normal_form import class_key, normalize
from memjax.data.tokenizer import ByteTokenizer, load_tokenizer
from memjax.errors import DataError, MissingExtraError
from memjax.ops.ngram_hash import host_ngram_rows, ngram_layouts
from memjax.ops.token_classes import token_classes
from tests.oracles import compressed_vocab as oracle

_TRICKY = st.text(
    st.sampled_from(
        "aAÉe\u0301\u0903\u20dd\u00bdΣσς \t\r\n\x0b\x1c\x85\xa0\u200b\ue000"
    )
    | st.characters(max_codepoint=0x3FF),
    max_size=6,
)


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip(
        "tokenizers", reason="needs tokenizers: pip install 'memjax[tokenizers]'"
    )


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("  Hello", "hello"),
        ("CAFÉ", "cafe"),
        ("a\u0903\u20dd\u0301", "a"),  # marks of all three kinds, Mc, Me and Mn
        ("ΑΣ", "ασ"),  # no final sigma
        ("ＡＢ ½", "ab 1\u20442"),
        ("\x1cx\x1f", "\x1cx\x1f"),  # str.strip() would take these
        ("\u200bx\ufeff", "\u200bx\ufeff"),
        ("\x0b\x85\u3000x\u2003", "x"),
        ("a \t\r\n b", "a b"),
        (" \n\t ", " "),
        ("\u00a0", " "),  # NFKC makes it a space
        ("\x0b", ""),
        ("\u0301", ""),
        (" \ue000 x", "  x"),
    ],
)
def test_the_normal_form_of_single_texts(text: str, want: str) -> None:
    assert normalize(text) == want


@settings(max_examples=300)
@given(_TRICKY)
def test_the_normal_form_equals_its_definition(text: str) -> None:
    assert normalize(text) == oracle.normal_form(text)


@settings(max_examples=300)
@given(text=_TRICKY)
def test_the_normal_form_equals_the_library_that_tables_were_built_with(
    library, text: str
) -> None:
    steps = library.normalizers
    published = steps.Sequence(
        [
            steps.NFKC(),
            steps.NFD(),
            steps.StripAccents(),
            steps.Lowercase(),
            steps.Replace(library.Regex(r"[ \t\r\n]+"), " "),
            steps.Replace(library.Regex(r"^ $"), "\ue000"),
            steps.Strip(),
            steps.Replace("\ue000", " "),
        ]
    )
    assert normalize(text) == published.normalize_str(text)


def test_a_token_that_is_not_utf8_is_known_by_its_name() -> None:
    assert class_key("a\ufffd", "Ã") == "Ã"
    assert class_key("\x0b", "name") == "\x0b"
    assert class_key(" A", "name") == "a"


@given(st.lists(st.tuples(_TRICKY, st.sampled_from("abc")), max_size=12))
def test_classes_equal_their_definition(tokens: list[tuple[str, str]]) -> None:
    texts = [text for text, _ in tokens] + ["\ufffd"] * 2
    names = [name for _, name in tokens] + ["a", "é"]
    vocab = compress_vocab(texts, names)
    want = oracle.classes(texts, names)
    assert vocab.table.tolist() == want
    assert vocab.table.dtype == np.int32
    assert vocab.size == len(set(want))


def test_p13_bytes_that_are_no_utf8_stay_128_classes() -> None:
    """Each of 0x80 to 0xFF alone decodes to the same replacement character."""
    tokenizer = ByteTokenizer()
    texts, _ = token_texts(tokenizer)
    assert set(texts[128:]) == {"\ufffd"}
    vocab = compress_tokenizer(tokenizer)
    high = vocab.table[128:256].tolist()
    assert len(set(high)) == 128
    assert not set(high) & {*vocab.table[:128].tolist(), int(vocab.table[256])}
    assert vocab.size == 228
    assert vocab.table[256] == 227
    a, upper_a, space, newline, tab = (vocab.table[ord(c)] for c in "aA \n\t")
    assert a == upper_a
    assert space == newline == tab
    assert compress_tokenizer(tokenizer) == vocab


def test_p13_words_that_differ_in_case_and_space_are_one_class() -> None:
    texts = ["Hello", "HELLO", " hello", " ", "\x0b", "", "  ", "\u0301"]
    vocab = compress_vocab(texts, texts)
    # One space is a class; texts with an empty normal form are known by themselves.
    assert vocab.table.tolist() == [0, 0, 0, 1, 2, 3, 1, 4]
    again = compress_vocab(texts, texts)
    assert again.table.tolist() == vocab.table.tolist()


def test_p13_byte_level_vocabularies_keep_their_high_bytes_apart(
    library, tmp_path
) -> None:
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["Hello hello HELLO Über über"] * 3
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(tmp_path / "bpe.json"))
    loaded = load_tokenizer(str(tmp_path / "bpe.json"))
    vocab = compress_tokenizer(loaded)
    assert len(vocab.table) == loaded.vocab_size
    assert vocab.table[loaded.separator] == vocab.size - 1
    decoded, names = token_texts(loaded)
    broken = [i for i, text in enumerate(decoded) if "\ufffd" in text]
    assert len(broken) >= 128
    assert len({vocab.table[i] for i in broken}) == len(broken)
    hello = [i for i, text in enumerate(decoded) if text.strip().lower() == "hello"]
    assert len(hello) >= 2
    assert len({vocab.table[i] for i in hello}) == 1
    assert names[0] == decoded[0] == "<|end|>"
    assert names[decoded.index(" ")] == "Ġ"


def test_deepseek_has_the_published_classes(library) -> None:
    """129280 ids in 99092 classes, and the hash of the table."""
    try:
        tokenizer = load_tokenizer("deepseek")
    except MissingExtraError as error:
        pytest.skip(str(error))
    vocab = compress_tokenizer(tokenizer, with_separator=False)
    assert (len(vocab.table), vocab.size, vocab.table[2]) == (129280, 99092, 2)
    assert vocab.sha256 == (
        "26b9be2936d236a124ba318a998c417bc7032e3e92a3107fe98deee49f1dc496"
    )


def test_a_vocabulary_is_known_by_its_numbers() -> None:
    vocab = CompressedVocab(np.array([0, 1, 0]))
    same, other = (CompressedVocab(np.array(table)) for table in ([0, 1, 0], [0, 1, 1]))
    assert vocab == same
    assert hash(vocab) == hash(same)
    assert vocab != other
    assert vocab != "vocab"
    assert repr(vocab) == "CompressedVocab(3 ids, 2 classes)"
    with pytest.raises(ValueError, match="read-only"):
        vocab.table[0] = 1
    assert compress_vocab([], []).size == 0
    with pytest.raises(DataError, match="2 texts of tokens, but 1 names"):
        compress_vocab(["a", "b"], ["a"])


def test_names_of_ids() -> None:
    tokenizer = ByteTokenizer()
    assert [tokenizer.name(i) for i in (0, 0x41, 0xFF, 256)] == [
        "<0x00>",
        "<0x41>",
        "<0xFF>",
        "",
    ]
    with pytest.raises(DataError, match=r"id 257 .* outside 0\.\.256"):
        tokenizer.name(257)


def test_p09_the_fill_is_the_class_of_the_padding_token() -> None:
    """Texts that differ in case have the same rows, from the first token on."""
    vocab = compress_tokenizer(ByteTokenizer())
    pad = int(vocab.table[256])
    (layout,) = ngram_layouts(
        vocab_size=vocab.size,
        pad_id=pad,
        orders=(2, 3),
        n_heads=2,
        rows_per_head=97,
        layer_ids=(0,),
    )
    lower, upper = (
        host_ngram_rows(token_classes(vocab.table, list(text)), layout)
        for text in (b"in the beginning", b"In The\nBEGINNING")
    )
    np.testing.assert_array_equal(lower, upper)
    begun = host_ngram_rows(token_classes(vocab.table, [256, 256, *b"in"]), layout)
    np.testing.assert_array_equal(begun[2:], lower[:2])


def test_the_python_of_the_page_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "compression.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(page), "exec"), {})
