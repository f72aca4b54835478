from collections.abc import Mapping
from pathlib import Path

import pytest

from megasparse.data.corpora import pg19
from megasparse.data.corpora.source import Source
from megasparse.errors import DataError
from tests.data.corpora.pictures import write_files, write_zip
from tests.data.folders import everything, prepared, source_of
from tests.helpers.refusals import refusal

FILES = {
    "train/10.txt": "The  first\nbook.\n",
    "train/9.txt": "Número neuf",
    "validation/3.txt": "three",
    "test/4.txt": "four words are here",
    "metadata.csv": '9,Nine,1801,http://x/9\n10,"Ten, a ""tale""",1910?,http://x/10\n3,Three,1,\n77,Another,2,\n',
}
SETTINGS = {"tokenizer": "bytes"}


def written(folder: Path, files: Mapping[str, str]) -> Path:
    coded = {name: text.encode("latin-1" if "latin" in name else "utf-8") for name, text in files.items()}
    return write_files(folder, coded)


def test_a_book_is_a_document_in_its_official_split(tmp_path):
    index = prepared("pg19", source_of(written(tmp_path / "in", FILES)), tmp_path / "data", 10, 50, **SETTINGS)
    want = {
        "train": "Número neuf\0The  first\nbook.\n\0".encode(),  # by number
        "validation": b"three\0",
        "test": b"four words are here\0",
    }
    assert list(index.file.splits) == list(want)
    for name, content in want.items():
        assert bytes(everything(index, name).tolist()) == content
    assert [index.split(name).words for name in want] == [5, 1, 4]
    assert [index.split(name).raw_bytes for name in want] == [
        len(content) - content.count(b"\0") for content in want.values()
    ]
    about = index.file.source
    assert about["books"] == {"train": 2, "validation": 1, "test": 1} and about["official"] is False
    assert about["with_metadata"] == 3
    assert about["titles"]["train"] == [[9, "Nine", "1801"], [10, 'Ten, a "tale"', "1910?"]]
    assert about["titles"]["test"] == [[4, None, None]]


def test_folders_named_apart_and_archives_are_read_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(pg19, "OFFICIAL", {"train": 2, "validation": 1, "test": 1})
    folder = written(tmp_path / "in", FILES)
    whole = source_of(folder)
    apart = source_of(*(folder / name for name in ("test", "train", "validation", "metadata.csv")))
    zipped = source_of(write_zip(tmp_path / "x.zip", {f"pg19/{name}": text for name, text in FILES.items()}))

    def texts(source: Source) -> dict[str, list[bytes]]:
        return {name: [b"".join(book) for book in books] for name, books in pg19.splits(source, SETTINGS)}

    assert texts(whole) == texts(apart) == texts(zipped)
    assert pg19.about(whole, SETTINGS) == pg19.about(apart, SETTINGS) == pg19.about(zipped, SETTINGS)
    assert pg19.about(whole, SETTINGS)["official"] is True
    parts = source_of(folder / "test", folder / "train")
    assert pg19.about(parts, SETTINGS) == {"books": {"train": 2, "test": 1}, "official": False}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"other/1.txt": "x"}, r"other/1\.txt: this is not a book of PG-19"),
        ({"train/one.txt": "x"}, r"train/one\.txt: this is not a book of PG-19"),
        ({"test/10.txt": "x"}, r"the book 10 is in .* as well \(.*10\.txt\)"),
        ({"train/10.txt.gz": "x"}, r"10\.txt\.gz: cannot be read"),
        ({"metadata.csv": "99,A,1,\n"}, r"metadata\.csv: it has none of the books"),
        ({"metadata.csv": "10,A,1\nx,B\n"}, r"metadata\.csv: row 2 is not a book's number, title and date"),
        ({"metadata.csv": '10,A,1\n9,"B" x,1'}, r"metadata\.csv: it is not CSV"),
        ({"train/latin/8.txt": "é"}, r"8\.txt: byte 0 is not UTF-8"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, changed, message):
    refusal(lambda: pg19.about(source_of(written(tmp_path, FILES | changed)), SETTINGS), match=message)


def test_no_books_at_all(tmp_path):
    with pytest.raises(DataError, match=r"there is no train/NNN\.txt, validation/NNN\.txt or test/NNN\.txt"):
        pg19.about(source_of(written(tmp_path, {"metadata.csv": "1,A,1\n"})), SETTINGS)
