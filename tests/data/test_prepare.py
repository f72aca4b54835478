"""Preparation: shards that do not depend on crashes or workers, documents and tokenizers, and streams that resume."""

import os
import pickle
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from megasparse.data import prepare as prepare_module
from megasparse.data.corpora import CORPORA
from megasparse.data.encoders import Encoded, TextEncoder
from megasparse.data.index import Index
from megasparse.data.prepare import StreamPosition, TokenStream
from megasparse.data.workers import Workers
from megasparse.errors import ConfigError, DataError, SourceError
from megasparse.files import locked
from tests.data.corpora.pictures import write_files
from tests.data.folders import crashing, everything, files, prepared, source_of
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.encoders import Doubling


def test_plain_webdataset_reads_the_shards(make_index, corpus):
    index = make_index(corpus, split="80,10,10")
    for split, text in (("train", corpus[:5610]), ("validation", corpus[5610:6311]), ("test", corpus[6311:])):
        urls = [str(index.path(shard)) for shard in index.split(split).shards]
        samples = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
        assert b"".join(sample["bin"] for sample in samples) == text
        assert [sample["__key__"] for sample in samples] == [f"{i:09d}" for i in range(index.split(split).samples)]


@pytest.mark.parametrize("sample_bytes", [1, 7, 999, 10_000])
def test_any_sample_size_gives_the_text(make_index, corpus, sample_bytes):
    index = make_index(corpus, sample_bytes=sample_bytes)
    assert bytes(everything(index).tolist()) == corpus
    assert all(shard.tokens <= max(1000, sample_bytes) for shard in index.split("train").shards)


def test_shards_depend_only_on_the_text(make_index, corpus, monkeypatch):
    index = make_index(corpus)
    before = files(index.directory)
    for path in index.directory.iterdir():
        path.unlink()
    monkeypatch.setenv("USER", "another")
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert files(make_index(corpus).directory) == before


def test_no_file_is_writable_by_others(index):
    folder = index.directory
    assert not any(path.stat().st_mode & stat.S_IWOTH for path in [folder, *folder.iterdir()])


@pytest.mark.parametrize("crash_at", [1, 2, 3, 24, 25])
def test_after_a_crash_at_any_replace_the_next_run_completes(make_index, corpus, tmp_path, monkeypatch, crash_at):
    def make() -> Index:
        return make_index(corpus, split="60,20,20", shard_bytes=700)

    want = files(make().directory)
    (tmp_path / "data").rename(tmp_path / "whole")
    with crashing(os, "replace", crash_at):
        make()
    left = files(tmp_path / "data")
    assert "index.json" not in left
    assert {name: data for name, data in left.items() if name != ".progress.json"}.items() <= want.items()

    written, write = [], prepare_module._write_shard
    noting = lambda path, *rest: written.append(path.name) or write(path, *rest)  # noqa: E731
    monkeypatch.setattr(prepare_module, "_write_shard", noting)
    assert files(make().directory) == want
    known_to_be_whole = max(0, crash_at - 2) // 2  # replaces: progress, then (shard, progress) for each shard, index
    assert len(written) == len(want) - 1 - known_to_be_whole


def test_damaged_and_missing_shards_are_written_again(make_index, corpus):
    folder = make_index(corpus).directory
    want = files(folder)
    (folder / "train-000001.tar").unlink()
    (folder / "train-000003.tar").write_bytes(b"damaged")
    assert files(make_index(corpus).directory) == want


def test_done_is_done(make_index, corpus, monkeypatch):
    make_index(corpus)
    monkeypatch.setattr(os, "replace", None)  # nothing may be written
    make_index(corpus)


def test_another_source_or_setting_is_rejected(make_index, corpus):
    folder = make_index(corpus).directory
    want = files(folder)
    source = r"prepared with another source sha256 \w+ \(now \w+\)\. Choose another"
    refusal(lambda: make_index(corpus[::-1]), match=source)
    refusal(lambda: make_index(corpus, sample_bytes=50), match=r"another sample_bytes 100 \(now 50\)")
    refusal(lambda: make_index(corpus, split="90,5,5"), match=r"another split 100,0,0 \(now 90,5,5\)")
    assert files(folder) == want
    (folder / "index.json").unlink()
    refusal(lambda: make_index(corpus), match=r"\.tar is here, but no index\.json")


def test_a_second_preparation_of_a_folder_is_rejected(make_index, corpus):
    folder = make_index(corpus).directory
    with locked(folder, "preparing data"):
        refusal(lambda: make_index(corpus), match=r"data: another process is preparing data here\. Wait until")
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to(folder / "index.json")
    before = files(folder)
    refusal(lambda: make_index(corpus), match="this is a symbolic link, which is not written")
    assert files(folder) == before


def test_a_full_disk_is_an_error_with_a_hint(make_index, corpus, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        problem = r"data: cannot be written: No space left on device\. Run the command again"
        refusal(lambda: make_index(corpus), match=problem)
        assert files(tmp_path / "data") == {}
    make_index(corpus)


def test_a_source_that_changes_while_it_is_read_is_rejected(tmp_path, corpus):
    path = tmp_path / "source.txt"
    path.write_bytes(corpus)
    source = source_of(path, kind="stream")
    for changed in (corpus[::-1], corpus[:-1], corpus + b"x"):
        path.write_bytes(changed)
        with pytest.raises(DataError, match="it changed while it was read"):
            prepared("text", source, tmp_path / "data", 100, 1000, split="90,5,5")
        assert not (tmp_path / "data" / "index.json").exists()


class Counting(Doubling):
    def __init__(self, end: int | None):
        super().__init__(end)
        self.seen: list[bytes] = []

    def encode(self, piece: bytes) -> Encoded:
        self.seen.append(piece)
        return super().encode(piece)


def documents() -> list[list[bytes]]:
    draw = random.Random(0)
    pieces = [[draw.choice([b"", b"a b", b"cde f", b"g"]) for _ in range(draw.randrange(4))] for _ in range(30)]
    return [[], [b""], *pieces, [b"last"], []]


def lazily() -> Iterator[Iterator[bytes]]:
    return (iter(document) for document in documents())


@together("end", [None, 7])
@together("size", [2, 6, 34])
def test_from_any_place_on_the_stream_is_the_same_and_nothing_before_is_encoded(end, size):
    want: list[int] = []
    for document in documents():
        want += [byte + 256 for byte in b"".join(document) for _ in range(2)]
        want += [end] if any(document) and end is not None else []
    whole = np.array(want, dtype="<u2").tobytes()
    pieces = [piece for document in documents() for piece in document if piece]

    encoder = Counting(end)
    stream = TokenStream(lazily(), encoder, Workers(encoder.item, 1), StreamPosition())
    places, found = [stream.position], b""
    while part := stream.read(size):
        found += part
        places.append(stream.position)
    assert found == whole and encoder.seen == pieces
    total = places[-1]
    assert total.raw_bytes == sum(map(len, pieces)) and total.words == sum(len(piece.split()) for piece in pieces)
    assert places[0] == StreamPosition() and total.token == 0

    for number, place in enumerate(places):
        encoder = Counting(end)
        stream = TokenStream(lazily(), encoder, Workers(encoder.item, 1), place)
        assert stream.position == place
        assert stream.read(1 << 20) == whole[number * size :]
        assert stream.position == total
        assert encoder.seen == pieces[len(pieces) - len(encoder.seen) :]
        assert sum(map(len, encoder.seen)) <= total.raw_bytes - place.raw_bytes


@together(
    ("text", "words"), [("", 0), ("a", 1), (" a  b\n\tc ", 3), ("a\u00a0b\u3000c", 3), ("é\u200bé", 1), ("\n \n", 0)]
)
def test_words_are_separated_by_white_space_and_line_ends_are_counted_on_request(text, words):
    found = TextEncoder("bytes").encode(text.encode())
    assert (found.tokens.tobytes(), found.raw_bytes, found.words) == (text.encode(), len(text.encode()), words)
    assert TextEncoder("bytes", line_ends=True).encode(text.encode()).words == words + text.count("\n")


def test_it_is_pickled_as_its_name(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("".join(f"{word}\n" for word in ["<unk>", "<eos>", *(f"w{i}" for i in range(300))]))
    encoder = TextEncoder(str(file), line_ends=True)
    raw = pickle.dumps(encoder)
    assert len(raw) < 1000
    for one in (encoder, pickle.loads(raw)):
        assert (one.name, one.sha256, one.width, one.end, one.file) == ("words", encoder.sha256, 2, None, file)
        tokens, raw_bytes, words = one.encode(b"w0 w299\nnew")
        assert tokens.dtype == "<u2" and (tokens.tolist(), raw_bytes, words) == ([2, 301, 1, 0], 11, 4)


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
    refusal(lambda: make(sample_bytes=101), match=r"prepared with another tokenizer words \(now bytes\)")
    assert files(index.directory) == before


def test_any_number_of_workers_writes_the_same_bytes(make, books, monkeypatch):
    monkeypatch.setattr(CORPORA["text"], "encoder", lambda settings: Doubling(end=7))  # its processes start in no time
    one, two = make("one", documents=True), make("two", workers=2, documents=True)
    assert files(one.directory) == files(two.directory)
    assert one.split("train").tokens == 2 * (one.split("train").raw_bytes or 0) + everything(one).tolist().count(7)


@pytest.mark.parametrize(
    ("event", "error", "message"),
    [
        ("killed", ConfigError, "a worker process was killed"),
        ("vanished", DataError, r"39\.txt: cannot be read: .*No such file"),
        ("changed", SourceError, r"39\.txt: it changed while it was read"),
    ],
)
def test_finished_shards_stay_unless_their_source_changed(make, books, tmp_path, monkeypatch, event, error, message):
    want, last = files(make("whole", documents=True).directory), tmp_path / "books" / "39.txt"
    write, written = prepare_module._write_shard, list[str]()

    def failing(path: Path, *rest: Any) -> Any:
        written.append(path.name)
        if len(written) == 4 and event == "killed":
            raise ConfigError("--workers", "a worker process was killed", "Run the command again")
        if len(written) == 4:
            last.rename(tmp_path / "moved") if event == "vanished" else last.write_text("other words\n")
        return write(path, *rest)

    monkeypatch.setattr(prepare_module, "_write_shard", failing)
    refusal(lambda: make(documents=True), error, message)
    last.write_text(books[-1])
    if event == "changed":
        assert not (tmp_path / "data").exists()
    else:
        left = files(tmp_path / "data")
        left.pop(".progress.json")
        assert len(left) >= 3 and left.items() <= want.items()
        written[:] = [""] * 4
        assert files(make(documents=True).directory) == want
        assert not left.keys() & set(written), "what was finished is not written again"


@pytest.mark.parametrize(
    ("content", "options", "error", "message"),
    [
        (b"good\n\xff\xfe", {"documents": True}, DataError, r"books/07\.txt: byte 5 is not UTF-8\. If it is Latin-1"),
        (b"a\0b", {"documents": True}, DataError, r"books/07\.txt: byte 1 is 0, which stands between documents"),
        (b"", {"documents": True, "tokenizer": "words.txt"}, ConfigError, r'words\.txt" has no token that ends a doc'),
    ],
)
def test_unsuitable_settings_are_one_line_and_write_nothing(
    make, books, tmp_path, monkeypatch, content, options, error, message
):
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / "books" / "07.txt").write_bytes(content)
    refusal(lambda: make(**options), error, message)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("tokenizer", ["words.txt", "data/tokenizer.txt"])
def test_an_empty_split_is_rejected_and_the_folder_is_unchanged(make, tmp_path, tokenizer):
    write_files(tmp_path, {"books/x.txt": b"w1 w2 w3 w4" + b" " * 30, tokenizer: WORDS})
    with pytest.raises(SourceError, match=r"books: nothing of it is left for validation\. Give more"):
        make(tokenizer=str(tmp_path / tokenizer), split="50,25,25")
    if tokenizer == "words.txt":
        assert not (tmp_path / "data").exists()
    else:
        assert list((tmp_path / "data").iterdir()) == [tmp_path / tokenizer]
