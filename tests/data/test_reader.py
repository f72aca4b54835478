import hashlib
import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megasparse.data.index import Index, Shard
from megasparse.data.reader import EvaluationStream, ShardFile, ShardReader
from megasparse.errors import DataError

Make = Callable[..., Index]
Damage = Callable[[bytes], bytes]


def test_any_range_of_a_shard_is_that_range_of_the_text(make_index: Make, corpus: bytes) -> None:
    reader = ShardReader(make_index(corpus), "train", open_files=2)
    draw = random.Random(1)
    for _ in range(300):
        shard = draw.randrange(8)
        text = corpus[shard * 1000 : (shard + 1) * 1000]
        start, stop = sorted(draw.sample(range(len(text) + 1), 2))
        assert reader.read(shard, start, stop).tolist() == list(text[start:stop])
        assert len(reader._open) <= 2
    reader.close()


def test_files_are_closed(make_index: Make, corpus: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = ShardReader(make_index(corpus), "train", open_files=3)
    for shard in range(8):
        reader.read(shard, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_evaluation_stream_is_contiguous_over_shards(make_index: Make, corpus: bytes) -> None:
    stream = EvaluationStream(make_index(corpus), "train")
    assert stream.tokens == len(corpus)
    assert bytes(stream.read(0, stream.tokens).tolist()) == corpus
    for start, stop in [(0, 0), (999, 1001), (1000, 1000), (1000, 2000), (50, 6900), (7013, 7013), (7000, 7013)]:
        assert bytes(stream.read(start, stop).tolist()) == corpus[start:stop]
    stream.close()


# Damage. The shard has 10 members of 100 bytes: a header of 512 bytes and a data block of 512 each, then zeros.
def flip(byte: int) -> Damage:
    return lambda tar: tar[:byte] + bytes([tar[byte] ^ 1]) + tar[byte + 1 :]


STRUCTURE: dict[str, Damage] = {
    "cut at a member boundary": lambda tar: tar[: 5 * 1024],
    "cut inside a header": lambda tar: tar[: 5 * 1024 + 100],
    "cut inside data": lambda tar: tar[: 5 * 1024 + 550],
    "cut inside padding": lambda tar: tar[: 5 * 1024 + 700],
    "bit flipped in a header": flip(5 * 1024 + 3),
    "bit flipped in a size": flip(5 * 1024 + 130),
    "zero-byte file": lambda tar: b"",
    "garbage": lambda tar: random.Random(0).randbytes(10_240),
    "lone zero block": lambda tar: bytes(512),
    "end mark too early": lambda tar: tar[: 5 * 1024] + bytes(1024),
    "member missing": lambda tar: tar[:1024] + tar[2048:],
    "member twice": lambda tar: tar[:1024] + tar,
}
CONTENT: dict[str, Damage] = {
    "bit flipped in the text": flip(5 * 1024 + 520),
    "members swapped": lambda tar: tar[1024:2048] + tar[:1024] + tar[2048:],
}


@pytest.mark.parametrize("damage", [*STRUCTURE, *CONTENT])
def test_D1_damage_is_an_error_that_names_the_shard(make_index: Make, corpus: bytes, damage: str) -> None:
    index = make_index(corpus)
    path = index.directory / "train-000003.tar"
    path.write_bytes({**STRUCTURE, **CONTENT}[damage](path.read_bytes()))
    with pytest.raises(DataError) as caught:
        EvaluationStream(Index.load(index.directory), "train").read(0, 7013)
    assert caught.value.path == str(path)
    with pytest.raises(DataError):
        index.verify()


def shard_of(path: Path, tar: bytes, samples: int = 10, tokens: int = 1000) -> Shard:
    """A file of these bytes, and an index entry that vouches for them: only the structure can be wrong now."""
    path.write_bytes(tar)
    digest = hashlib.sha256(tar).hexdigest()
    return Shard(file="x.tar", samples=samples, tokens=tokens, bytes=max(1, len(tar)), sha256=digest)


@pytest.mark.parametrize("damage", [name for name in STRUCTURE if name != "zero-byte file"])
def test_D1_damage_that_the_index_vouches_for_names_the_byte(make_index: Make, corpus: bytes, damage: str) -> None:
    tar = (make_index(corpus).directory / "train-000003.tar").read_bytes()
    path = Path(make_index(corpus).directory / "x.tar")
    with pytest.raises(DataError, match=r"x\.tar: .*at byte \d+"):
        ShardFile(path, shard_of(path, STRUCTURE[damage](tar)))


def test_a_shard_of_another_size_is_found_at_the_start(make_index: Make, corpus: bytes) -> None:
    index = make_index(corpus)
    os.truncate(index.directory / "train-000003.tar", 5 * 1024)
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard has 5120 bytes, index\.json says \d+"):
        Index.load(index.directory)


def test_a_missing_and_a_replaced_shard(make_index: Make, corpus: bytes) -> None:
    index = make_index(corpus)
    (index.directory / "train-000003.tar").write_bytes((index.directory / "train-000004.tar").read_bytes())
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard is damaged: its sha256"):
        ShardReader(Index.load(index.directory), "train").read(3, 0, 10)
    (index.directory / "train-000003.tar").unlink()
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard cannot be read: No such file"):
        Index.load(index.directory)
    with pytest.raises(DataError, match=r"train-000003\.tar: this shard cannot be read: No such file"):
        ShardReader(index, "train").read(3, 0, 10)


def test_D7_damage_after_the_first_read_is_found(make_index: Make, corpus: bytes) -> None:
    index = make_index(corpus)
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


def test_a_shard_is_hashed_once_in_a_process(make_index: Make, corpus: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    index = make_index(corpus)
    hashed = []
    verify = "megasparse.data.reader.verify_shard"
    monkeypatch.setattr(verify, lambda path, shard, file: hashed.append(shard.file))
    for _ in range(3):
        reader = ShardReader(index, "train", open_files=1)
        for shard in (0, 1, 0, 1):
            reader.read(shard, 0, 10)
    assert hashed == ["train-000000.tar", "train-000001.tar"]


def member(name: str, data: bytes = b"x" * 100, **header: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        for key, value in header.items():
            setattr(info, key, value)
        tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def claim(size: bytes) -> bytes:
    """A member whose header states another size, with a checksum that is right."""
    tar = bytearray(member("000000000.bin"))
    tar[124:136] = size
    tar[148:156] = b" " * 8
    tar[148:156] = b"%06o\0 " % sum(tar[:512])
    return bytes(tar)


@pytest.mark.parametrize(
    "tar",
    {
        "8 GiB": claim(b"100000000000"),
        "2**80": claim(b"\x80\0" + (2**70).to_bytes(10, "big")),
        "negative": claim(b"\xff" * 12),
        "empty": member("000000000.bin", b""),
        "absolute": member("/etc/000000000.bin"),
        "parent": member("../000000000.bin"),
        "other suffix": member("000000000.pkl"),
        "folder": member("1.bin", b"", type=tarfile.DIRTYPE),
        "long name (pax)": member("1" * 5000 + ".bin"),
        "pax header": member("1.bin", pax_headers={"GNU.sparse.major": "1"}),
        "symlink": member("1.bin", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "hard link": member("1.bin", b"", type=tarfile.LNKTYPE, linkname="2.bin"),
        "fifo": member("1.bin", b"", type=tarfile.FIFOTYPE),
        "device": member("1.bin", b"", type=tarfile.CHRTYPE),
        "sparse": member("1.bin", type=tarfile.GNUTYPE_SPARSE),
    }.items(),
    ids=lambda item: item[0],
)
def test_D2_D5_hostile_members_are_refused(tmp_path: Path, tar: tuple[str, bytes]) -> None:
    path = tmp_path / "x.tar"
    with pytest.raises(DataError, match=r"x\.tar: member 0 .*at byte 0 "):
        ShardFile(path, shard_of(path, tar[1], samples=1, tokens=100))
    assert os.listdir(tmp_path) == ["x.tar"]


def test_D10_no_mutation_crashes_or_loses_tokens(make_index: Make, corpus: bytes) -> None:
    index = make_index(corpus)
    tar = (index.directory / "train-000000.tar").read_bytes()
    draw = random.Random(0)
    refused = 0
    for _ in range(400):
        mutant = bytearray(tar)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(10 * 1024) // 1024 * 1024 + draw.randrange(600)  # mostly in headers
            mutant[place] = draw.randrange(256)
        path = index.directory / "x.tar"
        try:
            file = ShardFile(path, shard_of(path, bytes(mutant)))
            assert len(file.read(0, 1000)) == 1000
            file.close()
        except DataError:
            refused += 1
    assert refused > 200
