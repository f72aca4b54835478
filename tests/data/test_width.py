"""Tokens of 1, 2 and 4 bytes, against a reading with tarfile and numpy."""

import hashlib
import json
import os
import random

import numpy as np
import pytest

from megasparse.data.damage import Damage, DamagedSample
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream, ShardReader
from megasparse.errors import DataError
from tests.data.damages import do, edit, edit_shards, flip
from tests.data.folders import batches, read_folder, write_folder
from tests.helpers.refusals import refusal

SIZES = (1000, 1000, 730)


def tokens_of(width: int) -> list[np.ndarray]:
    """Three shards, the smallest and largest numbers of the width among them."""
    draw = np.random.Generator(np.random.PCG64(width))
    shards = [draw.integers(0, 256**width, size, dtype=np.int64) for size in SIZES]
    shards[0][:3] = shards[2][-3:] = [0, 256**width - 1, 256**width // 2]
    return shards


@pytest.fixture(params=[1, 2, 4])
def folder(request, tmp_path):
    return write_folder(tmp_path / "data", tokens_of(request.param), width=request.param)


@pytest.mark.parametrize("tolerated", [False, True])
def test_any_range_is_what_numpy_reads(folder, tolerated):
    index, shards = Index.load(folder), read_folder(folder)
    index.verify()
    reader = ShardReader(index, "train", damage=Damage(index, "train", 0.5) if tolerated else None)
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


@pytest.mark.parametrize(("made", "stated"), [(1, 2), (1, 4), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("tolerated", [False, True])
def test_a_wrong_width_in_the_index_is_found(tmp_path, made, stated, tolerated):
    folder = write_folder(tmp_path / "data", tokens_of(made), width=made)
    edit_shards(Index.load(folder), width=stated)

    def read() -> None:
        index = Index.load(folder, tolerant=tolerated)
        ShardReader(index, "train", damage=Damage(index, "train", 0.1) if tolerated else None).read(0, 0, 10)

    refusal(read, match="10 of the 28 samples" if tolerated else r"train-000000\.tar")


def test_a_shard_too_small_for_its_tokens_is_found_at_the_start(tmp_path):
    index = Index.load(write_folder(tmp_path / "data", [np.arange(20_000) % 256], sample_tokens=20_000))
    edit_shards(index, width=2)
    problem = r"train-000000\.tar: this shard has 30720 bytes, too few for 20000 tokens of 2"
    with pytest.raises(DataError, match=problem):
        Index.load(index.directory)
    assert Index.load(index.directory, tolerant=True).split("train").shards[0].data_bytes == 40_000


@pytest.mark.parametrize("width", [0, 3, 16, -1, "2", 2.5, None])
def test_a_width_that_is_none_is_refused(tmp_path, width):
    index = Index.load(write_folder(tmp_path / "data", tokens_of(2), width=2))
    edit_shards(index, width=width)
    with pytest.raises(DataError, match=r"index\.json: splits\.train\.shards\.0\.width"):
        Index.load(index.directory)


def test_a_sample_of_half_a_token_is_refused(tmp_path):
    """Two samples of 101 bytes, which the index calls 101 tokens of two."""
    index = Index.load(write_folder(tmp_path / "data", [np.arange(202) % 256], sample_tokens=101))
    edit_shards(index, tokens=101, width=2)
    edit(index, lambda content: content["splits"]["train"].update(tokens=101))
    with pytest.raises(DataError, match=r"member 0 .*at byte 0 has 101 bytes, no whole number of tokens of 2"):
        ShardReader(Index.load(index.directory), "train").read(0, 0, 10)
    tolerant = Index.load(index.directory, tolerant=True)
    with pytest.raises(DamagedSample):
        ShardReader(tolerant, "train", damage=Damage(tolerant, "train", 1.0)).read(0, 0, 10)


@pytest.mark.parametrize("width", [2, 4])
def test_one_damaged_sample_of_wide_tokens_loses_no_other(tmp_path, width):
    folder = write_folder(tmp_path / "data", tokens_of(width), width=width)
    want = read_folder(folder)
    member = 512 + -(-100 * width // 512) * 512
    path = do(flip(3 * member + 512 + 7), folder / "train-000001.tar")
    index = Index.load(folder, tolerant=True)
    damage = Damage(index, "train", 0.5)
    reader = ShardReader(index, "train", damage=damage)
    for sample in range(10):
        tokens = (1, 100 * sample, 100 * sample + 100)
        if sample == 3:
            with pytest.raises(DamagedSample):
                reader.read(*tokens)
        else:
            assert reader.read(*tokens).tolist() == want[1][tokens[1] : tokens[2]].tolist()
    for start, stop, lost in [(299, 300, False), (299, 301, True), (399, 401, True), (400, 401, False)]:
        if lost:
            with pytest.raises(DamagedSample):
                reader.read(1, start, stop)
        else:
            assert len(reader.read(1, start, stop)) == stop - start
    assert damage.summary() == {"train-000001.tar": {"its crc32 differs": 1}}
    with pytest.raises(DataError, match=rf"train-000001\.tar: .*member 3 at byte {3 * member}: its crc32 differs"):
        ShardReader(Index.load(folder), "train").read(1, 0, 10)
    os.truncate(path, 5 * member)
    with pytest.raises(DataError, match=r"train-000001\.tar: this shard has \d+ bytes, index\.json says"):
        Index.load(folder)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (100, r"train-000002\.tar has 730 tokens, no whole number of records of 100"),
        (0, r"settings\.record is 0"),
        ("10", r"settings\.record is '10'"),
        (True, r"settings\.record is True"),
        (10.0, r"settings\.record is 10\.0"),
        ({"a": "\n"}, r"settings\.record is "),
    ],
)
def test_records_must_be_a_number_of_tokens_and_fill_the_shards(tmp_path, record, problem):
    folder = write_folder(tmp_path / "data", tokens_of(2), width=2, record=record)
    refusal(lambda: Index.load(folder), match=problem)


def test_the_record_is_that_of_the_settings(tmp_path):
    assert Index.load(write_folder(tmp_path / "a", tokens_of(2), width=2, record=10)).record == 10
    assert Index.load(write_folder(tmp_path / "b", tokens_of(2), width=2)).record is None
