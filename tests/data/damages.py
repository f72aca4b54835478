"""Damage to do to a shard of 10 samples of 100 bytes: each a header of 512 bytes and a block of data, then zeros."""

import hashlib
import io
import json
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megasparse.data.index import Index
from megasparse.data.index_file import INDEX_FILE, Shard

Harm = Callable[[bytes], bytes]


def flip(*places: int) -> Harm:
    """A bit of each of these bytes is another."""

    def flipped(tar: bytes) -> bytes:
        content = bytearray(tar)
        for byte in places:
            content[byte] ^= 1
        return bytes(content)

    return flipped


def do(harm: str | Harm, path: Path) -> Path:
    """Do a harm, or that of a name in HARMS, to a file."""
    path.write_bytes((HARMS[harm][0] if isinstance(harm, str) else harm)(path.read_bytes()))
    return path


def member(name: str, data: bytes = b"x" * 100, form: int = tarfile.PAX_FORMAT, **header: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        for key, value in header.items():
            setattr(info, key, value)
        tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def patched(start: int, raw: bytes) -> bytes:
    """A member with these bytes in its header, and a checksum that is right."""
    tar = bytearray(member("000000000.bin"))
    tar[start : start + len(raw)] = raw
    tar[148:156] = b" " * 8
    tar[148:156] = b"%06o\0 " % sum(tar[:512])
    return bytes(tar)


# Each with the number of samples that are still there, at their place and unchanged.
STRUCTURE: dict[str, tuple[Harm, int]] = {
    "cut at a member boundary": (lambda tar: tar[: 5 * 1024], 5),
    "cut inside a header": (lambda tar: tar[: 5 * 1024 + 100], 5),
    "cut between header and data": (lambda tar: tar[: 5 * 1024 + 512], 5),
    "cut inside data": (lambda tar: tar[: 5 * 1024 + 550], 5),
    "cut inside padding": (lambda tar: tar[: 5 * 1024 + 700], 6),
    "bit flipped in a header": (flip(5 * 1024 + 3), 10),
    "bit flipped in a size": (flip(5 * 1024 + 130), 10),
    "zero-byte file": (lambda tar: b"", 0),
    "garbage": (lambda tar: random.Random(0).randbytes(10_240), 0),
    "lone zero block": (lambda tar: bytes(512), 0),
    "end mark too early": (lambda tar: tar[: 5 * 1024] + bytes(1024), 5),
    "zero-byte member": (lambda tar: tar[: 5 * 1024] + member("5.bin", b"")[:512] + tar[6 * 1024 :], 5),
    "member missing": (lambda tar: tar[:1024] + tar[2048:], 1),
    "member twice": (lambda tar: tar[:1024] + tar, 1),
}
CONTENT: dict[str, tuple[Harm, int]] = {
    "bit flipped in the text": (flip(5 * 1024 + 520), 9),
    "garbage in place of the text": (lambda tar: tar[: 5 * 1024 + 512] + b"\xff\xfe" * 50 + tar[5 * 1024 + 612 :], 9),
    "same key twice, not adjacent": (lambda tar: tar[: 8 * 1024] + tar[2 * 1024 : 3 * 1024] + tar[9 * 1024 :], 9),
    "members swapped": (lambda tar: tar[1024:2048] + tar[:1024] + tar[2048:], 8),
    "nothing but the padding": (flip(5 * 1024 + 700), 10),
}
HARMS = {**STRUCTURE, **CONTENT}

HOSTILE: dict[str, bytes] = {
    "8 GiB": patched(124, b"100000000000"),
    "2**80": patched(124, b"\x80\0" + (2**70).to_bytes(10, "big")),
    "negative": patched(124, b"\xff" * 12),
    "empty": member("000000000.bin", b""),
    "absolute": member("/etc/000000000.bin"),
    "parent": member("../000000000.bin"),
    "NUL": patched(0, b"0\0passwd.bin"),
    "pickle": member("000000000.pkl"),
    "torch": member("000000000.pth"),
    "torch, another suffix": member("000000000.pt"),
    "folder": member("1.bin", b"", type=tarfile.DIRTYPE),
    "long name (GNU)": member("1" * 5000 + ".bin", form=tarfile.GNU_FORMAT),
    "long name (pax)": member("1" * 5000 + ".bin"),
    "pax header": member("1.bin", pax_headers={"GNU.sparse.major": "1"}),
    "symlink": member("1.bin", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": member("1.bin", b"", type=tarfile.LNKTYPE, linkname="2.bin"),
    "fifo": member("1.bin", b"", type=tarfile.FIFOTYPE),
    "device": member("1.bin", b"", type=tarfile.CHRTYPE),
    "sparse": member("1.bin", type=tarfile.GNUTYPE_SPARSE),
}


def shard_of(path: Path, tar: bytes, samples: int = 10, tokens: int = 1000, crc32: str | None = None) -> Shard:
    """A file of these bytes, and an index entry that vouches for them: only the structure can be wrong now."""
    path.write_bytes(tar)
    digest = hashlib.sha256(tar).hexdigest()
    return Shard(file="x.tar", samples=samples, tokens=tokens, bytes=max(1, len(tar)), sha256=digest, crc32=crc32)


def denied(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """Let nobody open the files of this name."""
    opened = os.open

    def guarded(path: str, *arguments: int, **named: int) -> int:
        if str(path).endswith(file):
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **named)

    monkeypatch.setattr(os, "open", guarded)


def edit(index: Index, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change index.json."""
    path = index.directory / INDEX_FILE
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def edit_shards(index: Index, file: str = "", **changes: Any) -> None:
    """Change what index.json says of each shard of the split `train`, or of one file."""

    def change(content: dict[str, Any]) -> None:
        for shard in content["splits"]["train"]["shards"]:
            if not file or shard["file"] == file:
                shard.update(changes)

    edit(index, change)


def without_crc32(index: Index) -> Index:
    """The index as earlier versions wrote it."""
    edit(index, lambda content: [shard.pop("crc32") for shard in content["splits"]["train"]["shards"]])
    return Index.load(index.directory, tolerant=True)
