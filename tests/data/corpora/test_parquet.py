import io
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megasparse.data.corpora import parquet, records
from megasparse.data.corpora.arrow import arrow_values
from megasparse.errors import ConfigError, DataError
from tests.data.corpora.test_jsonl import settings
from tests.helpers.refusals import refusal

TEXTS = ["first", None, "sécond", "", "x" * 3000, "first"]
KEPT = ["first", "sécond", "x" * 3000, "first"]
TYPES = {
    "string": pa.string(),
    "large": pa.large_string(),
    "view": pa.string_view(),
    "bytes": pa.binary(),
    "dictionary": pa.dictionary(pa.int8(), pa.string()),
}


def read(place: Path, **changed: Any) -> list[bytes]:
    given = settings(**changed)
    source = parquet.open_source([str(place)], None, Path("/nowhere/.download"), given, 1)
    return [b"".join(document) for _, found in parquet.splits(source, given) for document in found]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("packed", ["none", "snappy", "zstd"])
def test_texts_of_every_type_and_compression(tmp_path, kind, packed):
    table = pa.table({"id": range(len(TEXTS)), "text": pa.array(TEXTS, pa.string()).cast(TYPES[kind])})
    pq.write_table(table, tmp_path / "a.parquet", compression=packed, row_group_size=4)
    pq.write_table(table.slice(2, 1), tmp_path / "b.parquet")
    (tmp_path / "README.md").write_text("not taken")
    assert read(tmp_path) == [text.encode() for text in [*KEPT, "sécond"]]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_files_of_both_formats(tmp_path, kind, form):
    table = pa.table({"text": pa.array(TEXTS, pa.string()).cast(TYPES[kind]), "id": range(len(TEXTS))})
    opened = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with opened(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    want = [None if text is None else text.encode() for text in TEXTS]
    assert list(arrow_values(tmp_path / "a.arrow", "text")) == want


def test_values_that_are_no_utf8_are_left_out_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_DAMAGED", 0.5)
    pq.write_table(pa.table({"text": [b"good", b"\xff", b"\xc3\xa9"]}), tmp_path / "a.parquet")
    given = settings()
    source = parquet.open_source([str(tmp_path)], None, Path("/nowhere/.download"), given, 1)
    assert source.left_out() == {"not UTF-8": 1} and source.total_bytes == 6


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("txt", r'--column: .*a\.parquet has no column "txt"\. Did you mean "text"\?'),
        ("id", r'--column: "id" of .*a\.parquet holds int64, not text\. Texts are in: text'),
        ("twice", r'a\.parquet has 2 columns "twice"'),
    ],
)
def test_a_wrong_column_is_named(tmp_path, column, message):
    table = pa.table([pa.array(TEXTS), *[pa.array(range(len(TEXTS)))] * 3], names=["text", "id", "twice", "twice"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, column=column)


def torn() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["some text"] * 100}), file)
    return file.getvalue()[:-20]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(40) + b"PAR1", b"x" * 1000, torn()])
def test_what_is_no_parquet_is_one_line(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    refusal(lambda: read(tmp_path), match=r"a\.parquet: cannot be read: .*Check that it is complete")


def test_without_pyarrow_the_command_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pyarrow: it is not installed.*pip install 'megasparse\[arrow\]'"):
        read(tmp_path)
