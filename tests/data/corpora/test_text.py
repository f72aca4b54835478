"""Corpora of text: the splits, pieces and documents of a source, and one line for each bad one."""

import hashlib
import random
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megasparse.cli.main import door
from megasparse.data.corpora import CORPORA, corpus
from megasparse.data.corpora.corpus import ByteStream, cut, split_at, split_sizes, text_pieces
from megasparse.data.corpora.source import Source
from megasparse.data.corpora.text import PG19, WikiText103
from megasparse.data.index import Index
from megasparse.errors import ConfigError, DataError
from tests.data.corpora.pictures import write_files, write_zip
from tests.data.folders import everything, prepared, source_of
from tests.helpers.refusals import refusal
from tests.helpers.shard_server import serving


@pytest.mark.parametrize("pieces", [[b"abcdefghij"], [b"a", b"bcd", b"", b"efghi", b"j"]])
def test_cut_and_byte_stream(pieces):
    assert {name: b"".join(part) for name, part in cut(pieces, {"x": 3, "y": 5, "z": 2})} == {
        "x": b"abc",
        "y": b"defgh",
        "z": b"ij",
    }
    stream = ByteStream(pieces)
    assert [stream.read(4), stream.read(4), stream.read(4), stream.read(4)] == [b"abcd", b"efgh", b"ij", b""]
    assert stream.position == 10


def test_a_border_inside_a_character_moves_to_its_end():
    text = "aé€😀b".encode()  # 1 + 2 + 3 + 4 + 1 bytes
    starts = [0, 1, 3, 6, 10, 11]
    for size in range(len(text) + 1):
        found = [b"".join(part) for _, part in cut([text[:4], text[4:]], {"x": size, "y": len(text) - size}, True)]
        assert b"".join(found) == text
        assert len(found[0]) == min(start for start in starts if start >= size)


def in_parts(text: bytes, seed: int) -> Iterator[bytes]:
    draw = random.Random(seed)
    while text:
        size = draw.randrange(1, 40)
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (b"one\ntwo\nthree four five", [b"one\ntwo\n", b"three", b" four", b" five"]),
        (b"x\n" * 10, [b"x\n" * 5, b"x\n" * 5]),
        (b"0123456789abc", [b"012345678", b"9abc"]),
        ("ééééééé".encode(), ["éééé".encode(), "ééé".encode()]),
        (b"\x80" * 12, [b"\x80" * 10, b"\x80" * 2]),
        (b" 123456789 x", [b" 12345678", b"9 x"]),
        (b"0123456789", [b"012345678", b"9"]),
        (b"", []),
    ],
)
def test_pieces_end_with_lines_or_words_or_characters(monkeypatch, text, want):
    monkeypatch.setattr(corpus, "PIECE", 10)
    for seed in range(5):
        assert list(text_pieces(in_parts(text, seed))) == want


def test_a_piece_is_a_mebibyte_at_most():
    text = random.Random(0).randbytes(3_000_000)
    pieces = list(text_pieces([text]))
    assert b"".join(pieces) == text and max(map(len, pieces)) <= 1 << 20
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])


def test_split_sizes():
    assert split_sizes("90,5,5", 200) == {"train": 180, "validation": 10, "test": 10}
    assert split_sizes("99.5,0.5,0", 200) == {"train": 199, "validation": 1}
    assert split_sizes("33.3,33.3,33.4", 200) == {"train": 66, "validation": 67, "test": 67}
    for bad in ("90,5", "90,5,6", "0,50,50", "110,-5,-5", "a,b,c", "1/0,5,5", ""):
        with pytest.raises(ConfigError, match="--split"):
            split_sizes(bad, 200)
    assert [split_at(byte, {"x": 2, "y": 1}) for byte in range(3)] == ["x", "x", "y"]


BOOK_FILES = {
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


BOOK_SETTINGS = {"split": "100,0,0", "tokenizer": "bytes"}


@pytest.fixture
def book_source(tmp_path):
    return source_of(write_files(tmp_path / "in", BOOK_FILES))


def book_splits(book_source: Source, settings: dict[str, Any]) -> dict[str, list[bytes]]:
    return {
        name: [b"".join(book) for book in books] for name, books in CORPORA["bookcorpus"].splits(book_source, settings)
    }


@pytest.mark.parametrize("piece", [1 << 20, 23])
def test_books_end_at_empty_lines_and_files(book_source, monkeypatch, piece):
    monkeypatch.setattr(corpus, "PIECE", piece)
    assert book_splits(book_source, BOOK_SETTINGS) == {"train": BOOKS}
    assert CORPORA["bookcorpus"].about(book_source, BOOK_SETTINGS) == {"books": {"train": 5}}


def test_a_book_belongs_to_the_split_of_its_first_byte(book_source):
    content = b"".join(BOOK_FILES.values())
    given = {**BOOK_SETTINGS, "split": "50,30,20"}
    want: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    for book in BOOKS:
        place = content.index(book) / len(content)
        want["train" if place < 0.5 else "validation" if place < 0.8 else "test"].append(book)
    assert book_splits(book_source, given) == want
    assert CORPORA["bookcorpus"].about(book_source, given) == {
        "books": {name: len(books) for name, books in want.items()}
    }


def test_the_shards_hold_the_lines_and_a_separator_after_each_book(book_source, tmp_path):
    index = prepared("bookcorpus", book_source, tmp_path / "data", 10, 50, **BOOK_SETTINGS)
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
        CORPORA["bookcorpus"].about(source_of(write_files(tmp_path, files)), {**BOOK_SETTINGS, "split": split})


PG19_FILES = {
    "train/10.txt": "The  first\nbook.\n",
    "train/9.txt": "Número neuf",
    "validation/3.txt": "three",
    "test/4.txt": "four words are here",
    "metadata.csv": '9,Nine,1801,http://x/9\n10,"Ten, a ""tale""",1910?,http://x/10\n3,Three,1,\n77,Another,2,\n',
}
BYTES = {"tokenizer": "bytes"}


def written(folder: Path, files: Mapping[str, str]) -> Path:
    coded = {name: text.encode("latin-1" if "latin" in name else "utf-8") for name, text in files.items()}
    return write_files(folder, coded)


def test_a_book_is_a_document_in_its_official_split(tmp_path):
    index = prepared("pg19", source_of(written(tmp_path / "in", PG19_FILES)), tmp_path / "data", 10, 50, **BYTES)
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
    monkeypatch.setattr(PG19, "OFFICIAL", {"train": 2, "validation": 1, "test": 1})
    folder = written(tmp_path / "in", PG19_FILES)
    whole = source_of(folder)
    apart = source_of(*(folder / name for name in ("test", "train", "validation", "metadata.csv")))
    zipped = source_of(write_zip(tmp_path / "x.zip", {f"pg19/{name}": text for name, text in PG19_FILES.items()}))

    def texts(source: Source) -> dict[str, list[bytes]]:
        return {name: [b"".join(book) for book in books] for name, books in CORPORA["pg19"].splits(source, BYTES)}

    assert texts(whole) == texts(apart) == texts(zipped)
    assert (
        CORPORA["pg19"].about(whole, BYTES)
        == CORPORA["pg19"].about(apart, BYTES)
        == CORPORA["pg19"].about(zipped, BYTES)
    )
    assert CORPORA["pg19"].about(whole, BYTES)["official"] is True
    parts = source_of(folder / "test", folder / "train")
    assert CORPORA["pg19"].about(parts, BYTES) == {"books": {"train": 2, "test": 1}, "official": False}


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
    refusal(lambda: CORPORA["pg19"].about(source_of(written(tmp_path, PG19_FILES | changed)), BYTES), match=message)


def test_no_books_at_all(tmp_path):
    with pytest.raises(DataError, match=r"there is no train/NNN\.txt, validation/NNN\.txt or test/NNN\.txt"):
        CORPORA["pg19"].about(source_of(written(tmp_path, {"metadata.csv": "1,A,1\n"})), BYTES)


main = door("prepare-data")

TEXTS = {
    "train": " \n = Title = \n \n A <unk> word \u3000 and 3 @.@ 5 . \n \n",
    "valid": " \n = Other = \n x \n",
    "test": " \n y z \n",
}
BYTES = {"tokenizer": "bytes"}


@pytest.fixture
def wikitext(tmp_path):
    wikitext = tmp_path / "wikitext-103"
    wikitext.mkdir()
    for name, text in TEXTS.items():
        (wikitext / f"wiki.{name}.tokens").write_text(text, encoding="utf-8")
    return wikitext


@pytest.fixture
def wikitext_zip(wikitext):
    """Archive as the official one: the files in a folder, which is an entry of its own."""
    path = wikitext.parent / "wikitext-103-v1.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(wikitext, "wikitext-103/")
        for file in wikitext.iterdir():
            archive.write(file, f"wikitext-103/{file.name}")
    return path


@pytest.fixture
def official_wikitext(monkeypatch):
    """Pretend that TEXTS are the published files."""
    texts = {split: TEXTS[infix].encode() for split, infix in WikiText103.SPLITS.items()}
    digests = {split: hashlib.sha1(text).hexdigest() for split, text in texts.items()}
    monkeypatch.setitem(WikiText103.SHA1, "tokens", digests)
    monkeypatch.setattr(WikiText103, "LINES", {split: text.count(b"\n") for split, text in texts.items()})


@pytest.fixture
def wikitext_server(wikitext_zip):
    with serving(wikitext_zip.parent) as server:
        yield server


@pytest.mark.usefixtures("official_wikitext")
def test_the_command_takes_the_folder_the_archive_and_its_url(
    wikitext, wikitext_zip, wikitext_server, tmp_path, capsys
):
    sources = {"folder": wikitext, "archive": wikitext_zip, "url": f"{wikitext_server.url}/wikitext-103-v1.zip"}
    for name, source in sources.items():
        main(["wikitext103", "--source", str(source), "--output", str(tmp_path / name), "--workers", "1"])
        index = Index.load(tmp_path / name)
        assert index.file.source["official"] is True and index.file.source["kind"] == "tokens"
        assert list(index.file.splits) == list(WikiText103.SPLITS)
        for split, infix in WikiText103.SPLITS.items():
            text = TEXTS[infix]
            assert bytes(everything(index, split).tolist()).decode() == text
            # What everyone counts on WikiText-103: sum(len(line.split() + ["<eos>"]) for line in file)
            lines = text.split("\n")[:-1]
            assert index.split(split).words == sum(len([*line.split(), "<eos>"]) for line in lines)
            assert index.split(split).raw_bytes == len(text.encode())
    assert "test: 8 tokens in 1 samples, 1 shards (4 words)" in capsys.readouterr().out


@pytest.mark.usefixtures("official_wikitext")
def test_a_wrong_checksum_is_refused_and_a_part_is_not_called_official(wikitext):
    (wikitext / "wiki.train.tokens").write_text(TEXTS["train"] + " more \n", encoding="utf-8")
    assert CORPORA["wikitext103"].about(source_of(wikitext), BYTES) == {"kind": "tokens", "official": False}
    (wikitext / "wiki.train.tokens").write_text(TEXTS["train"].replace("word", "wort"), encoding="utf-8")
    with pytest.raises(
        DataError, match=r"wiki\.train\.tokens: its sha1 is \w{40}, the official file's is \w{40}\. Down"
    ):
        CORPORA["wikitext103"].about(source_of(wikitext), BYTES)
    some = source_of(wikitext / "wiki.test.tokens", wikitext / "wiki.valid.tokens")
    assert CORPORA["wikitext103"].about(some, BYTES) == {"kind": "tokens", "official": False}
    assert [name for name, _ in CORPORA["wikitext103"].splits(some, BYTES)] == ["validation", "test"]


def test_what_is_not_wikitext_is_one_line(wikitext, wikitext_zip, tmp_path):
    with pytest.raises(DataError, match=r"wiki\.test\.tokens is the same split\. Give one of the two"):
        CORPORA["wikitext103"].about(source_of(wikitext, wikitext_zip), BYTES)
    (wikitext / "wiki.test.raw").write_text("x\n")
    with pytest.raises(DataError, match=r"there are both \.tokens and \.raw files\. Give wiki\.train"):
        CORPORA["wikitext103"].about(source_of(wikitext), BYTES)
    (tmp_path / "x.txt").write_text("x\n")
    with pytest.raises(DataError, match=r"x\.txt: there is no wiki\.train\.tokens\. Give"):
        CORPORA["wikitext103"].about(source_of(tmp_path / "x.txt"), BYTES)
    (wikitext / "wiki.test.raw").write_bytes(b"x\xe9\n")
    with pytest.raises(DataError, match=r"wiki\.test\.raw: byte 1 is not UTF-8"):
        CORPORA["wikitext103"].about(source_of(wikitext / "wiki.test.raw"), BYTES)
    torn = tmp_path / "torn.zip"
    torn.write_bytes(wikitext_zip.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"torn\.zip: this zip archive is damaged: its end is missing\. Get it again"):
        source_of(torn)
