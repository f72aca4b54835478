"""Megatron's and MosaicML's files, written here by the formats' definitions with nothing but struct and numpy."""

import argparse
import json
import os
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megasparse.cli.prepare_data import IN_PLACE
from megasparse.data.corpora import megatron as megatron_module
from megasparse.data.index import Index
from megasparse.data.sequences import Sequences
from megasparse.errors import ConfigError, DataError
from tests.data.damages import do, flip
from tests.data.folders import everything
from tests.helpers.refusals import refusal

CODES = {1: np.uint8, 4: np.int32, 5: np.int64, 8: np.uint16}


def write(corpus: str, **given: Any) -> Index:
    defaults = {"tokenizer": "bytes", "split": "60,20,20", "width": 8}
    return Index.load(IN_PLACE[corpus].write(argparse.Namespace(**{**defaults, **given}), "a test"))


def texts(count: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, draw.integers(1, 90)) for _ in range(count)]


def put_megatron(prefix: Path, documents: list[list[np.ndarray]], code: int = 8) -> None:
    """documents: the sequences of each."""
    sequences = [sequence for document in documents for sequence in document]
    kind = np.dtype(CODES[code]).newbyteorder("<")
    raw = b"".join(sequence.astype(kind).tobytes() for sequence in sequences)
    prefix.with_suffix(".bin").write_bytes(raw)
    lengths = [len(sequence) for sequence in sequences]
    starts = np.cumsum([0, *lengths])[:-1] * kind.itemsize
    borders = np.cumsum([0, *(len(document) for document in documents)])
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(borders))
    body = struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(borders)}q", *lengths, *starts.tolist(), *borders.tolist())
    prefix.with_suffix(".idx").write_bytes(head + body)


@pytest.mark.parametrize("code", CODES)
def test_megatron_is_read_where_it_is_and_split_at_documents(tmp_path, monkeypatch, code):
    monkeypatch.setattr(megatron_module, "SAMPLE_BYTES", 128)
    first, second = texts(40), texts(9, 1)
    put_megatron(tmp_path / "a", [first[i : i + 2] for i in range(0, 40, 2)], code)
    put_megatron(tmp_path / "b", [[text] for text in second], code)
    index = write("megatron", source=[str(tmp_path / "a"), str(tmp_path / "b.bin")], output=tmp_path / "data")
    documents = [[*one, *other] for one, other in zip(first[::2], first[1::2], strict=True)] + [list(t) for t in second]
    total, start = sum(map(len, documents)), 0
    want: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for document in documents:
        want["train" if start < total * 0.6 else "validation" if start < total * 0.8 else "test"] += map(int, document)
        start += len(document)
    assert {name: everything(index, name).tolist() for name in want} == want
    assert index.file.source["documents"] == 29
    links = sorted(path.name for path in (tmp_path / "data").iterdir() if path.is_symlink())
    assert len(links) == sum(len(split.shards) for split in index.file.splits.values()) and "train-000000.bin" in links
    order = Sequences(index, "train", sequence_length=7, seed=0, shuffle_shards=1, open_files=2)
    with closing(order):
        window = order.read(3)[0].tolist()
    assert any(want["train"][i : i + 7] == window for i in range(0, len(want["train"]), 7))


def test_damage_of_a_megatron_file_is_found_and_only_its_sample_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_module, "SAMPLE_BYTES", 100)
    put_megatron(tmp_path / "a", [[np.arange(256)] for _ in range(8)], 8)
    index = write("megatron", source=[str(tmp_path / "a")], output=tmp_path / "data", split="50,50,0")
    do(flip(2048 + 250), tmp_path / "a.bin")
    assert len(everything(index)) == 1024
    with pytest.raises(DataError, match=r"validation-000000\.bin: .*damaged.*member 2 at byte 2248: its crc"):
        everything(index, "validation")
    settings: dict[str, Any] = {"sequence_length": 50, "seed": 0, "shuffle_shards": 1, "open_files": 2}
    with closing(Sequences(index, "validation", max_damaged=0.2, **settings)) as found:
        read = [found.read(i) for i in range(20)]
    assert sum(replaced for _, replaced in read) == 1 and found.damage.samples == 1
    assert all(torch.equal(window, torch.arange(int(window[0]), int(window[0]) + 50) % 256) for window, _ in read)
    do(lambda raw: raw[:-1], tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"validation-000000\.bin: this shard has 2047 bytes, index.json says 2048"):
        Index.load(tmp_path / "data")


WRONG = {  # what stands at which byte of an index
    "magic": (0, b"X"),
    "version": (9, b"\2"),
    "dtype": (17, b"\7"),
    "sequences": (18, b"\xff"),
    "length": (34, b"\x07"),
    "start": (34 + 4 * 4 + 8, b"\1"),
    "border": (34 + 12 * 4 + 8, b"\x09"),
    "negative": (34, b"\xff\xff\xff\xff"),
    "bomb": (18, struct.pack("<QQ", 1 << 62, 1 << 61)),
}


@pytest.mark.parametrize("how", [*WRONG, "cut", "nothing"])
def test_an_index_that_does_not_fit_is_one_line_and_nothing_is_left(tmp_path, how):
    put_megatron(tmp_path / "a", [[np.arange(5)]] * 4)
    path = tmp_path / "a.idx"
    if how in WRONG:
        place, value = WRONG[how]
        do(lambda raw: raw[:place] + value + raw[place + len(value) :], path)
    else:
        os.truncate(path, path.stat().st_size - 1 if how == "cut" else 0)
    given = {"source": [str(tmp_path / "a")], "output": tmp_path / "data", "split": "100,0,0"}
    refusal(lambda: write("megatron", **given), match=r"a\.idx: ")
    assert not (tmp_path / "data").exists()


def test_tokens_that_the_tokenizer_has_not_are_named(tmp_path):
    put_megatron(tmp_path / "a", [[np.array([3, 255, 300])]])
    with pytest.raises(DataError, match=r"a\.bin: member 0 at byte 0 has the token 300, the tokenizer's are below"):
        write("megatron", source=[str(tmp_path / "a")], output=tmp_path / "data", split="100,0,0")
    assert not (tmp_path / "data").exists()
    with pytest.raises(ConfigError, match="98,1,1 gives validation no document"):
        write("megatron", source=[str(tmp_path / "a")], output=tmp_path / "data", split="98,1,1")


def put_mds(folder: Path, shards: list[list[np.ndarray]], encoding: str, extra: bool = False) -> None:
    """Shards with the column `tokens`; extra: between an id and a text."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(encoding.split(":")[1] if ":" in encoding else "uint16" if encoding == "ndarray" else "int64")
    fixed = int(encoding.split(":")[2]) * dtype.itemsize if encoding.count(":") == 2 else None
    names, encodings, sizes = ["tokens"], [encoding], [fixed]
    if extra:
        names, encodings, sizes = ["id", *names, "url"], ["uint32", *encodings, "str"], [4, *sizes, None]
    listed = []
    for number, samples in enumerate(shards):
        encoded = []
        for place, sample in enumerate(samples):
            column = sample.astype(dtype).tobytes()
            if encoding != "bytes" and fixed is None:
                column = bytes([1 << 2 | 1]) + struct.pack("<H", len(sample)) + column
            if encoding == "ndarray":
                column = b"\x10" + column
            columns = [struct.pack("<I", place), column, b"http://x" * place] if extra else [column]
            head = [len(value) for value, size in zip(columns, sizes, strict=True) if size is None]
            encoded.append(struct.pack(f"<{len(head)}I", *head) + b"".join(columns))
        about = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": 1 << 26}
        about |= {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}
        description = json.dumps(about, sort_keys=True).encode()
        offsets = np.cumsum([4 * (len(samples) + 2) + len(description), *map(len, encoded)]).astype("<u4")
        raw = struct.pack("<I", len(samples)) + offsets.tobytes() + description + b"".join(encoded)
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(raw)
        raw_data = {"basename": name, "bytes": len(raw), "hashes": {}}
        listed.append({**about, "samples": len(samples), "zip_data": None, "raw_data": raw_data})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))


ENCODINGS = ["bytes", "ndarray", "ndarray:uint8", "ndarray:int32", "ndarray:int32:30", "ndarray:int64:30"]


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_mds_is_read_where_it_is(tmp_path, encoding, extra):
    samples = [text[:30] if encoding[-3:] != ":30" else np.resize(text, 30) for text in texts(25)]
    put_mds(tmp_path / "in" / "train", [samples[:10], samples[10:20]], encoding, extra)
    put_mds(tmp_path / "in" / "val", [samples[20:]], encoding, extra)
    index = write("mds", source=tmp_path / "in", output=tmp_path / "data")
    assert everything(index).tolist() == np.concatenate(samples[:20]).tolist()
    assert everything(index, "validation").tolist() == np.concatenate(samples[20:]).tolist()
    assert (tmp_path / "data" / "train-000001.mds").is_symlink()
    do(flip(-3), tmp_path / "in" / "train" / "shard.00001.mds")
    with pytest.raises(DataError, match=r"train-000001\.mds: this shard is damaged: its sha256"):
        everything(index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], r"shard\.00000\.mds: it has \d+ bytes, its index says"),
        (lambda raw: b"\xff\xff\xff\xff" + raw[4:], "samples do not fit its"),
        (lambda raw: raw[:8] + b"\0\0\0\0" + raw[12:], "samples do not follow each other"),
        (lambda raw: raw.replace(b'"mds"', b'"xxx"'), "its description is none: format"),
        (lambda raw: raw.replace(b'"tokens"', b"[[[[[[[["), "its description is no JSON"),
        (lambda raw: raw.replace(b"int32", b"float"), r"no column of tokens among tokens \(ndarray:float"),
        (lambda raw: raw[:-124] + b"\xff" + raw[-123:], "sample 1 at byte"),
    ],
)
def test_an_mds_shard_that_is_none_is_one_line(tmp_path, change, message):
    put_mds(tmp_path / "in", [[np.arange(30), np.arange(30)]], "ndarray:int32")
    do(change, tmp_path / "in" / "shard.00000.mds")
    refusal(lambda: write("mds", source=tmp_path / "in", output=tmp_path / "data"), match=message)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([{"format": "mds", "samples": 1, "raw_data": {"basename": "../x", "bytes": 1}}], "shards.0.raw_data.basename"),
        ([{"format": "mds", "samples": 1, "raw_data": {"basename": "x.mds", "bytes": 1}}], r"x\.mds\.zst: it is compr"),
        ([], "there is no shard in it"),
    ],
)
def test_mosaics_index_is_not_believed(tmp_path, shards, message):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.mds.zst").write_bytes(b"x")
    (tmp_path / "in" / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    with pytest.raises(DataError, match=message):
        write("mds", source=tmp_path / "in", output=tmp_path / "data")
