import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from megasparse.data import prepare
from megasparse.data.corpora import jsonl, records
from megasparse.data.corpora.corpus import lines
from megasparse.data.corpora.records import RecordSource, write_report
from megasparse.data.index import Index
from megasparse.errors import ConfigError, DataError
from tests.data import folders
from tests.data.corpora.pictures import write_zip
from tests.data.folders import crashing, everything, files
from tests.helpers.refusals import refusal

LINES = [
    *(b'{"text": "first"}', b'{"text": "s\\u00e9cond"}', b"", b"  ", b'{"text": null}', b'{"text": "   "}'),
    *(b'{"id": 1}', b'{"text": 3}', b"[1]", b"{", b'{"text": "\\ud800"}', b'{"text": "\xff"}', b"[" * 5000),
    *(b'{"text": "nul\\u0000"}', b'{"text": "first"}', b'{"text": "a longer one"}', b'{"text": "x", "text": "last"}'),
]
REASONS = {
    "empty": 2,
    'no "text"': 1,
    '"text" is no text': 1,
    "no JSON object": 1,
    "not JSON": 3,
    "half a surrogate pair": 1,
    "byte 0, which stands between documents": 1,
}
GOOD = [b"first", "sécond".encode(), b"first", b"a longer one", b"last"]


def settings(**changed: Any) -> dict[str, Any]:
    given = {"column": "text", "tokenizer": "bytes", "split": "100,0,0", "deduplicate": False}
    return {**given, "min_bytes": None, "max_bytes": None, **changed}


def source_of(place: Path, workers: int = 1, **changed: Any) -> RecordSource:
    return jsonl.open_source([str(place)], None, Path("/nowhere/.download"), settings(**changed), workers)


def documents(source: RecordSource, **changed: Any) -> dict[str, list[bytes]]:
    return {
        name: [b"".join(document) for document in found] for name, found in jsonl.splits(source, settings(**changed))
    }


@pytest.fixture(autouse=True)
def lenient(monkeypatch):
    monkeypatch.setattr(records, "MOST_DAMAGED", 0.8)


def test_lines_that_are_no_record_are_left_out_by_reason(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(LINES))
    source = source_of(tmp_path / "a.jsonl")
    assert documents(source) == {"train": GOOD}
    assert source.left_out() == REASONS
    assert source.total_bytes == len(b"".join(GOOD))


@pytest.mark.parametrize(
    ("changed", "want", "why"),
    [
        ({"min_bytes": 6}, [GOOD[1], GOOD[3]], {"shorter than 6 bytes": 3}),
        ({"max_bytes": 5}, [GOOD[0], GOOD[2], GOOD[4]], {"longer than 5 bytes": 2}),
        ({"deduplicate": True}, [GOOD[0], GOOD[1], *GOOD[3:]], {"copy of an earlier one": 1}),
        ({"deduplicate": True, "max_bytes": 5}, [b"first", b"last"], {"copy of an earlier one": 1}),
        ({"column": "id"}, [], {}),
    ],
)
def test_what_is_chosen(tmp_path, changed, want, why):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES))
    if not want:
        with pytest.raises(DataError, match=r'record 1 here: no "id"\. Up to 80% are left out; check the source and'):
            source_of(tmp_path / "a.jsonl", **changed)
        return
    source = source_of(tmp_path / "a.jsonl", **changed)
    assert documents(source) == {"train": want}
    assert why.items() <= source.left_out().items()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda content: gzip.compress(content[:50]) + gzip.compress(content[50:]),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: (
        pyarrow.compress(content[:50], "zstd", asbytes=True) + pyarrow.compress(content[50:], "zstd", asbytes=True)
    ),
}


@pytest.mark.parametrize("suffix", PACKED)
def test_compressed_files_are_read_as_they_are_and_torn_ones_refused(tmp_path, suffix):
    content = b"\n".join(LINES)
    file = tmp_path / "in" / f"a.jsonl{suffix}"
    file.parent.mkdir()
    file.write_bytes(PACKED[suffix](content))
    (file.parent / "readme.txt").write_text("not taken from a folder")
    assert documents(source_of(file.parent)) == {"train": GOOD}
    if suffix:
        file.write_bytes(PACKED[suffix](content)[:-9])
        with pytest.raises(DataError, match=r"a\.jsonl.*: cannot be read"):
            source_of(file)


def test_members_of_a_zip_archive_are_files(tmp_path):
    archive = write_zip(tmp_path / "a.zip", {"x.jsonl": b"\n".join(LINES), "y.jsonl": b"\n".join(LINES[:2])})
    assert documents(source_of(archive)) == {"train": GOOD + GOOD[:2]}


def crawl(folder: Path, files: int = 5) -> list[bytes]:
    """Files of random texts, some of them twice; all texts in order."""
    draw = random.Random(1)
    folder.mkdir(exist_ok=True)
    texts: list[bytes] = []
    for number in range(files):
        own = [
            draw.choice(texts) if texts and draw.random() < 0.3 else draw.randbytes(9).hex().encode() * k
            for k in (draw.randrange(1, 20) for _ in range(20))
        ]
        texts += own
        content = "".join(json.dumps({"text": text.decode()}) + "\n" for text in own)
        (folder / f"{number}.jsonl").write_text(content)
    return texts


def prepared(folder: Path, output: Path, workers: int = 1) -> Index:
    chosen = settings(deduplicate=True, min_bytes=30, split="80,10,10")
    source = source_of(folder, workers, **chosen)
    index = folders.prepared("jsonl", source, output, 500, 2000, **chosen)
    write_report(source, index, output / "report.json")
    return index


def test_shards_hold_the_first_of_each_text_split_by_bytes(tmp_path):
    texts = [text for text in dict.fromkeys(crawl(tmp_path / "in")) if len(text) >= 30]
    total, start = sum(map(len, texts)), 0
    want: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    for text in texts:
        want["train" if start < total * 0.8 else "validation" if start < total * 0.9 else "test"].append(text)
        start += len(text)
    index = prepared(tmp_path / "in", tmp_path / "data")
    for name, found in want.items():
        assert bytes(everything(index, name).tolist()) == b"".join(text + b"\0" for text in found)
    counts = {name: len(found) for name, found in want.items()}
    assert index.file.source["documents"] == counts and index.file.source["records"] == 100
    report = json.loads((tmp_path / "data" / "report.json").read_text())
    assert report["documents"] == len(texts) and report["records"] == 100 and report["bytes"] == total
    assert sum(report["left_out"].values()) == 100 - len(texts)
    lengths = sorted(map(len, texts))
    assert report["lengths"]["quantiles"]["0.5"] == lengths[(len(lengths) - 1) // 2]
    edges = report["lengths"]["edges"]
    classes = zip(edges[:-1], edges[1:], report["lengths"]["documents"], report["lengths"]["bytes"], strict=True)
    for low, high, count, size in classes:
        inside = [length for length in lengths if low <= length < high]
        assert (count, size) == (len(inside), sum(inside))
    assert report["splits"]["test"]["bytes"] == sum(map(len, want["test"]))


def test_any_number_of_workers_and_any_interruption_give_the_same_bytes(tmp_path):
    crawl(tmp_path / "in")
    want = files(prepared(tmp_path / "in", tmp_path / "one").directory)
    assert len(want) > 6
    assert files(prepared(tmp_path / "in", tmp_path / "two", workers=2).directory) == want

    with crashing(prepare, "_write_shard", 3):
        prepared(tmp_path / "in", tmp_path / "again")
    assert sum(name.endswith(".tar") for name in files(tmp_path / "again")) == 2
    assert files(prepared(tmp_path / "in", tmp_path / "again").directory) == want


def test_a_file_that_changes_between_its_readings_is_refused(tmp_path):
    crawl(tmp_path, files=1)
    source = source_of(tmp_path)
    place = tmp_path / "0.jsonl"
    place.write_bytes(place.read_bytes()[:-10] + b'"}\n')
    with pytest.raises(DataError, match=r"0\.jsonl: it changed while it was read"):
        documents(source)


@pytest.mark.parametrize(
    ("lines", "changed", "error", "message"),
    [
        ([b"{}"] * 3, {}, DataError, r'3 of 3 records are damaged, the first is record 1 here: no "text"'),
        ([b'{"text": ""}'], {}, DataError, r"no text is left of it \(1 empty\)"),
        ([b'{"text": "abc"}'], {"min_bytes": 5, "max_bytes": 4}, ConfigError, r"--min-bytes: 5 is above --max-bytes 4"),
        ([], {}, DataError, "no text is left of it"),
    ],
)
def test_a_source_without_texts_is_one_line(tmp_path, lines, changed, error, message):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    refusal(lambda: source_of(tmp_path / "a.jsonl", **changed), error, message)


def test_a_split_that_gets_no_document_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES))
    with pytest.raises(DataError, match="5 documents are too few to give validation any"):
        jsonl.about(source_of(tmp_path), settings(split="98,1,1"))


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_lines_of_pieces_are_those_of_the_whole(size):
    text = b"a\nbcd\n\n" + b"x" * 20 + b"\nend"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert list(lines(pieces, 19)) == [b"a", b"bcd", b"", None, b"end"]
    assert list(lines(pieces, 20)) == text.split(b"\n")
    assert list(lines([b"a\n"], 9)) == [b"a"]
