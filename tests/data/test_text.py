"""Own text files as documents (P25)."""

import json
import logging

import pytest

from memjax.data.text import TextCounts, find_text_files, read_documents
from memjax.errors import ConfigError, DataError, MissingExtraError


def read(folder, content, name="a.txt", **rules):
    """Documents of a file with this content, and what was counted."""
    path = folder / name
    path.write_bytes(content)
    counts = TextCounts()
    documents = read_documents(find_text_files([path]), counts=counts, **rules)
    return list(documents), counts


def test_p25_a_mark_and_line_ends(tmp_path):
    """EF BB BF, "hello\\r\\nworld\\r\\n\\r\\n": documents "hello", "world"; the blank
    line is dropped and counted."""
    content = b"\xef\xbb\xbfhello\r\nworld\r\n\r\n"
    documents, counts = read(tmp_path, content)
    assert documents == [b"hello", b"world"]
    assert counts == TextCounts(n_documents=2, n_blank=1)
    assert read(tmp_path, content, documents="file")[0] == [b"hello\nworld\n\n"]


@pytest.mark.parametrize("inner", ["\u2028", "\u0085", "\x0b", "\r", "\n", "\x1c"])
def test_p25_b_a_json_line_is_one_document(tmp_path, inner):
    """A JSON line whose text holds U+2028, U+0085 or a vertical tab is one document."""
    text = f"one{inner}two"
    for ensure_ascii in (False, True):
        line = json.dumps({"text": text}, ensure_ascii=ensure_ascii)
        content = f"{line}\r\n\n{line}".encode()
        documents, counts = read(tmp_path, content, "a.jsonl")
        assert documents == [text.encode()] * 2
        assert counts == TextCounts(n_documents=2, n_blank=1)


@pytest.mark.parametrize("inner", ["\u2028", "\u0085", "\x0b", "\x1c"])
def test_p25_b_only_line_ends_end_a_line_of_text(tmp_path, inner):
    documents, _ = read(tmp_path, f"one{inner}two\nthree".encode())
    assert documents == [f"one{inner}two".encode(), b"three"]


@pytest.mark.parametrize("rule", ["line", "file"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_p25_c_a_wrong_byte_is_named_or_replaced_and_counted(tmp_path, rule, mark):
    """Byte FF inside: error naming file and byte offset, or a count of replacements."""
    content = mark + b"good\r\nb\xffd \xef\xbf\xbd\nlast \xe2\x82"
    where = len(mark) + 7
    with pytest.raises(DataError, match=rf"a\.txt: byte {where} is not UTF-8 \(0xFF\)"):
        read(tmp_path, content, documents=rule)
    documents, counts = read(tmp_path, content, documents=rule, errors="replace")
    wanted = "good\nb\ufffdd \ufffd\nlast \ufffd".encode()
    assert documents == (wanted.split(b"\n") if rule == "line" else [wanted])
    assert counts.n_replaced == 2


def test_p25_c_wrong_bytes_in_json_lines(tmp_path):
    good = b'{"text": "x"}\n'
    bad = b'{"text": "a\xff"}\n'
    with pytest.raises(DataError, match=r"a\.jsonl: byte 25 is not UTF-8"):
        read(tmp_path, good + bad, "a.jsonl")
    documents, counts = read(tmp_path, good + bad, "a.jsonl", errors="replace")
    assert documents == [b"x", "a\ufffd".encode()]
    assert counts.n_replaced == 1
    half = b'{"text": "\\ud83d\\ude00 \\ud83d"}\n'
    with pytest.raises(DataError, match=r"a\.jsonl line 1 has half a surrogate"):
        read(tmp_path, half, "a.jsonl")
    documents, counts = read(tmp_path, half, "a.jsonl", errors="replace")
    assert documents == ["\U0001f600 \ufffd".encode()]
    assert counts.n_replaced == 1


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b" \r\n\t\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_p25_d_an_empty_file_is_a_warning(tmp_path, caplog, content, name):
    """An empty file: zero documents and a warning."""
    with caplog.at_level(logging.WARNING):
        documents, counts = read(tmp_path, content, name)
    assert documents == []
    assert counts.n_empty_files == 1
    assert f"{name} holds no document" in caplog.text


def test_old_line_ends_end_lines_too(tmp_path):
    documents, _ = read(tmp_path, b"a\rb\r\rc\r\nd")
    assert documents == [b"a", b"b", b"c", b"d"]
    with pytest.raises(DataError, match="byte 2 is not"):
        read(tmp_path, b"a\r\xff")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": 1}', "line 1 has no string in the field 'text'"),
        (b'{"body": "x"}', "line 1 has no string in the field 'text'"),
        (b'["x"]', "line 1 has no string in the field 'text'"),
        (b'{"text": ', "line 1 is no JSON"),
        (b"[" * 100_000, "line 1 is no JSON"),
    ],
)
def test_a_json_line_without_the_field_is_an_error(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, line, "a.jsonl")


def test_the_text_field_can_be_named(tmp_path):
    line = b'{"text": "no", "body": "yes"}'
    assert read(tmp_path, line, "a.jsonl", text_field="body")[0] == [b"yes"]


def test_unknown_rules_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="documents = 'page'.*'line' or 'file'"):
        read(tmp_path, b"x", documents="page")
    with pytest.raises(ConfigError, match="errors = 'ignore'.*'strict' or 'replace'"):
        read(tmp_path, b"x", errors="ignore")


def test_folders_are_read_in_the_order_of_their_paths(tmp_path):
    names = ["b.txt", "a/2.txt", "a/10.jsonl", "c.md", ".hidden/x.txt", "a.txt"]
    for name in names:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    files = find_text_files([tmp_path / "in" / "b.txt", tmp_path / "in"])
    found = [file.name for file in files]
    assert found == ["b.txt", "a/10.jsonl", "a/2.txt", "a.txt", "b.txt"]


def test_sources_that_cannot_be_read_are_errors(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(DataError, match="no file and no folder"):
        find_text_files([tmp_path / "missing.txt"])
    with pytest.raises(DataError, match=r"empty holds no \.txt, \.jsonl, \.parquet"):
        find_text_files([tmp_path / "empty"])
    with pytest.raises(DataError, match=r"a\.md is of another kind than \.txt"):
        find_text_files([tmp_path / "a.md"])
    with pytest.raises(DataError, match="no source was given"):
        find_text_files([])


class TestParquet:
    """Columns of text; the package pyarrow comes with the extra `parquet`."""

    @pytest.fixture
    def write(self, tmp_path):
        pyarrow = pytest.importorskip(
            "pyarrow", reason="needs pyarrow: pip install 'memjax[parquet]'"
        )
        from pyarrow import parquet

        def write(values, column="text", kind=None):
            array = pyarrow.array(values, kind or pyarrow.string())
            table = pyarrow.table({column: array, "n": list(range(len(values)))})
            parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
            return find_text_files([tmp_path / "a.parquet"])

        return write

    def test_a_row_is_a_document(self, write):
        counts = TextCounts()
        files = write(["one\r\ntwo", None, " ", "\u2028x", "last"])
        documents = list(read_documents(files, counts=counts))
        assert documents == [b"one\r\ntwo", "\u2028x".encode(), b"last"]
        assert counts == TextCounts(n_documents=3, n_blank=2)

    def test_another_column_or_kind_is_an_error(self, write):
        files = write(["x"], column="body")
        with pytest.raises(DataError, match="no column 'text', only body, n"):
            list(read_documents(files))
        assert list(read_documents(files, text_field="body")) == [b"x"]
        with pytest.raises(DataError, match="column 'n' is int64, not string"):
            list(read_documents(files, text_field="n"))

    def test_wrong_bytes_are_named_by_row(self, write):
        import pyarrow

        raw = pyarrow.array([b"ok", b"b\xffd"], pyarrow.binary())
        length, buffers = len(raw), raw.buffers()
        text = pyarrow.Array.from_buffers(pyarrow.string(), length, buffers)
        files = write(text)
        with pytest.raises(DataError, match=r"a\.parquet: a byte in row 1 is not UTF"):
            list(read_documents(files))
        documents = list(read_documents(files, errors="replace"))
        assert documents == [b"ok", "b\ufffdd".encode()]

    def test_what_is_no_parquet_file_is_an_error(self, write, tmp_path, caplog):
        files = write(["x"])
        files[0].path.write_bytes(b"not parquet")
        with pytest.raises(DataError, match="is no parquet file"):
            list(read_documents(files))
        files[0].path.write_bytes(b"")
        assert list(read_documents(files)) == []
        assert "holds no document" in caplog.text


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"memjax\[parquet\]"):
        read(tmp_path, b"x", "a.parquet")
