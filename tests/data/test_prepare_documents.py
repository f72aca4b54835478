"""Documents and tokenizers: what the shards hold, and that an interrupted preparation does nothing twice."""

import json
import os
import random
import shutil
from typing import Any

import numpy as np
import pytest

from megasparse.data.corpora import CORPORA
from megasparse.data.encoders import Encoded, TextEncoder
from megasparse.data.index import Index
from megasparse.errors import ConfigError, DataError
from tests.data.corpora.pictures import write_files
from tests.data.folders import crashing, everything, files, prepared, source_of
from tests.helpers.encoders import Doubling
from tests.helpers.refusals import refusal

VOCABULARY = ["<unk>", "<eos>", *(f"w{i}" for i in range(300))]
WORDS = ("\n".join(VOCABULARY) + "\n").encode()
"""The file of a tokenizer of these words."""


@pytest.fixture
def books(tmp_path):
    """40 short books, in files of TMP/books."""
    draw = random.Random(0)
    texts = []
    for _ in range(40):
        lines = [" ".join(draw.choices(VOCABULARY, k=draw.randrange(9))) for _ in range(draw.randrange(1, 9))]
        texts.append("\n".join(lines) + "\n")
    write_files(tmp_path / "books", {f"{number:02d}.txt": text.encode() for number, text in enumerate(texts)})
    (tmp_path / "words.txt").write_bytes(WORDS)
    return texts


@pytest.fixture
def make(tmp_path):
    """Prepares TMP/books in TMP/NAME."""

    def make(name: str = "data", sample_bytes: int = 100, **options: Any) -> Index:
        source = source_of(tmp_path / "books", kind="files" if options.get("documents") else "stream")
        return prepared("text", source, tmp_path / name, sample_bytes, 300, **{"split": "80,10,10", **options})

    return make


def test_each_file_is_a_document_with_a_separator_in_the_split_of_its_first_byte(make, books):
    index = make(documents=True)
    total = sum(map(len, books))
    start = 0
    want: dict[str, bytes] = {"train": b"", "validation": b"", "test": b""}
    words = dict.fromkeys(want, 0)
    for book in books:
        split = "train" if start < total * 0.8 else "validation" if start < total * 0.9 else "test"
        want[split] += book.encode() + b"\0"
        words[split] += len(book.split())
        start += len(book)
    for split, content in want.items():
        assert bytes(everything(index, split).tolist()) == content
        entry = index.split(split)
        assert (entry.raw_bytes, entry.words) == (len(content) - content.count(b"\0"), words[split])
    assert index.file.settings["documents"] is True and len(index.file.source["layout"]) == 64


def test_tokens_of_two_bytes(make, books, tmp_path):
    index = make(tokenizer=str(tmp_path / "words.txt"), sample_bytes=101)
    whole = "".join(books)
    border = int(len(whole) * 0.8)
    want = [VOCABULARY.index(word) for line in whole[:border].split("\n")[:-1] for word in [*line.split(), "<eos>"]]
    found = everything(index).tolist()
    assert found[: len(want)] == want and len(found) - len(want) < 10  # the line that the border cuts
    assert index.split("train").raw_bytes == border
    assert {shard.width for split in index.file.splits.values() for shard in split.shards} == {2}
    assert index.file.settings["sample_bytes"] == 100  # whole tokens
    assert index.file.tokenizer.name == "words"
    assert (index.directory / "tokenizer.txt").read_bytes() == (tmp_path / "words.txt").read_bytes()
    assert "tokenizer" not in index.file.settings

    (tmp_path / "words.txt").rename(tmp_path / "moved.txt")
    make(tokenizer=str(tmp_path / "moved.txt"), sample_bytes=101)  # the same tokenizer by another name
    (tmp_path / "moved.txt").write_text("\n".join(VOCABULARY[::-1]) + "\n")
    before = files(index.directory)
    with pytest.raises(DataError, match=r"prepared with another tokenizer sha256 \w+ \(now \w+\)\. Choose another"):
        make(tokenizer=str(tmp_path / "moved.txt"), sample_bytes=101)
    with pytest.raises(DataError, match=r"prepared with another tokenizer words \(now bytes\)"):
        make(sample_bytes=101)
    assert files(index.directory) == before


def test_any_number_of_workers_writes_the_same_bytes(make, books, monkeypatch):
    monkeypatch.setattr(CORPORA["text"], "encoder", lambda settings: Doubling(end=7))  # its processes start in no time
    one, two = make("one", documents=True), make("two", workers=2, documents=True)
    assert files(one.directory) == files(two.directory)
    assert one.split("train").tokens == 2 * (one.split("train").raw_bytes or 0) + everything(one).tolist().count(7)


@pytest.mark.parametrize("crash_at", [1, 2, 4, 7, 26])
def test_finished_shards_are_not_encoded_again(make, books, tmp_path, monkeypatch, crash_at):
    encoded: list[bytes] = []
    encode = TextEncoder.encode

    def counting(encoder: TextEncoder, piece: bytes) -> Encoded:
        encoded.append(piece)
        return encode(encoder, piece)

    monkeypatch.setattr(TextEncoder, "encode", counting)
    want = files(make("whole", documents=True).directory)
    assert encoded == [book.encode() for book in books]

    with crashing(os, "replace", crash_at):
        make(documents=True)
    encoded.clear()
    assert files(make(documents=True).directory) == want
    finished = max(0, crash_at - 2) // 2  # replaces: progress, then shard and progress in turn
    kept = json.loads(want["index.json"])["splits"]
    sizes = [shard["tokens"] for split in kept.values() for shard in split["shards"]][:finished]
    starts = np.cumsum([0, *(len(book) + 1 for book in books)])
    assert encoded == [book.encode() for book, stop in zip(books, starts[1:], strict=True) if stop > sum(sizes)]


def test_a_file_that_moved_to_another_document_is_another_source(make, books, tmp_path):
    index = make(documents=True)
    first, second = tmp_path / "books" / "00.txt", tmp_path / "books" / "01.txt"
    both = first.read_text() + second.read_text()
    first.write_text(both[:5])
    second.write_text(both[5:])
    with pytest.raises(DataError, match="prepared with another source layout"):
        make(documents=True)
    shutil.rmtree(index.directory)
    make(documents=True)


@pytest.mark.parametrize(
    ("content", "options", "error", "message"),
    [
        (b"good\n\xff\xfe", {"documents": True}, DataError, r"books/07\.txt: byte 5 is not UTF-8\. Convert it"),
        (b"good \xc3", {"tokenizer": "words.txt"}, DataError, r"books/07\.txt: byte 5 is not UTF-8"),
        (b"a\0b", {"documents": True}, DataError, r"books/07\.txt: byte 1 is 0, which stands between documents"),
        (b"", {"documents": True, "tokenizer": "words.txt"}, ConfigError, r'words\.txt" has no token that ends a doc'),
        (b"", {"tokenizer": "nowhere.model"}, ConfigError, r"--tokenizer: .*nowhere\.model"),
        (b"", {"documents": True, "split": "99.9,0.05,0.05"}, DataError, r"40 documents are too few to give valid"),
    ],
)
def test_what_does_not_fit_is_one_line_and_nothing_is_written(
    make, books, tmp_path, monkeypatch, content, options, error, message
):
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / "books" / "07.txt").write_bytes(content)
    refusal(lambda: make(**options), error, message)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("sizes", "split"), [([10] * 8 + [1], "80,10,10"), ([10] * 6, "60,20,20"), ([10], "100,0,0"), ([1, 99], "100,0,0")]
)
def test_too_few_documents_come_with_a_split_that_works(make, tmp_path, sizes, split):
    write_files(tmp_path / "books", {f"{number}.txt": b"x" * size for number, size in enumerate(sizes)})
    with pytest.raises(DataError, match=rf"too few .* Give more text, or --split {split}$"):
        make(documents=True, split="99.8,0.1,0.1")
    make(documents=True, split=split)


@pytest.mark.parametrize("tokenizer", ["words.txt", "data/tokenizer.txt"])
def test_a_split_without_tokens_is_refused_and_what_was_in_the_folder_stays(make, tmp_path, tokenizer):
    write_files(tmp_path, {"books/x.txt": b"w1 w2 w3 w4" + b" " * 30, tokenizer: WORDS})
    with pytest.raises(DataError, match=r"books: nothing of it is left for validation\. Give more"):
        make(tokenizer=str(tmp_path / tokenizer), split="50,25,25")
    if tokenizer == "words.txt":
        assert not (tmp_path / "data").exists()
    else:
        assert list((tmp_path / "data").iterdir()) == [tmp_path / tokenizer]


def test_bytes_take_any_stream(make, books, tmp_path):
    (tmp_path / "books" / "07.txt").write_bytes(b"\xff\0\xfe")
    index = make(split="100,0,0")
    raw = b"".join(path.read_bytes() for path in sorted((tmp_path / "books").iterdir()))
    assert bytes(everything(index).tolist()) == raw
