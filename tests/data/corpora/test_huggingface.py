"""Folders as `datasets` 5.2 and the Hub's client leave them, made here without either."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megasparse.data.corpora import huggingface
from megasparse.data.corpora.records import RecordSource
from tests.data.corpora.test_jsonl import settings
from tests.helpers.refusals import refusal

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


def source_of(place: Path, split: str | None = None) -> tuple[RecordSource, dict[str, list[str]]]:
    given = settings(split=split)
    source = huggingface.open_source([str(place)], None, Path("/nowhere/.download"), given, 1)
    found = huggingface.splits(source, given)
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
    """The Hub's cache: names that are links to what they hold."""
    folder = root / "datasets--stanfordnlp--imdb" / "snapshots" / COMMIT
    for number, (name, texts) in enumerate(TEXTS.items()):
        blob = root / "blobs" / f"{number}.parquet"
        put(blob, texts)
        link = folder / "plain_text" / f"{name}-00000-of-00001.parquet"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (folder / "README.md").write_text("---\n")
    return folder


def lines(root: Path) -> Path:
    for name, texts in TEXTS.items():
        put(root / f"{name}.jsonl", texts)
    describe(root)
    return root


@pytest.mark.parametrize("made", [saved, cached, snapshot, lines])
def test_own_splits_of_every_kind_of_folder(tmp_path, made):
    source, found = source_of(made(tmp_path))
    assert found == {name: TEXTS[name] for name in ("train", "test")}
    assert source.facts["revision"] == COMMIT
    assert source.facts["other_files"] and all("unsupervised" in name for name in source.facts["other_files"])
    assert huggingface.about(source, settings(split=None))["documents"] == {"train": 3, "test": 1}


def test_the_training_part_is_cut_where_it_is_all_or_a_split_is_given(tmp_path):
    _, cut = source_of(saved(tmp_path / "all"), "50,25,25")
    assert cut == {"train": TEXTS["train"][:2], "test": TEXTS["train"][2:]}
    put(tmp_path / "one" / "data-00000-of-00001.arrow", [f"text {i:02d}" for i in range(40)])
    source, found = source_of(tmp_path / "one")
    assert source.facts["revision"] is None
    assert {name: len(texts) for name, texts in found.items()} == {"train": 36, "validation": 2, "test": 2}


def test_the_order_is_that_of_numbers_and_split_names_count_at_word_borders(tmp_path):
    for number in (2, 10, 1):
        put(tmp_path / f"part-{number}.parquet", [f"text {number} " + "x" * 20])
    _, found = source_of(tmp_path, "100,0,0")
    assert [text[5:7].strip() for text in found["train"]] == ["1", "2", "10"]
    names = {"trainer/x.arrow": None, "valid/test_x.arrow": "test", "x-val.arrow": "validation", "dev/1.jsonl": None}
    assert {name: huggingface.split_of(name) for name in names} == {**names, "dev/1.jsonl": "validation"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"], "2 of its 3 files are here, not number 1"),
        (["a/train.parquet", "b/train.parquet"], r"files are in 2 folders \(a, b\), as of several configurations"),
        (["cache-0123.arrow"], "only intermediate results"),
        (["README.txt"], r"no files named \*\.arrow, \*\.parquet, \*\.jsonl"),
    ],
)
def test_what_is_no_whole_dataset_is_refused(tmp_path, files, message):
    for file in files:
        put(tmp_path / file, ["x"])
    refusal(lambda: source_of(tmp_path), match=message)


@pytest.mark.parametrize("info", ["[" * 100_000, "{", '{"download_checksums": 3}', "[]"])
def test_a_description_that_is_none(tmp_path, info):
    put(tmp_path / "train.parquet", ["x" * 100] * 40)
    (tmp_path / "dataset_info.json").write_text(info)
    if info.endswith(("}", "]")):
        assert source_of(tmp_path)[0].facts["revision"] is None
    else:
        refusal(lambda: source_of(tmp_path), match=r"dataset_info\.json: cannot be read")
