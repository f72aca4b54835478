"""A run's folder of checkpoints: the names in it, the manifest of each, and the identity of the run.

A manifest may be damaged or forged: it is believed only where its own digest and all its parts are right.
"""

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megasparse.config.schema import RunSettings
from megasparse.errors import CheckpointError
from megasparse.files import open_file, read_file

FORMAT = 1
MANIFEST = "manifest.json"
NO_DATA = "none"
"""Fingerprint of the data in a checkpoint whose weights were not trained here: any data may follow."""
LARGEST_MANIFEST = 1 << 28
"""Bytes of any manifest: some 200 a piece of a tensor make room for a million pieces."""
LEAST_ROOM, ROOM_PER_HEADER = 1 << 20, 8
"""Bytes that a manifest may have for all but the pieces, and for each byte of the headers of its files: every piece
stands in one of those too, in a third of the room.
"""
RESTORE = "Restore it from a copy, or resume from an older checkpoint with --resume PATH"

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _File(_Part):
    bytes: _Count
    sha256: str


class _Piece(_Part):
    file: str
    key: str
    start: _Count
    numel: _Count


class _Tensor(_Part):
    shape: list[_Count]
    pieces: list[_Piece]


class _LossGuard(_Part):
    losses: list[float] = []
    skipped_in_a_row: _Count = 0
    spikes: _Count = 0


class _Selection(_Part):
    metric: str
    step: _Count | None
    value: float | None
    scalars: dict[str, float]
    without_better: _Count


class _State(_Part):
    loss_guard: _LossGuard = _LossGuard()
    selection: _Selection | None = None


class _Manifest(_Part):
    """Fields that the code relies on; the configuration is checked when it is used."""

    step: _Count
    sequences: _Count
    optimizer_steps: _Count
    state: _State = _State()
    """Absent where an older version wrote it."""
    config: dict[str, Any]
    data_fingerprint: str
    tokenizer: dict[str, str]
    files: dict[str, _File]
    tensors: dict[str, dict[str, _Tensor]]


def seal(manifest: dict[str, Any]) -> str:
    """The manifest as the text of its file, with a digest of its own contents."""
    return json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1, sort_keys=True) + "\n"


def _digest(manifest: dict[str, Any]) -> str:
    manifest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in the folder `path`.

    Raises CheckpointError where there is none, where it has changed since it was written, or where it says what no
    checkpoint of ours does.
    """
    file = path / MANIFEST
    if path.is_symlink():
        raise CheckpointError(path, "is a symbolic link, as no checkpoint of ours is", "Give the folder that it names")
    if not path.is_dir():
        problem = "is no folder" if path.exists() else "no such checkpoint"
        raise CheckpointError(path, problem, "Give the folder of one, such as checkpoints/00001000")
    if (size := size_of(file)) > (most := _most_bytes(path)):
        problem = f"{size} bytes, and a manifest of what its files hold has no more than {most}"
        raise CheckpointError(file, problem, RESTORE)
    try:
        content = read_file(file)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({type(error).__name__})", RESTORE) from None
    return parse_manifest(content, file)


def parse_manifest(content: bytes, file: Path | str) -> dict[str, Any]:
    """The manifest in the content of a file, whose name is for messages. Raises CheckpointError as `read_manifest`."""
    try:  # each value of ours is on a line of its own: many more take memory out of proportion to the file
        is_whole = content.endswith(b"}\n")
        is_ours = is_whole and content.count(b"{") + content.count(b"[") <= content.count(b"\n") + 1000
        manifest: Any = json.loads(content.decode()) if is_ours else None
        intact = isinstance(manifest, dict) and manifest.get("sha256") == _digest(manifest)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"cannot be read ({type(error).__name__})", RESTORE) from None
    if not intact:
        raise CheckpointError(file, "changed since it was written (sha256 differs)", RESTORE)
    if manifest.get("format") != FORMAT:
        problem = f"format {manifest.get('format')}, this version of megasparse reads {FORMAT}"
        raise CheckpointError(file, problem, "Use the version of megasparse that wrote it")
    if (strange := _strange(manifest)) is not None:
        raise CheckpointError(file, f"{strange}, which no checkpoint of ours has", "Do not trust it")
    return manifest


def size_of(file: Path) -> int:
    """Bytes of a checkpoint's file. Raises CheckpointError where it is missing, a link or a pipe."""
    try:
        status = os.lstat(file)
    except FileNotFoundError:
        raise CheckpointError(file, "missing", RESTORE) from None
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({error.strerror})", RESTORE) from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(file, "is no regular file", RESTORE)
    return status.st_size


def _most_bytes(path: Path) -> int:
    """Bytes that the manifest may have, by the headers of the checkpoint's files. Raises CheckpointError."""
    headers = 0
    for file in path.glob("rank-*.safetensors"):
        size = size_of(file)
        try:
            with open_file(file) as stream:
                headers += min(size, int.from_bytes(stream.read(8), "little"))
        except OSError as error:
            raise CheckpointError(file, f"cannot be read ({error.strerror})", RESTORE) from None
    return min(LARGEST_MANIFEST, LEAST_ROOM + ROOM_PER_HEADER * headers)


def gap(tensor: dict[str, Any]) -> str | None:
    """Describe the first gap or overlap between an entry's pieces; None if they fill the tensor."""
    end = 0
    for piece in sorted(tensor["pieces"], key=lambda piece: piece["start"]):
        if piece["start"] != end:
            return f"a piece that starts at {piece['start']} after one that ended at {end}"
        end += piece["numel"]
    return None if end == math.prod(tensor["shape"]) else f"{end} numbers for the shape {tensor['shape']}"


def _strange(manifest: dict[str, Any]) -> str | None:
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    for name in manifest["files"]:
        if not re.fullmatch(r"rank-[0-9]{5,}\.safetensors", name):
            return f"names a file {name!r}"
    for kind, tensors in manifest["tensors"].items():
        for name, tensor in tensors.items():
            if (problem := gap(tensor)) is not None:
                return f"{kind} of {name}: {problem}"
            for piece in tensor["pieces"]:
                if piece["file"] not in manifest["files"]:
                    return f"{kind} of {name}: a piece in a file {piece['file']!r}"
    return None


TEMPORARY = ".tmp-"
"""Prefix of folders that are being written or deleted; a crash may leave them."""


def list_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints in `directory`, oldest first.

    Saving renames a complete one to its number, so a numbered directory that is not complete is a damaged one, to be
    refused by name when it is opened and never passed over in silence.
    """
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((p for p in paths if re.fullmatch("[0-9]{8,}", p.name)), key=lambda p: int(p.name))


def find_newest(directory: str | Path) -> Path | None:
    """The checkpoint of the highest step in `directory`, or None where there is none."""
    return next(reversed(list_checkpoints(Path(directory))), None)


LONGEST = 80
"""Characters of a value in a message."""


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run, which resumes only from checkpoints of the same identity."""

    config: RunSettings
    data_fingerprint: str
    """Digest of what the run is trained on."""
    tokenizer: dict[str, str]
    """`name` and `sha256`."""

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return Path(self.config.run.directory) / "checkpoints"


@functools.cache  # the code that runs is the code that was there at the start
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute; `source` is the SHA-256 of megasparse's own *.py files."""
    names = {"python": platform.python_version(), "source": _source_digest(Path(__file__).parents[2])}
    for package in ("megasparse", "torch", "deepspeed", "safetensors"):
        with suppress(importlib.metadata.PackageNotFoundError):
            names[package] = importlib.metadata.version(package)
    return names


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Map dotted keys to the values of a nested dictionary."""
    if not (isinstance(value, dict) and value):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, part in value.items():
        flat |= flatten(part, f"{prefix}.{key}" if prefix else str(key))
    return flat


def differences(of_each_rank: Sequence[dict[str, Any]]) -> str:
    """Name where the ranks' JSON values differ: `run.seed: 0 on rank 0, 1 on ranks 1, 2`; "" where they do not."""
    flat = [flatten(value) for value in of_each_rank]
    reported = []
    for key in dict.fromkeys(key for one in flat for key in one):
        holders: dict[str, list[str]] = {}
        for rank, one in enumerate(flat):
            value = json.dumps(one[key], sort_keys=True) if key in one else "nothing"
            holders.setdefault(value, []).append(str(rank))
        if len(holders) > 1:
            values = (
                f"{value[:LONGEST]}{'…' * (len(value) > LONGEST)} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
                for value, ranks in holders.items()
            )
            reported.append(f"{key}: {', '.join(values)}")
    return "; ".join(reported)


def _source_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(contents)}\n".encode() + contents)
    return digest.hexdigest()
