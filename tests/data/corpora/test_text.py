"""Corpora of text and of pairs: splits, pieces, documents and records, and one line for each bad source."""

import gzip
import hashlib
import random
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasparse.cli.main import door
from megasparse.data.corpora import CORPORA, corpus
from megasparse.data.corpora.corpus import ByteStream, cut, split_at, split_sizes, text_pieces
from megasparse.data.corpora.pairs import PairEncoder, Words, segments, sentences
from megasparse.data.corpora.source import Source
from megasparse.data.corpora.text import PG19, WikiText103
from megasparse.data.index import Index
from megasparse.errors import ConfigError, DataError
from tests.data.corpora.pictures import write_files, write_zip
from tests.data.folders import everything, prepared, source_of
from tests.helpers.cases import together
from tests.helpers.commands import refusal


@pytest.mark.parametrize("pieces", [[b"abcdefghij"], [b"a", b"bcd", b"", b"efghi", b"j"]])
def test_cut_and_byte_stream(pieces):
    parts = {name: b"".join(part) for name, (part,) in cut(pieces, {"x": 3, "y": 5, "z": 2})}
    assert parts == {"x": b"abc", "y": b"defgh", "z": b"ij"}
    stream = ByteStream(pieces)
    assert [stream.read(4), stream.read(4), stream.read(4), stream.read(4)] == [b"abcd", b"efgh", b"ij", b""]
    assert stream.bytes_read == 10


def test_a_border_inside_a_character_moves_to_its_end():
    text = "aé€😀b".encode()  # 1 + 2 + 3 + 4 + 1 bytes
    starts = [0, 1, 3, 6, 10, 11]
    for size in range(len(text) + 1):
        found = [b"".join(part) for _, (part,) in cut([text[:4], text[4:]], {"x": size, "y": len(text) - size}, True)]
        assert b"".join(found) == text
        assert len(found[0]) == min(start for start in starts if start >= size)


def in_parts(text: bytes, seed: int) -> Iterator[bytes]:
    draw = random.Random(seed)
    while text:
        size = draw.randrange(1, 40)
        yield text[:size]
        text = text[size:]


@together(
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


def test_split_sizes():
    assert split_sizes("90,5,5", 200) == {"train": 180, "validation": 10, "test": 10}
    assert split_sizes("99.5,0.5,0", 200) == {"train": 199, "validation": 1}
    assert split_sizes("33.3,33.3,33.4", 200) == {"train": 66, "validation": 67, "test": 67}
    for bad in ("90,5", "90,5,6", "0,50,50", "110,-5,-5", "a,b,c", "1/0,5,5", ""):
        refusal(partial(split_sizes, bad, 200), ConfigError, "--split")
    assert [split_at(byte, {"x": 2, "y": 1}) for byte in range(3)] == ["x", "x", "y"]


BOOK_FILES = {
    "a.txt": b"the first sentence .\nthe second .\n\n\nanother book .\n  \nthird\nbook",
    "b.txt": b"\n\nfourth .\n\tlike this .\n",
    "c.txt": b"\r\nfifth\r\n\r\n",
}
BOOKS = [b"the first sentence .\nthe second .\n", b"another book .\n", b"third\nbook"]
BOOKS += [b"fourth .\n\tlike this .\n", b"fifth\r\n"]
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


def test_the_published_files_without_empty_lines_are_one_running_text(tmp_path, capsys):
    """Each of the two files is a document; with 90,5,5 of the bytes, validation and test would get none."""
    files = {f"books_large_p{number}.txt": b"a sentence of a book .\n" * 50 for number in (1, 2)}
    source = source_of(write_files(tmp_path / "in", files))
    index = prepared("bookcorpus", source, tmp_path / "data", 100, 1000, **{**BOOK_SETTINGS, "split": "90,5,5"})
    content = {name: bytes(everything(index, name).tolist()) for name in index.file.splits}
    assert {name: len(text) for name, text in content.items()} == {"train": 2071, "validation": 116, "test": 116}
    assert b"".join(text.removesuffix(b"\0") for text in content.values()) == b"".join(files.values())
    assert "no empty line is between books, one running text is split" in capsys.readouterr().err
    apart = book_splits(source, {**BOOK_SETTINGS, "split": "50,0,50"})
    assert apart == {"train": [files["books_large_p1.txt"]], "test": [files["books_large_p2.txt"]]}


def test_too_few_books_are_rejected(book_source):
    with pytest.raises(DataError, match="5 books are too few to give validation any"):
        CORPORA["bookcorpus"].about(book_source, {**BOOK_SETTINGS, "split": "98,1,1"})


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
    assert [index.split(name).raw_bytes for name in want] == [len(raw) - raw.count(b"\0") for raw in want.values()]
    about = index.file.source
    assert about["books"] == {"train": 2, "validation": 1, "test": 1} and about["official"] is False


def test_folders_named_apart_and_archives_are_read_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(PG19, "OFFICIAL", {"train": 2, "validation": 1, "test": 1})
    folder = written(tmp_path / "in", PG19_FILES)
    whole = source_of(folder)
    apart = source_of(*(folder / name for name in ("test", "train", "validation", "metadata.csv")))
    files = {f"pg19/{name.replace('validation', 'valid')}": text for name, text in PG19_FILES.items()}
    zipped = source_of(write_zip(tmp_path / "x.zip", files))

    def texts(source: Source) -> dict[str, list[bytes]]:
        return {name: [b"".join(book) for book in books] for name, books in CORPORA["pg19"].splits(source, BYTES)}

    assert texts(whole) == texts(apart) == texts(zipped)
    about = CORPORA["pg19"].about(whole, BYTES)
    assert about["official"] is True
    assert about == CORPORA["pg19"].about(apart, BYTES) == CORPORA["pg19"].about(zipped, BYTES)
    parts = source_of(folder / "test", folder / "train")
    assert CORPORA["pg19"].about(parts, BYTES) == {"books": {"train": 2, "test": 1}, "official": False}


@together(
    ("changed", "message"),
    [
        ({"train/one.txt": "x"}, r"train/one\.txt: this is not a book of PG-19"),
        ({"test/10.txt": "x"}, r"the book 10 is in .* as well \(.*10\.txt\)"),
        ({"train/10.txt.gz": "x"}, r"10\.txt\.gz: cannot be read"),
    ],
)
def test_unsuitable_sources_are_one_line(tmp_path, changed, message):
    refusal(lambda: CORPORA["pg19"].about(source_of(written(tmp_path, PG19_FILES | changed)), BYTES), match=message)


main = door("prepare-data")

INFIXES = {"train": "train", "validation": "valid", "test": "test"}
TEXTS = {"train": " \n = Title = \n \n A <unk> word \u3000 and 3 @.@ 5 . \n \n"}
TEXTS |= {"valid": " \n = Other = \n x \n", "test": " \n y z \n"}


@pytest.fixture
def wikitext(tmp_path):
    wikitext = tmp_path / "wikitext-103"
    wikitext.mkdir()
    for name, text in TEXTS.items():
        (wikitext / f"wiki.{name}.tokens").write_text(text, encoding="utf-8")
    return wikitext


@pytest.fixture
def wikitext_zip(wikitext):
    """Archive like the official one: the files in a folder, which has its own entry."""
    path = wikitext.parent / "wikitext-103-v1.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(wikitext, "wikitext-103/")
        for file in wikitext.iterdir():
            archive.write(file, f"wikitext-103/{file.name}")
    return path


@pytest.fixture
def official_wikitext(monkeypatch):
    """Pretend that TEXTS are the published files."""
    texts = {split: TEXTS[infix].encode() for split, infix in INFIXES.items()}
    digests = {split: hashlib.sha1(text).hexdigest() for split, text in texts.items()}
    monkeypatch.setitem(WikiText103.SHA1, "tokens", digests)
    monkeypatch.setattr(WikiText103, "LINES", {split: text.count(b"\n") for split, text in texts.items()})


@pytest.mark.usefixtures("official_wikitext")
def test_the_command_takes_the_folder_and_the_archive(wikitext, wikitext_zip, tmp_path, capsys):
    for name, source in {"folder": wikitext, "archive": wikitext_zip}.items():
        main(["wikitext103", "--source", str(source), "--output", str(tmp_path / name), "--workers", "1"])
        index = Index.load(tmp_path / name)
        assert index.file.source["official"] is True and index.file.source["kind"] == "tokens"
        assert list(index.file.splits) == list(INFIXES)
        for split, infix in INFIXES.items():
            text = TEXTS[infix]
            assert bytes(everything(index, split).tolist()).decode() == text
            # What everyone counts on WikiText-103: sum(len(line.split() + ["<eos>"]) for line in file)
            assert index.split(split).words == sum(len([*line.split(), "<eos>"]) for line in text.split("\n")[:-1])
            assert index.split(split).raw_bytes == len(text.encode())
    assert "test: 8 tokens in 1 samples, 1 shards (4 words)" in capsys.readouterr().out


def wikitext_about(*paths: Path) -> dict[str, Any]:
    return CORPORA["wikitext103"].about(source_of(*paths), BYTES)


@pytest.mark.usefixtures("official_wikitext")
def test_a_wrong_checksum_is_rejected_and_a_part_is_not_called_official(wikitext):
    train, names = wikitext / "wiki.train.tokens", ("wiki.test.tokens", "wiki.valid.tokens")
    train.write_text(TEXTS["train"] + " more \n", encoding="utf-8")
    assert wikitext_about(wikitext) == {"kind": "tokens", "official": False}
    train.write_text(TEXTS["train"].replace("word", "wort"), encoding="utf-8")
    problem = r"wiki\.train\.tokens: its sha1 is \w{40}, the official file's is \w{40}\. Down"
    refusal(lambda: wikitext_about(wikitext), match=problem)
    some = source_of(*(wikitext / name for name in names))
    assert CORPORA["wikitext103"].about(some, BYTES) == {"kind": "tokens", "official": False}
    assert [name for name, _ in CORPORA["wikitext103"].splits(some, BYTES)] == ["validation", "test"]


def test_files_other_than_wikitext_are_one_line(wikitext, wikitext_zip, tmp_path):
    raw, other = wikitext / "wiki.test.raw", tmp_path / "x.txt"
    same = r"wiki\.test\.tokens is the same split\. Give one of the two"
    refusal(lambda: wikitext_about(wikitext, wikitext_zip), match=same)
    raw.write_text("x\n")
    refusal(lambda: wikitext_about(wikitext), match=r"there are both \.tokens and \.raw files\. Give wiki\.train")
    other.write_text("x\n")
    refusal(lambda: wikitext_about(other), match=r"x\.txt: there is no wiki\.train\.tokens\. Give")
    raw.write_bytes(b"x\xe9\n")
    refusal(lambda: wikitext_about(raw), match=r"wiki\.test\.raw: byte 1 is not UTF-8")


BEGIN, SEPARATOR, PADDING = 258, 259, 257
LENGTH = 96


def book(number: int, count: int) -> list[str]:
    """Sentences that contain their number."""
    return [f"This is {'very ' * (i % 5)}sentence {i} of book {number}." for i in range(count)]


def prepared_pairs(files: dict[str, str], folder: Path, **options: Any) -> Index:
    for name, text in files.items():
        (folder / "source").mkdir(exist_ok=True)
        (folder / "source" / name).write_text(text, encoding="utf-8")
    settings = {"tokenizer": "bytes", "split": "100,0,0", "length": LENGTH, "documents": "empty-lines", "seed": 0}
    return prepared("pairs", source_of(folder / "source"), folder / "data", 1000, 4000, **settings | options)


def records(index: Index, split: str = "train") -> list[tuple[str, str]]:
    """Segments A and B of each record, after a check of the special tokens around them."""
    found = []
    for row in everything(index, split).reshape(-1, LENGTH).tolist():
        first, second = (i for i, token in enumerate(row) if token == SEPARATOR)
        a, b = row[1:first], row[first + 1 : second]
        assert row[0] == BEGIN and a and b and row[second + 1 :] == [PADDING] * (LENGTH - second - 1)
        found.append((bytes(a).decode(), bytes(b).decode()))
    return found


@pytest.mark.parametrize("ends", ["empty-lines", "files", "doc-tags"])
def test_segments_follow_each_other_in_one_document(tmp_path, ends):
    books = [book(number, 40) for number in range(6)]
    if ends == "empty-lines":  # a sentence a line
        files = {"a.txt": "\n\n\n".join("\n".join(text) for text in books[:4]), "b.txt": "\r\n".join(books[4])}
        files |= {"c.txt": "\n".join(books[5]) + "\n"}
    elif ends == "files":  # paragraphs
        files = {
            f"{n}.txt": "\n\n".join(" ".join(text[i : i + 7]) for i in range(0, 40, 7)) for n, text in enumerate(books)
        }
    else:
        tags = '<doc id="{}" url="x" title="y">\n{}\n</doc>\n'
        files = {"wiki": "".join(tags.format(n, "\n\n".join(text)) for n, text in enumerate(books))}
    index = prepared_pairs(files, tmp_path, documents=ends)
    whole = {number: " " + " ".join(text) for number, text in enumerate(books)}
    found = records(index)
    covered = dict.fromkeys(whole, 0)
    for a, b in found:
        here = [n for n, text in whole.items() if a + b in text]
        assert here and all(segment.startswith(" This") and segment.endswith(".") for segment in (a, b))
        assert len(set(re.findall(r"of book (\d)", a + b))) <= 1
        covered[here[0]] += len(a) + len(b)
    assert all(covered[number] > 0.5 * len(text) for number, text in whole.items())
    assert index.file.settings["record"] == LENGTH and index.file.settings["sample_bytes"] == 1000 // 192 * 192
    assert index.file.splits["train"].raw_bytes and index.file.splits["train"].shards[0].width == 2


def test_only_seed_and_text_decide(tmp_path):
    encoder = PairEncoder("bytes", 4 * LENGTH, 0)
    documents = ["\n".join(book(number, 30)) + "\n\n" for number in range(3)]
    alone = [encoder.encode(document.encode()).tokens for document in documents]
    together = encoder.encode("".join(documents).encode())
    assert np.array_equal(np.concatenate(alone), together.tokens)
    assert together.raw_bytes == len("".join(documents)) and together.words == len(" ".join(documents).split())
    assert not np.array_equal(PairEncoder("bytes", 4 * LENGTH, 1).encode(documents[0].encode()).tokens, alone[0])
    # Of raw Philox words: another numpy gives the same.
    assert [Words(0, "x").below(1000) for _ in range(2)] == [Words(0, "x").below(1000)] * 2


def test_segments_are_of_whole_sentences_and_fit():
    rng = np.random.default_rng(0)
    for case in range(200):
        lengths = rng.integers(1, 14, size=rng.integers(1, 9)).tolist()
        tokens = [np.full(n, i) for i, n in enumerate(lengths)]
        numbered: list[int] = []
        for first, second in segments(tokens, 12, Words(0, str(case))):
            here = np.concatenate([first, second])
            numbers = np.unique(here).tolist()
            assert len(here) <= 12 and first[-1] + 1 == second[0]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            assert len(here) == sum(lengths[n] for n in numbers)
            numbered += numbers
        assert numbered == sorted(set(numbered))
    assert not list(segments([], 12, Words(0, ""))) and not list(segments([np.zeros(3)], 12, Words(0, "")))
    five = [np.full(2, number) for number in range(5)]
    assert {len(next(iter(segments(five, 10, Words(0, str(i)))))[0]) for i in range(60)} == {2, 4, 6, 8}


def test_lengths_of_sentences_do_not_predict_the_order():
    """The two outermost of exchangeable sentences of a record are alike; filled up to the brim they are not."""
    rng = np.random.default_rng(1)
    outer = []
    for case in range(1500):
        tokens = [np.full(n, i) for i, n in enumerate(rng.geometric(0.05, size=40).tolist())]
        for first, second in segments(tokens, 125, Words(0, str(case))):
            outer.append(int((first == first[0]).sum()) - int((second == second[-1]).sum()))
    assert len(outer) > 5000
    assert abs(np.mean(outer)) < 4 * np.std(outer) / len(outer) ** 0.5


def test_sentences():
    line = 'He saw Mr. Smith, J. Doe etc. and "left." Then? "No!" said 5 of them. È un po\' . Élan vital… ok. 7 days.'
    assert sentences(line) == [
        'He saw Mr. Smith, J. Doe etc. and "left."', "Then?", '"No!" said 5 of them.', "È un po' .",
        "Élan vital… ok.", "7 days.",
    ]  # fmt: skip
    assert sentences(" ") == [] and sentences("no end") == ["no end"]


def test_bad_input_is_one_line(tmp_path):
    refusal(lambda: PairEncoder("bytes", 4, 0), ConfigError, "--length: 4 tokens")
    refusal(lambda: PairEncoder("pixels", 64, 0), ConfigError, "no special tokens")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_bytes(b"ab \xff.")
    refusal(lambda: prepared_pairs({}, tmp_path), match=r"a\.txt: byte 3 is not UTF-8")
    assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match="no document begins in the part for validation"):
        prepared_pairs({"a.txt": "One. Two."}, tmp_path, split="50,50,0")


S, T = 12, 9
GERMAN = ["eins", "zwei", "", "drei56789", "acht4567", "fünf", "sechs"]
ENGLISH = ["one", "two", "nothing", "three", "eight", "five 8901 345", "six"]
# the 4th target is too long by 1, the 6th source by more


def prepared_parallel(folder: Path, *more: object) -> Index:
    lengths = ["--source-length", str(S), "--target-length", str(T)]
    output = folder / "out"
    main(["parallel", "--output", str(output), *lengths, *map(str, more)])
    return Index.load(output)


def written_lines(folder: Path, name: str, lines: list[str]) -> Path:
    path, text = folder / name, "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def translations(index: Index, split: str) -> list[tuple[str, str]]:
    found = []
    for row in everything(index, split).reshape(-1, S + T).tolist():
        sides = []
        for side in (row[:S], row[S:]):
            end = side.index(SEPARATOR)
            assert side[end + 1 :] == [PADDING] * (len(side) - end - 1)
            sides.append(bytes(side[:end]).decode())
        found.append((sides[0], sides[1]))
    return found


FITTING = [("one", "eins"), ("two", "zwei"), ("eight", "acht4567"), ("six", "sechs")]


def test_pairs_that_fit_are_taken_and_the_others_counted(tmp_path):
    english, german = written_lines(tmp_path, "a.en", ENGLISH), written_lines(tmp_path, "a.de.gz", GERMAN)
    index = prepared_parallel(tmp_path, "--source", english, "--target", german, "--split", "100,0,0")
    assert translations(index, "train") == FITTING
    assert index.file.source["lines"] == {"train": 7} and index.file.settings["record"] == S + T
    assert index.file.splits["train"].raw_bytes == sum(len(german.encode()) for _, german in FITTING)
    assert index.file.splits["train"].words == 4


def test_splits_from_separate_files(tmp_path):
    files = {side: written_lines(tmp_path, f"a.{side}", lines) for side, lines in (("en", ENGLISH), ("de", GERMAN))}
    files |= {"vs": written_lines(tmp_path, "v.en", ["a", "b\r"]), "vt": written_lines(tmp_path, "v.de", ["c", "d"])}
    (tmp_path / "v.de").write_text("c\nd")  # without an end
    more = ("--validation-target", files["vt"], "--validation-source", files["vs"])
    index = prepared_parallel(tmp_path, *more, "--source", files["en"], "--target", files["de"])
    assert translations(index, "train") == FITTING and translations(index, "validation") == [("a", "c"), ("b", "d")]
    assert list(index.file.splits) == ["train", "validation"]


@together(
    ("target", "more", "reported"),
    [
        (GERMAN[:-1], [], "train has 7 lines of the source and 6 of the target"),
        ([], [], "2 files are given, and 1 are found that are not empty"),
        (["too long, all of them"] * 7, ["--split", "100,0,0"], "nothing of it is left for train"),
        (GERMAN, ["--validation-source", "SOURCE", "--validation-target", "SOURCE", "--split", "1,2,97"], "--split"),
        (GERMAN, ["--test-source", "SOURCE"], "test has 7 lines of the source and 0 of the target"),
    ],
)
def test_mismatched_files_are_rejected(tmp_path, capsys, target, more, reported):
    english, german = written_lines(tmp_path, "a.en", ENGLISH), written_lines(tmp_path, "a.de", target)
    more = [str(english) if word == "SOURCE" else word for word in more]
    with pytest.raises(SystemExit) as end:
        prepared_parallel(tmp_path, "--source", english, "--target", german, *more)
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and error.startswith("error: ") and reported in error
    assert not (tmp_path / "out" / "index.json").exists()
