"""Tokens of 1, 2 and 4 bytes, compared with a reading with tarfile and numpy; and damage, which is always an error."""

import hashlib
import json
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream, ShardReader
from megasparse.errors import DataError
from tests.data.folders import (
    batches,
    denied,
    do,
    edit,
    edit_shards,
    everything,
    flip,
    read_folder,
    without_crc32,
    write_folder,
)
from tests.helpers.refusals import refusal

SIZES = (1000, 1000, 730)
THIRD = "train-000003.tar"


def tokens_of(width: int) -> list[np.ndarray]:
    """Three shards, the smallest and largest numbers of the width among them."""
    draw = np.random.Generator(np.random.PCG64(width))
    shards = [draw.integers(0, 256**width, size, dtype=np.int64) for size in SIZES]
    shards[0][:3] = shards[2][-3:] = [0, 256**width - 1, 256**width // 2]
    return shards


@pytest.fixture(params=[1, 2, 4])
def folder(request, tmp_path):
    return write_folder(tmp_path / "data", tokens_of(request.param), width=request.param)


def test_any_range_is_what_numpy_reads(folder):
    index, shards = Index.load(folder), read_folder(folder)
    reader = ShardReader(index, "train")
    draw = random.Random(0)
    for _ in range(200):
        number = draw.randrange(3)
        start, stop = sorted(draw.sample(range(SIZES[number] + 1), 2))
        assert reader.read(number, start, stop).tolist() == shards[number][start:stop].tolist()
    reader.close()
    stream = EvaluationStream(index, "train")
    whole = np.concatenate(shards)
    assert stream.tokens == sum(SIZES)
    for start, stop in [(0, 2730), (999, 1001), (990, 2010), (2729, 2730), (5, 5)]:
        assert stream.read(start, stop).tolist() == whole[start:stop].tolist()
    stream.close()


def test_training_sequences_are_windows_of_what_numpy_reads(folder):
    with batches([(Index.load(folder), 1.0)], global_batch=6, micro_batch=3) as data:
        assert (data.sequences_per_epoch, data.unused_tokens) == (33 + 33 + 24, 10 + 10 + 10)
        steps = [next(data) for _ in range(15)]
    rows = sorted(tuple(row) for step in steps for batch in step.micro_batches for row in batch.tokens.tolist())
    shards = read_folder(folder)
    assert rows == sorted(tuple(shard[i : i + 30].tolist()) for shard in shards for i in range(0, len(shard) - 29, 30))


def test_a_fingerprint_of_one_byte_is_that_of_earlier_versions_and_of_more_has_the_width(tmp_path):
    """The formula of the first release, written out."""
    fingerprints = {}
    for width in (1, 2):
        folder = write_folder(tmp_path / str(width), tokens_of(width), width=width)
        raw = json.loads((folder / "index.json").read_text())
        splits = {n: [[s["sha256"], s["tokens"], s["samples"]] for s in p["shards"]] for n, p in raw["splits"].items()}
        identity = {"format": 1, "tokenizer": raw["tokenizer"], "splits": splits}
        earlier = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        fingerprints[width] = (Index.load(folder).fingerprint, earlier)
    assert fingerprints[1][0] == fingerprints[1][1]
    assert fingerprints[2][0] != fingerprints[2][1]


@pytest.mark.parametrize(
    ("shard", "settings", "problem"),
    [
        *(({"width": width}, {}, r"splits\.train\.shards\.0\.width") for width in (0, 3, 8, -1, "2", 2.5, None)),
        *(({"width": width}, {}, "which are not samples of settings.sample_bytes = 200") for width in (1, 4)),
        ({}, {"record": 100}, r"train-000002\.tar has 730 tokens, which is not a whole number of records of 100"),
        *(({}, {"record": record}, r"settings\.record is ") for record in (0, "10", True, 10.0, {"a": "\n"})),
        *(({}, {"sample_bytes": size}, r"settings\.sample_bytes is ") for size in (None, "100", True, -1, 1.5)),
        *(({}, {"sample_bytes": size}, "not samples of settings.sample_bytes") for size in (99, 112, 10**30)),
        ({"bytes": 9 * 1024}, {}, "has 9216 bytes, too few for its 10 samples"),
        ({"file": "train-000000.bin", "start": 0}, {}, r"shards of Megatron \(\.bin\) .* are no longer read"),
        ({"start": 512}, {}, r"shards\.0\.start"),
        *(({"crc32": crc32}, {}, "crc32") for crc32 in ("0" * 79, "0" * 88, "g" * 80, "")),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tmp_path, shard, settings, problem):
    index = Index.load(write_folder(tmp_path / "data", tokens_of(2), width=2))
    edit(index, lambda content: content["settings"].update(settings))
    edit(index, lambda content: content["splits"]["train"]["shards"][0].update(shard))
    refusal(lambda: Index.load(index.directory), match=problem)


def test_the_record_is_that_of_the_settings(tmp_path):
    assert Index.load(write_folder(tmp_path / "a", tokens_of(2), width=2, record=10)).record == 10
    assert Index.load(write_folder(tmp_path / "b", tokens_of(2), width=2)).record is None


Harm = Callable[[bytes], bytes]
CONTENT: dict[str, tuple[Harm, str]] = {
    "a bit of the text": (flip(5 * 1024 + 520), "; the first damaged sample is number 5, at byte 5120"),
    "samples swapped": (lambda tar: tar[1024:2048] + tar[:1024] + tar[2048:], "sample is number 0, at byte 0"),
    "garbage": (lambda tar: random.Random(0).randbytes(len(tar)), "sample is number 0, at byte 0"),
    "a bit of a header": (flip(5 * 1024 + 3), ""),
    "a bit of the padding": (flip(5 * 1024 + 700), ""),
}
SIZE: dict[str, Harm] = {
    "cut": lambda tar: tar[: 5 * 1024 + 100],
    "empty": lambda tar: b"",
    "sample missing": lambda tar: tar[:1024] + tar[2048:],
    "sample twice": lambda tar: tar[:1024] + tar,
}


@pytest.mark.parametrize("harm", [*CONTENT, *SIZE])
def test_damage_is_one_error_that_names_the_shard(index, harm, figures):
    """Also when the file is damaged after its first read."""
    reader = ShardReader(index, "train")
    reader.read(3, 0, 10)
    path = do(CONTENT[harm][0] if harm in CONTENT else SIZE[harm], index.directory / THIRD)
    stated = "this shard is damaged: its sha256 is" if harm in CONTENT else "index.json says"
    checks: list[Callable[[], Any]] = [
        lambda: reader.read(3, 0, 10),
        lambda: EvaluationStream(index, "train").read(3000, 3010),
    ]
    if harm in SIZE:
        checks.append(lambda: Index.load(index.directory))
    for check in checks:
        with pytest.raises(DataError) as caught:
            check()
        assert caught.value.path == str(path) and stated in str(caught.value) and "\n" not in str(caught.value)
        assert CONTENT.get(harm, (None, ""))[1] in str(caught.value)
    figures(damages_done=1, damages_detected=1)


def test_damage_without_crc32_names_the_shard_alone(index):
    do(flip(5 * 1024 + 520), index.directory / THIRD)
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard is damaged: its sha256 is \S+ \S+ says [^;]*$"):
        everything(without_crc32(index))


def test_a_missing_and_a_replaced_shard(index):
    (index.directory / THIRD).write_bytes((index.directory / "train-000004.tar").read_bytes())
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard is damaged: its sha256"):
        ShardReader(Index.load(index.directory), "train").read(3, 0, 10)
    (index.directory / THIRD).unlink()
    for read in (lambda: Index.load(index.directory), lambda: ShardReader(index, "train").read(3, 0, 10)):
        with pytest.raises(DataError, match=r"train-000003\.tar: this shard cannot be read: No such file"):
            read()


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(index, kind):
    path = index.directory / THIRD
    path.unlink()
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard"):
        Index.load(index.directory)
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard cannot be read: this is not a regular file"):
        ShardReader(index, "train").read(3, 0, 10)


def test_a_read_that_fails_or_is_cut_off(index, monkeypatch):
    reader = ShardReader(index, "train")
    reader.read(3, 0, 10)
    monkeypatch.setattr(os, "preadv", lambda *arguments: 5)  # of 10 bytes
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard is damaged: sample 2 is cut off at byte 2615"):
        reader.read(3, 250, 260)

    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard cannot be read: Input/output error"):
        reader.read(3, 250, 260)


def test_a_shard_that_may_not_be_read(index, monkeypatch):
    reader = ShardReader(index, "train")
    denied(monkeypatch, THIRD)
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard cannot be read: Permission denied"):
        reader.read(3, 0, 10)


def test_a_shard_is_hashed_once_in_a_process(index, monkeypatch):
    hashed = []
    verify = "megasparse.data.reader.verify_shard"
    monkeypatch.setattr(verify, lambda path, shard, *file: hashed.append(shard.file))
    for _ in range(3):
        reader = ShardReader(index, "train", open_files=1)
        for shard in (0, 1, 0, 1):
            reader.read(shard, 0, 10)
    assert hashed == ["train-000000.tar", "train-000001.tar"]


def test_files_are_closed(index):
    before = len(os.listdir("/proc/self/fd"))
    reader = ShardReader(index, "train", open_files=3)
    for shard in range(8):
        reader.read(shard, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    os.truncate(reader.index.directory / THIRD, 5 * 1024)
    with pytest.raises(DataError):
        reader.read(3, 0, 1)
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_mutation_of_a_shard_that_the_index_vouches_for_crashes(index):
    """The structure of the tar file is not read: only positions that follow from the index are."""
    path = index.directory / "train-000000.tar"
    tar, draw = path.read_bytes(), random.Random(0)
    for _ in range(100):
        content = bytearray(tar)
        for _ in range(draw.randrange(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
        edit_shards(index, path.name, sha256=hashlib.sha256(content).hexdigest())
        assert len(ShardReader(Index.load(index.directory), "train").read(0, 0, 1000)) == 1000
