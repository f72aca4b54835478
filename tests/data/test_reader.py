import os
import random
from pathlib import Path

import pytest

from megasparse.data.index import Index
from megasparse.data.members import find_damage
from megasparse.data.reader import EvaluationStream, ShardFile, ShardReader
from megasparse.errors import DataError
from tests.data.damages import HARMS, HOSTILE, STRUCTURE, denied, do, shard_of, without_crc32
from tests.data.test_damage import mutate
from tests.helpers.traced import traced_peak


def test_files_are_closed(index):
    before = len(os.listdir("/proc/self/fd"))
    reader = ShardReader(index, "train", open_files=3)
    for shard in range(8):
        reader.read(shard, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    os.truncate(reader.index.directory / "train-000003.tar", 5 * 1024)
    with pytest.raises(DataError):
        reader.read(3, 0, 1)
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


# Damage is an error here; tests/data/test_damage.py is on runs that tolerate some.
FIRST = {  # what is named of each: with the index's crc32, and without
    "bit flipped in the text": ("member 5 at byte 5120: its crc32 differs", None),
    "garbage in place of the text": ("member 5 at byte 5120: its crc32 differs", None),
    "members swapped": ("members 0 to 1 at byte 0: its crc32 differs", None),
    "nothing but the padding": (None, None),
    "cut inside padding": ("members 6 to 9 at byte 6144: cut off", "member 6 at byte 6144 "),
    "cut inside data": ("members 5 to 9 at byte 5120: cut off", "member 6 at byte 6144 "),
    "cut between header and data": ("members 5 to 9 at byte 5120: cut off", "member 6 at byte 6144 "),
    "zero-byte file": ("members 0 to 9 at byte 0: cut off", "member 0 at byte 0 "),
    "garbage": ("at byte 0: its crc32 differs", "member 0 at byte 0 "),
    "lone zero block": ("members 0 to 9 at byte 0: cut off", "it ends at byte 0 after 0 samples"),
    "end mark too early": ("member 5 at byte 5120: its crc32 differs", "it ends at byte 5120 after 5 samples"),
    "member missing": ("members 1 to 9 at byte 1024: its crc32 differs", "it ends at byte 9216 after 9 samples"),
    "member twice": ("members 1 to 9 at byte 1024: its crc32 differs", "it ends at byte 11264 after 11 samples"),
    "same key twice, not adjacent": ("member 8 at byte 8192: its crc32 differs", None),
}
ELSEWHERE = ("at byte 5120", "at byte 5120")


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("crc32", [True, False], ids=["crc32", "no crc32"])
def test_damage_is_an_error_that_names_shard_member_and_byte(make_index, corpus, harm, crc32, figures):
    index = make_index(corpus) if crc32 else without_crc32(make_index(corpus))
    path = do(harm, index.directory / "train-000003.tar")
    with pytest.raises(DataError) as caught:
        EvaluationStream(Index.load(index.directory), "train").read(0, 7013)
    assert caught.value.path == str(path)
    named = FIRST.get(harm, ELSEWHERE)[0 if crc32 else 1]
    assert named in str(caught.value) if named else "at byte" not in str(caught.value)
    with pytest.raises(DataError) as verified:
        index.verify()
    assert str(verified.value) == str(caught.value)
    figures(damages_done=1, damages_detected=1)


@pytest.mark.parametrize("harm", [name for name in STRUCTURE if name != "zero-byte file"])
def test_damage_that_the_index_vouches_for_names_the_byte(make_index, corpus, harm):
    tar = (make_index(corpus).directory / "train-000003.tar").read_bytes()
    path = Path(make_index(corpus).directory / "x.tar")
    with pytest.raises(DataError, match=r"x\.tar: .*at byte \d+"):
        ShardFile(path, shard_of(path, STRUCTURE[harm][0](tar)), None)


def test_a_shard_of_another_size_is_found_at_the_start(index):
    os.truncate(index.directory / "train-000003.tar", 5 * 1024)
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard has 5120 bytes, index\.json says \d+"):
        Index.load(index.directory)


def test_a_missing_and_a_replaced_shard(index):
    (index.directory / "train-000003.tar").write_bytes((index.directory / "train-000004.tar").read_bytes())
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard is damaged: its sha256"):
        ShardReader(Index.load(index.directory), "train").read(3, 0, 10)
    (index.directory / "train-000003.tar").unlink()
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard cannot be read: No such file"):
        Index.load(index.directory)
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard cannot be read: No such file"):
        ShardReader(index, "train").read(3, 0, 10)


def test_damage_after_the_first_read_is_found(index):
    reader = ShardReader(index, "train")
    reader.read(0, 0, 10)
    with (index.directory / "train-000000.tar").open("r+b") as file:
        file.seek(600)
        file.write(b"?")
    with pytest.raises(DataError, match=r"train-000000\.tar"):
        reader.read(0, 0, 10)
    reader.read(1, 0, 10)
    os.truncate(index.directory / "train-000001.tar", 2048)
    with pytest.raises(DataError, match=r"train-000001\.tar"):
        reader.read(1, 500, 510)


def test_a_shard_is_hashed_once_in_a_process(index, monkeypatch):
    hashed = []
    verify = "megasparse.data.reader.verify_shard"
    monkeypatch.setattr(verify, lambda path, shard, *file: hashed.append(shard.file))
    for _ in range(3):
        reader = ShardReader(index, "train", open_files=1)
        for shard in (0, 1, 0, 1):
            reader.read(shard, 0, 10)
    assert hashed == ["train-000000.tar", "train-000001.tar"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_members_are_refused(tmp_path, name):
    path = tmp_path / "x.tar"
    with pytest.raises(DataError, match=r"x\.tar: member 0 .*at byte 0 "):
        ShardFile(path, shard_of(path, HOSTILE[name], samples=1, tokens=100), None)
    assert os.listdir(tmp_path) == ["x.tar"]


@pytest.mark.parametrize("name", ["8 GiB", "2**80"])
def test_a_claimed_size_is_never_allocated(tmp_path, name):
    path = tmp_path / "x.tar"
    shard = shard_of(path, HOSTILE[name], samples=1, tokens=8 << 30, crc32="00000000")

    def read():
        for sample_bytes in (None, 65_536, 8 << 30):
            with pytest.raises(DataError, match=r"x\.tar: .*member 0 .*at byte 0 "):
                ShardFile(path, shard, sample_bytes)

    assert traced_peak(read) < 5e6


def test_a_vast_sample_that_is_there_is_checked_a_piece_at_a_time(index):
    """The index and the file agree on 256 MiB (a hole): its crc32 is computed in a bounded memory."""
    path = index.directory / "x.tar"
    shard = shard_of(path, bytes(512), samples=1, tokens=1 << 28, crc32="00000000")
    os.truncate(path, 1 << 29)
    shard = shard.model_copy(update={"bytes": 1 << 29})
    descriptor = os.open(path, os.O_RDONLY)

    def check():
        assert [run.reason for run in find_damage(descriptor, shard, 1 << 28)] == ["its crc32 differs"]

    assert traced_peak(check) < 5e6
    os.close(descriptor)


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(index, kind):
    path = index.directory / "train-000003.tar"
    path.unlink()
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard"):
        Index.load(index.directory)
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard cannot be read: this is not a regular file"):
        ShardReader(index, "train").read(3, 0, 10)


def test_a_read_that_fails_is_an_error_that_names_the_sample(index, monkeypatch):
    reader = ShardReader(index, "train")
    reader.read(3, 0, 10)

    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DataError, match=r"train-000003\.tar: .*member 2 at byte 2048: cannot be read: Input/output"):
        reader.read(3, 250, 260)


def test_a_shard_that_may_not_be_read(index, monkeypatch):
    reader = ShardReader(index, "train")
    denied(monkeypatch, "train-000003.tar")
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard cannot be read: Permission denied"):
        reader.read(3, 0, 10)


def test_no_mutation_crashes_or_loses_tokens(index):
    tar = (index.directory / "train-000000.tar").read_bytes()
    draw = random.Random(0)
    refused = 0
    for _ in range(400):
        path = index.directory / "x.tar"
        try:
            file = ShardFile(path, shard_of(path, mutate(tar, draw)), None)
            assert len(file.read(0, 1000)) == 1000
            file.close()
        except DataError:
            refused += 1
    assert refused > 200
