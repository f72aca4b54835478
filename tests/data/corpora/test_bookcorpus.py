from typing import Any

import pytest

from megasparse.data.corpora import bookcorpus, cutting
from megasparse.data.corpora.source import Source
from megasparse.errors import DataError
from tests.data.corpora.pictures import write_files
from tests.data.folders import everything, prepared, source_of

FILES = {
    "a.txt": b"the first sentence .\nthe second .\n\n\nanother book .\n  \nthird\nbook",
    "b.txt": b"\n\nfourth .\n\tlike this .\n",
    "c.txt": b"\r\nfifth\r\n\r\n",
}
BOOKS = [
    b"the first sentence .\nthe second .\n",
    b"another book .\n",
    b"third\nbook",
    b"fourth .\n\tlike this .\n",
    b"fifth\r\n",
]


SETTINGS = {"split": "100,0,0", "tokenizer": "bytes"}


@pytest.fixture
def source(tmp_path):
    return source_of(write_files(tmp_path / "in", FILES))


def splits(source: Source, settings: dict[str, Any]) -> dict[str, list[bytes]]:
    return {name: [b"".join(book) for book in books] for name, books in bookcorpus.splits(source, settings)}


@pytest.mark.parametrize("piece", [1 << 20, 23])
def test_books_end_at_empty_lines_and_files(source, monkeypatch, piece):
    monkeypatch.setattr(cutting, "PIECE", piece)
    assert splits(source, SETTINGS) == {"train": BOOKS}
    assert bookcorpus.about(source, SETTINGS) == {"books": {"train": 5}}


def test_a_book_belongs_to_the_split_of_its_first_byte(source):
    content = b"".join(FILES.values())
    given = {**SETTINGS, "split": "50,30,20"}
    want: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    for book in BOOKS:
        place = content.index(book) / len(content)
        want["train" if place < 0.5 else "validation" if place < 0.8 else "test"].append(book)
    assert splits(source, given) == want
    assert bookcorpus.about(source, given) == {"books": {name: len(books) for name, books in want.items()}}


def test_the_shards_hold_the_lines_and_a_separator_after_each_book(source, tmp_path):
    index = prepared("bookcorpus", source, tmp_path / "data", 10, 50, **SETTINGS)
    assert bytes(everything(index).tolist()) == b"".join(book + b"\0" for book in BOOKS)
    assert index.split("train").words == sum(len(book.split()) for book in BOOKS)
    assert index.split("train").raw_bytes == sum(map(len, BOOKS))
    assert index.file.source["books"] == {"train": 5}


@pytest.mark.parametrize(
    ("files", "split", "message"),
    [
        ({"p1.txt": b"a\nb\n", "p2.txt": b"c\nd\n"}, "90,5,5", "2 books are too few to give validation any"),
        ({"x.txt": b"a\n\xe9"}, "100,0,0", r"x\.txt: byte 2 is not UTF-8"),
        ({"x.txt": b"a\n\0"}, "100,0,0", r"x\.txt: byte 2 is 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, files, split, message):
    with pytest.raises(DataError, match=message):
        bookcorpus.about(source_of(write_files(tmp_path, files)), {**SETTINGS, "split": split})
