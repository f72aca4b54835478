"""Pairs of segments: records made of consecutive text of one document, cut as ALBERT cuts."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasparse.data.corpora.pairs import PairEncoder, Words, segments
from megasparse.data.corpora.sentences import sentences
from megasparse.data.corpora.source import Source
from megasparse.data.index import Index
from megasparse.data.prepare import prepare
from megasparse.data.reader import EvaluationStream
from megasparse.errors import ConfigError, DataError

BEGIN, SEPARATOR, PADDING = 258, 259, 257
LENGTH = 96


def book(number: int, count: int) -> list[str]:
    """Sentences that say which they are."""
    return [f"This is {'very ' * (i % 5)}sentence {i} of book {number}." for i in range(count)]


def prepared(files: dict[str, str], folder: Path, **options: Any) -> Index:
    for name, text in files.items():
        (folder / "source").mkdir(exist_ok=True)
        (folder / "source" / name).write_text(text, encoding="utf-8")
    source = Source.open([str(folder / "source")], None, folder / "download", "files")
    settings = {"tokenizer": "bytes", "split": "100,0,0", "length": LENGTH, "documents": "empty-lines", "seed": 0}
    output = folder / "data"
    prepare("pairs", source, output, options=settings | options, sample_bytes=1000, shard_bytes=4000, command="a test")
    return Index.load(output)


def records(index: Index, split: str = "train", length: int = LENGTH) -> list[tuple[str, str]]:
    """Segments A and B of each record, after a check of what is around them."""
    stream = EvaluationStream(index, split)
    rows = np.array(stream.read(0, stream.tokens)).reshape(-1, length)
    found = []
    for row in rows.tolist():
        first, second = (i for i, token in enumerate(row) if token == SEPARATOR)
        a, b = row[1:first], row[first + 1 : second]
        assert row[0] == BEGIN and a and b and row[second + 1 :] == [PADDING] * (length - second - 1)
        found.append((bytes(a).decode(), bytes(b).decode()))
    return found


@pytest.mark.parametrize("ends", ["empty-lines", "files", "doc-tags"])
def test_segments_follow_each_other_in_one_document(tmp_path: Path, ends: str) -> None:
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
    index = prepared(files, tmp_path, documents=ends)
    whole = {number: " " + " ".join(text) for number, text in enumerate(books)}
    found = records(index)
    full = short = 0
    covered = dict.fromkeys(whole, 0)
    for a, b in found:
        here = [
            n for n, text in whole.items() if 0 <= text.find(b, text.find(a) + len(a)) - text.find(a) - len(a) <= 45
        ]
        assert here  # with a gap of what was cut off a sentence at most
        assert len(set(re.findall(r"of book (\d)", a + b))) <= 1
        covered[here[0]] += len(a) + len(b)
        full, short = full + (len(a) + len(b) == LENGTH - 3), short + (len(a) + len(b) < LENGTH - 3)
    assert full > 0.6 * len(found) and short
    assert all(covered[number] > 0.6 * len(text) for number, text in whole.items())
    assert index.file.settings["record"] == LENGTH and index.file.settings["sample_bytes"] == 1000 // 192 * 192
    assert index.file.splits["train"].raw_bytes and index.file.splits["train"].shards[0].width == 2


def test_documents_go_whole_to_the_split_in_which_they_begin(tmp_path: Path) -> None:
    text = "\n\n".join("\n".join(book(number, 9)) for number in range(10))
    index = prepared({"a.txt": text}, tmp_path, split="45,30,25")
    names = {}
    for split in ("train", "validation", "test"):
        names[split] = {name for a, b in records(index, split) for name in re.findall(r"of book (\d)", a + b)}
    assert names == {"train": set("01234"), "validation": set("567"), "test": set("89")}


def test_only_seed_and_text_decide(tmp_path: Path) -> None:
    encoder = PairEncoder("bytes", LENGTH, 0)
    documents = ["\n".join(book(number, 30)) + "\n\n" for number in range(3)]
    alone = [encoder.encode(document.encode()).tokens for document in documents]
    together = encoder.encode("".join(documents).encode())
    assert np.array_equal(np.concatenate(alone), together.tokens)
    assert together.raw_bytes == len("".join(documents)) and together.words == len(" ".join(documents).split())
    assert not np.array_equal(PairEncoder("bytes", LENGTH, 1).encode(documents[0].encode()).tokens, alone[0])
    # Of raw Philox words: another numpy gives the same.
    assert [Words(0, "x").below(1000) for _ in range(2)] == [Words(0, "x").below(1000)] * 2
    assert 40 < Words(0, "y").heads(100) < 60


def test_segments_are_cut_as_alberts() -> None:
    def albert(first: list[int], second: list[int], room: int) -> tuple[int, int]:
        while len(first) + len(second) > room:
            (first if len(first) > len(second) else second).pop()
        return len(first), len(second)

    for a in range(1, 16):
        for b in range(1, 16):
            tokens = [np.arange(a), np.arange(100, 100 + b)]
            for first, second in segments(tokens, 10, Words(3, f"{a} {b}")):
                if first[0] < 100 <= second[0] and a < 10:
                    assert (len(first), len(second)) == albert([0] * a, [0] * b, 10)
                assert np.array_equal(np.diff(np.concatenate([first, [0]]))[:-1], np.ones(len(first) - 1))
    for few in ([np.arange(30)], [np.arange(0)], []):  # what would be halves
        assert not list(segments(few, 10, Words(0, "")))
    ((long, after),) = segments([np.arange(30), np.arange(100, 102), np.arange(0)], 10, Words(0, ""))
    assert len(long) == 8 and after.tolist() == [100, 101]
    five = [np.full(2, number) for number in range(5)]
    assert {len(next(iter(segments(five, 10, Words(0, str(i)))))[0]) for i in range(60)} == {2, 4, 6, 8}
    kept = [next(iter(segments([np.arange(2), np.arange(2, 30)], 10, Words(0, str(i)))))[1][0] for i in range(99)]
    assert 2 <= min(kept) < 8 and max(kept) > 14  # cut off on both sides


def test_sentences() -> None:
    line = 'He saw Mr. Smith, J. Doe etc. and "left." Then? "No!" said 5 of them. È un po\' . Élan vital… ok. 7 days.'
    assert sentences(line) == [
        'He saw Mr. Smith, J. Doe etc. and "left."', "Then?", '"No!" said 5 of them.', "È un po' .",
        "Élan vital… ok.", "7 days.",
    ]  # fmt: skip
    assert sentences(" ") == [] and sentences("no end") == ["no end"]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--length: 4 tokens"):
        PairEncoder("bytes", 4, 0)
    with pytest.raises(ConfigError, match="no special tokens"):
        PairEncoder("pixels", 64, 0)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_bytes(b"ab \xff.")
    with pytest.raises(DataError, match=r"a\.txt: byte 3 is not UTF-8"):
        prepared({}, tmp_path)
    assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match="no document begins in the part that is for validation"):
        prepared({"a.txt": "One. Two."}, tmp_path, split="50,50,0")
