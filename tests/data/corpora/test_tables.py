"""JSON lines, Parquet and Arrow files, and datasets as `datasets` 5.2 and the Hub's client leave them."""

import gzip
import io
import json
import os
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megasparse.data import prepare
from megasparse.data.corpora import CORPORA, records
from megasparse.data.corpora import source as source_module
from megasparse.data.corpora.records import RecordSource, write_report
from megasparse.data.corpora.source import Part
from megasparse.data.corpora.tables import _arrow_values, parquet_texts, split_of
from megasparse.data.index import Index
from megasparse.errors import ConfigError, DataError, SourceError
from tests.data import folders
from tests.data.folders import crashing, everything, files
from tests.helpers.cases import together
from tests.helpers.commands import refusal

JSON_LINES = [
    *(b'{"text": "first"}', b'{"text": "s\\u00e9cond"}', b"", b"  ", b'{"text": null}', b'{"text": "   "}'),
    *(b'{"id": 1}', b'{"text": 3}', b"[1]", b"{", b'{"text": "\\ud800"}', b'{"text": "\xff"}', b"[" * 5000),
    *(b'{"text": "nul\\u0000"}', b'{"text": "first"}', b'{"text": "a longer one"}', b'{"text": "x", "text": "last"}'),
]
REASONS = {"empty": 2, 'no "text"': 1, '"text" is no text': 1, "no JSON object": 1, "not JSON": 3}
REASONS |= {"half a surrogate pair": 1, "byte 0, which stands between documents": 1}
GOOD = [b"first", "sécond".encode(), b"first", b"a longer one", b"last"]


def settings(**changed: Any) -> dict[str, Any]:
    given = {"column": "text", "tokenizer": "bytes", "split": "100,0,0", "deduplicate": False}
    return {**given, "min_bytes": None, "max_bytes": None, **changed}


def json_source(place: Path, workers: int = 1, **changed: Any) -> RecordSource:
    return CORPORA["jsonl"].open([str(place)], None, Path("/nowhere/.download"), settings(**changed), workers)


def documents(source: RecordSource, **changed: Any) -> dict[str, list[bytes]]:
    return {
        name: [b"".join(document) for document in found]
        for name, found in CORPORA["jsonl"].splits(source, settings(**changed))
    }


@pytest.fixture(autouse=True)
def lenient(monkeypatch):
    monkeypatch.setattr(records, "MOST_DAMAGED", 0.8)


def test_malformed_lines_are_skipped_and_counted_by_reason(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(JSON_LINES))
    source = json_source(tmp_path / "a.jsonl")
    assert documents(source) == {"train": GOOD}
    assert source.left_out() == REASONS
    assert source.total_bytes == len(b"".join(GOOD))


@together(
    ("changed", "want", "why"),
    [
        ({"min_bytes": 6}, [GOOD[1], GOOD[3]], {"shorter than 6 bytes": 3}),
        ({"max_bytes": 5}, [GOOD[0], GOOD[2], GOOD[4]], {"longer than 5 bytes": 2}),
        ({"deduplicate": True}, [GOOD[0], GOOD[1], *GOOD[3:]], {"copy of an earlier one": 1}),
        ({"deduplicate": True, "max_bytes": 5}, [b"first", b"last"], {"copy of an earlier one": 1}),
        ({"column": "id"}, [], {}),
    ],
)
def test_selected_splits_and_columns(tmp_path, changed, want, why):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(JSON_LINES))
    if not want:
        with pytest.raises(DataError, match=r'record 1 here: no "id"\. Up to 80% are left out: check the source and'):
            json_source(tmp_path / "a.jsonl", **changed)
        return
    source = json_source(tmp_path / "a.jsonl", **changed)
    assert documents(source) == {"train": want}
    assert why.items() <= source.left_out().items()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda content: gzip.compress(content[:50]) + gzip.compress(content[50:]),
    ".zst": lambda raw: b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (raw[:50], raw[50:])),
}


@together("suffix", PACKED)
def test_compressed_files_are_read_and_truncated_ones_rejected(tmp_path, suffix):
    content = b"\n".join(JSON_LINES)
    file = tmp_path / "in" / f"a.jsonl{suffix}"
    file.parent.mkdir()
    file.write_bytes(PACKED[suffix](content))
    (file.parent / "readme.txt").write_text("not taken from a folder")
    assert documents(json_source(file.parent)) == {"train": GOOD}
    if suffix:
        file.write_bytes(PACKED[suffix](content)[:-9])
        refusal(lambda: json_source(file), match=r"a\.jsonl.*: cannot be read")


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
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in own))
    return texts


def prepared(folder: Path, output: Path, workers: int = 1) -> Index:
    chosen = settings(deduplicate=True, min_bytes=30, split="80,10,10")
    source = json_source(folder, workers, **chosen)
    index = folders.prepared("jsonl", source, output, 500, 2000, **chosen)
    write_report(source, index.file.splits, output / "report.json")
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


@pytest.mark.slow
def test_any_number_of_workers_and_any_interruption_give_the_same_bytes(tmp_path):
    crawl(tmp_path / "in")
    want = files(prepared(tmp_path / "in", tmp_path / "one").directory)
    assert len(want) > 6
    assert files(prepared(tmp_path / "in", tmp_path / "two", workers=2).directory) == want

    with crashing(prepare, "_write_shard", 3):
        prepared(tmp_path / "in", tmp_path / "again")
    assert sum(name.endswith(".tar") for name in files(tmp_path / "again")) == 2
    assert files(prepared(tmp_path / "in", tmp_path / "again").directory) == want


def test_a_file_that_changes_between_its_readings_is_rejected(tmp_path):
    crawl(tmp_path, files=1)
    source = json_source(tmp_path)
    place = tmp_path / "0.jsonl"
    place.write_bytes(place.read_bytes()[:-10] + b'"}\n')
    refusal(lambda: documents(source), SourceError, r"0\.jsonl: it changed while it was read")


@together(
    ("lines", "changed", "error", "message"),
    [
        ([b"{}"] * 3, {}, DataError, r'3 of 3 records are damaged, the first is record 1 here: no "text"'),
        ([b'{"text": ""}'], {}, DataError, r"no text is left of it \(1 empty\)"),
        ([b'{"text": "abc"}'], {"min_bytes": 5, "max_bytes": 4}, ConfigError, r"--min-bytes: 5 is above --max-bytes 4"),
    ],
)
def test_a_source_without_texts_is_one_line(tmp_path, lines, changed, error, message):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    refusal(lambda: json_source(tmp_path / "a.jsonl", **changed), error, message)


VALUES = ["first", None, "sécond", "", "x" * 3000, "first"]
KEPT = ["first", "sécond", "x" * 3000, "first"]
TYPES = {
    "string": pa.string(),
    "large": pa.large_string(),
    "view": pa.string_view(),
    "bytes": pa.binary(),
    "dictionary": pa.dictionary(pa.int8(), pa.string()),
}


def read_parquet(place: Path, **changed: Any) -> list[bytes]:
    given = settings(**changed)
    source = CORPORA["parquet"].open([str(place)], None, Path("/nowhere/.download"), given, 1)
    return [b"".join(document) for _, found in CORPORA["parquet"].splits(source, given) for document in found]


@together("kind", TYPES)
@together("packed", ["none", "snappy", "zstd"])
def test_texts_of_every_type_and_compression(tmp_path, kind, packed):
    table = pa.table({"id": range(len(VALUES)), "text": pa.array(VALUES, pa.string()).cast(TYPES[kind])})
    pq.write_table(table, tmp_path / "a.parquet", compression=packed, row_group_size=4)
    pq.write_table(table.slice(2, 1), tmp_path / "b.parquet")
    (tmp_path / "README.md").write_text("not taken")
    assert read_parquet(tmp_path) == [text.encode() for text in [*KEPT, "sécond"]]


@pytest.mark.parametrize("kind", TYPES)
@together(("form", "packed"), [("stream", None), ("file", None), ("stream", "lz4"), ("file", "zstd")])
def test_arrow_files_of_both_formats(tmp_path, kind, form, packed):
    table = pa.table({"text": pa.array(VALUES, pa.string()).cast(TYPES[kind]), "id": range(len(VALUES))})
    opened = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with opened(str(tmp_path / "a.arrow"), table.schema, options=pa.ipc.IpcWriteOptions(compression=packed)) as writer:
        writer.write_table(table, max_chunksize=4)
    want = [None if text is None else text.encode() for text in VALUES]
    assert list(_arrow_values(tmp_path / "a.arrow", "text")) == want


def test_arrow_metadata_of_gigabytes_are_not_read(tmp_path):
    (tmp_path / "a.arrow").write_bytes(struct.pack("<II", 0xFFFFFFFF, 3 << 30))
    os.truncate(tmp_path / "a.arrow", 4 << 30)
    refusal(lambda: next(_arrow_values(tmp_path / "a.arrow", "text")), match=r"a\.arrow: .* negative metadata length")


def test_one_prompt_in_all_rows_is_read_up_to_the_limit_of_a_bomb(tmp_path, monkeypatch):
    prompt = "the same prompt " * 1000
    pq.write_table(pyarrow.table({"text": [prompt] * 300}), tmp_path / "a.parquet")
    packed = (tmp_path / "a.parquet").stat().st_size
    assert read_parquet(tmp_path) == [prompt.encode()] * 300 and 300 * len(prompt) > source_module.BOMB_RATIO * packed
    monkeypatch.setattr(source_module, "BOMB_BYTES", 299 * len(prompt))
    refusal(lambda: read_parquet(tmp_path), match=r"a\.parquet.*Parquet and Arrow files to \.jsonl")


@together(
    ("column", "message"),
    [
        ("txt", r'--column: .*a\.parquet has no column "txt"\. Did you mean "text"\?'),
        ("id", r'--column: "id" of .*a\.parquet holds int64, not text\. Texts are in: text'),
        ("twice", r'a\.parquet has 2 columns "twice"'),
    ],
)
def test_a_wrong_column_is_named(tmp_path, column, message):
    table = pa.table([pa.array(VALUES), *[pa.array(range(len(VALUES)))] * 3], names=["text", "id", "twice", "twice"])
    pq.write_table(table, tmp_path / "a.parquet")
    refusal(lambda: read_parquet(tmp_path, column=column), ConfigError, message)


def torn() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["some text"] * 100}), file)
    return file.getvalue()[:-20]


@together("content", [b"", b"PAR1", b"PAR1" + bytes(40) + b"PAR1", b"x" * 1000, torn()])
def test_invalid_parquet_is_one_line(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    refusal(lambda: read_parquet(tmp_path), match=r"a\.parquet: cannot be read: .*Check that it is complete")


def test_without_pyarrow_the_command_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refusal(lambda: read_parquet(tmp_path), match=r"pyarrow: it is not installed.*pip install -e '\.\[arrow\]'")


COMMIT = "e6281661ce1c48d982bc483cf8a173c1bbeb5d31"
TEXTS = {"train": ["a" * 40, "b" * 30, "c" * 20], "test": ["d"], "unsupervised": ["e"]}


def put(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": texts, "label": [0] * len(texts)})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def describe(folder: Path) -> None:
    url = f"hf://datasets/stanfordnlp/imdb@{COMMIT}/plain_text/train-00000-of-00001.parquet"
    info = {"download_checksums": {url: {"num_bytes": 1, "checksum": None}}, "splits": {}}
    (folder / "dataset_info.json").write_text(json.dumps(info))


def dataset_source(place: Path, split: str | None = None) -> tuple[RecordSource, dict[str, list[str]]]:
    given = settings(split=split)
    source = CORPORA["huggingface"].open([str(place)], None, Path("/nowhere/.download"), given, 1)
    found = CORPORA["huggingface"].splits(source, given)
    return source, {name: [b"".join(text).decode() for text in texts] for name, texts in found}


def saved(root: Path) -> Path:
    """DatasetDict.save_to_disk"""
    for name, texts in TEXTS.items():
        put(root / name / "data-00000-of-00002.arrow", texts[:2])
        put(root / name / "data-00001-of-00002.arrow", texts[2:])
        (root / name / "state.json").write_text("{}")
        describe(root / name)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": [*TEXTS]}))
    return root


def cached(root: Path) -> Path:
    """The cache of load_dataset, with the result of a map."""
    folder = root / "stanfordnlp___imdb" / "plain_text" / "0.0.0" / COMMIT
    for name, texts in TEXTS.items():
        put(folder / f"imdb-{name}.arrow", texts)
    put(folder / "cache-0123456789abcdef.arrow", ["mapped"])
    return folder


def snapshot(root: Path) -> Path:
    """The Hub's cache: names are links to blobs."""
    folder = root / "datasets--stanfordnlp--imdb" / "snapshots" / COMMIT
    for number, (name, texts) in enumerate(TEXTS.items()):
        blob = root / "blobs" / f"{number}.parquet"
        put(blob, texts)
        link = folder / "plain_text" / f"{name}-00000-of-00001.parquet"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (folder / "README.md").write_text("---\n")
    return folder


@pytest.mark.parametrize("made", [saved, cached, snapshot])
def test_own_splits_of_every_kind_of_folder(tmp_path, made):
    source, found = dataset_source(made(tmp_path))
    assert found == {name: TEXTS[name] for name in ("train", "test")}
    assert source.facts["revision"] == COMMIT
    assert source.facts["other_files"] and all("unsupervised" in name for name in source.facts["other_files"])
    assert CORPORA["huggingface"].about(source, settings(split=None))["documents"] == {"train": 3, "test": 1}


def test_held_out_splits_are_cut_from_training_data_if_missing_or_requested(tmp_path):
    _, cut = dataset_source(saved(tmp_path / "all"), "50,25,25")
    assert cut == {"train": TEXTS["train"][:2], "test": TEXTS["train"][2:]}
    put(tmp_path / "one" / "data-00000-of-00001.arrow", [f"text {i:02d}" for i in range(40)])
    source, found = dataset_source(tmp_path / "one")
    assert source.facts["revision"] is None
    assert {name: len(texts) for name, texts in found.items()} == {"train": 36, "validation": 2, "test": 2}


def test_files_are_ordered_by_number_and_split_names_are_whole_words(tmp_path):
    for number in (2, 10, 1):
        put(tmp_path / f"part-{number}.parquet", [f"text {number} " + "x" * 20])
    _, found = dataset_source(tmp_path, "100,0,0")
    assert [text[5:7].strip() for text in found["train"]] == ["1", "2", "10"]
    names = {"trainer/x.arrow": None, "valid/test_x.arrow": "test", "x-val.arrow": "validation", "dev/1.jsonl": None}
    assert {name: split_of(name) for name in names} == {**names, "dev/1.jsonl": "validation"}


@together(
    ("files", "message"),
    [
        (["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"], "2 of its 3 files are here, not number 1"),
        (["a/train.parquet", "b/train.parquet"], r"files of several configurations, in 2 folders \(a, b\)"),
        (["cache-0123.arrow"], "only intermediate results"),
        (["README.txt"], r"no files named \*\.arrow, \*\.parquet, \*\.jsonl"),
    ],
)
def test_incomplete_datasets_are_rejected(tmp_path, files, message):
    for file in files:
        put(tmp_path / file, ["x"])
    refusal(lambda: dataset_source(tmp_path), match=message)


@together("info", ["[" * 100_000, "{", '{"download_checksums": 3}'])
def test_an_invalid_description(tmp_path, info):
    put(tmp_path / "train.parquet", ["x" * 100] * 40)
    (tmp_path / "dataset_info.json").write_text(info)
    if info.endswith(("}", "]")):
        assert dataset_source(tmp_path)[0].facts["revision"] is None
    else:
        refusal(lambda: dataset_source(tmp_path), match=r"dataset_info\.json: cannot be read")


def test_parquet_without_rows_has_no_texts(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert not list(parquet_texts(Part(tmp_path / "a.parquet", None, "a.parquet", True), "text"))
