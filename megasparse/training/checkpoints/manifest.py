"""Names in a run's folder of checkpoints, the manifest of a checkpoint, and the identity of a run.

A manifest may be damaged or forged, so its own digest and all fields are verified before it is used.
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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasparse.errors import CheckpointError
from megasparse.files import open_file, read_file

if TYPE_CHECKING:
    from megasparse.config.schema import RunSettings

FORMAT = 1
MANIFEST = "manifest.json"
NO_DATA = "none"
"""Data fingerprint of weights that were not trained by megasparse: training may continue on any data."""
LARGEST_MANIFEST = 1 << 28
"""Largest manifest in bytes: at some 200 per piece, room for a million pieces of tensors."""
LEAST_ROOM, ROOM_PER_HEADER = 1 << 20, 8
"""Bytes of a manifest without its pieces, and bytes per byte of the headers of its files. Headers list every piece too,
in a third of the space.
"""
RESTORE = "Restore it from a copy, or resume from an older checkpoint with --resume PATH"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


_SELECTION = {
    "metric": str, "step": (_is_count, None), "value": (_is_number, None), "scalars": {"*": _is_number},
    "without_better": _is_count,
}  # fmt: skip
_GUARD = {"losses?": [_is_number], "skipped_in_a_row?": _is_count, "spikes?": _is_count}
_PIECE = {"file": str, "key": str, "start": _is_count, "numel": _is_count}
_FORM = {
    **dict.fromkeys(("step", "sequences", "optimizer_steps"), _is_count),
    "state?": {"loss_guard?": _GUARD, "selection?": (_SELECTION, None), "evaluation_pending?": bool},
    "config": {"*": object},
    "data_fingerprint": str,
    "tokenizer": {"*": str},
    "files": {"*": {"bytes": _is_count, "sha256": str}},
    "tensors": {"*": {"*": {"shape": [_is_count], "pieces": [_PIECE]}}},
}
"""Fields that the code uses; the configuration is validated when it is used. `*` is any key, `?` an optional one."""


def _mismatch(value: Any, form: Any, path: str = "") -> str | None:
    """Return the path of the first value that does not match a form: a type, a test, or a collection of forms."""
    items: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(form, tuple):
        form = form[0]
        if value is None:
            return None
    if isinstance(form, list) and isinstance(value, list):
        items = ((number, item, form[0]) for number, item in enumerate(value))
    elif isinstance(form, dict) and isinstance(value, dict):
        if "*" in form:
            items = ((key, item, form["*"]) for key, item in value.items())
        else:
            fields = {key.rstrip("?"): part for key, part in form.items() if not key.endswith("?") or key[:-1] in value}
            items = ((key, value.get(key), part) for key, part in fields.items())
    elif not (isinstance(value, form) if isinstance(form, type) else callable(form) and form(value)):
        return path
    return next((bad for key, item, part in items if (bad := _mismatch(item, part, f"{path}.{key}".lstrip(".")))), None)


def seal(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest's file, including a digest of its content."""
    return json.dumps({**manifest, "sha256": _digest(manifest, sort=True)}, indent=1, sort_keys=True) + "\n"


def _digest(manifest: dict[str, Any], sort: bool) -> str:
    """Return the digest over sorted keys. sort: False if they are sorted, as in a file of `seal`, to save memory."""
    manifest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(manifest, sort_keys=sort).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint in the folder `path`.

    Raises CheckpointError if it is missing, has changed since it was written, or has invalid fields.
    """
    file = path / MANIFEST
    if path.is_symlink():
        raise CheckpointError(path, "is a symbolic link", "Use the folder that it points to")
    if not path.is_dir():
        problem = "not a folder" if path.exists() else "no such checkpoint"
        raise CheckpointError(path, problem, "Use a checkpoint's folder, such as checkpoints/00001000")
    if (size := size_of(file)) > (most := _most_bytes(path)):
        problem = f"{size} bytes; the manifest of these files has at most {most}"
        raise CheckpointError(file, problem, RESTORE)
    try:
        return parse_manifest(read_file(file), file)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({type(error).__name__})", RESTORE) from None


def parse_manifest(content: bytes, file: Path | str) -> dict[str, Any]:
    """Parse the content of a manifest. file: its name in messages. Raises CheckpointError as `read_manifest` does."""
    try:  # seal writes one value per line; many more on a line would take memory out of proportion to the file
        is_whole = content.endswith(b"}\n")
        is_ours = is_whole and content.count(b"{") + content.count(b"[") <= content.count(b"\n") + 1000
        text = content.decode() if is_ours else ""
        del content  # free memory before the digest takes as much again
        manifest: Any = json.loads(text) if text else None
        del text
        intact = isinstance(manifest, dict) and manifest.get("sha256") == _digest(manifest, sort=False)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"cannot be read ({type(error).__name__})", RESTORE) from None
    if not intact:
        raise CheckpointError(file, "changed since it was written (sha256 differs)", RESTORE)
    if manifest.get("format") != FORMAT:
        problem = f"format {manifest.get('format')}, this version of megasparse reads {FORMAT}"
        raise CheckpointError(file, problem, "Use the version of megasparse that wrote it")
    if (strange := _strange(manifest)) is not None:
        raise CheckpointError(file, f"invalid manifest: {strange}", "Do not trust it")
    return manifest


def size_of(file: Path) -> int:
    """Return the size of a checkpoint's file in bytes. Raises CheckpointError unless it is a regular file."""
    try:
        status = os.lstat(file)
    except FileNotFoundError:
        raise CheckpointError(file, "missing", RESTORE) from None
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({error.strerror})", RESTORE) from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(file, "not a regular file", RESTORE)
    return status.st_size


def _most_bytes(path: Path) -> int:
    """Return the largest valid size of the manifest, given the headers of the checkpoint's files."""
    headers = 0
    for file in path.glob("rank-*.safetensors"):
        if not (size := size_of(file)):
            continue
        try:
            with open_file(file) as stream:
                header_size = int.from_bytes(stream.read(8), "little")
                headers += min(size, header_size, os.lseek(stream.fileno(), 0, os.SEEK_HOLE))  # holes contain no header
        except OSError as error:
            raise CheckpointError(file, f"cannot be read ({error.strerror})", RESTORE) from None
    return min(LARGEST_MANIFEST, LEAST_ROOM + ROOM_PER_HEADER * headers)


def gap(tensor: dict[str, Any]) -> str | None:
    """Describe the first gap or overlap between the pieces of a tensor; None if they cover it exactly."""
    end = 0
    for piece in sorted(tensor["pieces"], key=lambda piece: piece["start"]):
        if piece["start"] != end:
            return f"a piece that starts at {piece['start']} after one that ended at {end}"
        end += piece["numel"]
    return None if end == math.prod(tensor["shape"]) else f"{end} numbers for the shape {tensor['shape']}"


def _strange(manifest: dict[str, Any]) -> str | None:
    if (path := _mismatch(manifest, _FORM)) is not None:
        return f"{path}: a value of another type"
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
"""Prefix of folders that are being written or deleted; a crash may leave them behind."""


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory`, oldest first.

    Saving renames a checkpoint to its number once it is complete. A numbered folder that is incomplete is therefore
    damaged: it is listed, so that opening it reports the damage.
    """
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((p for p in paths if re.fullmatch("[0-9]{8,}", p.name)), key=lambda p: int(p.name))


def find_newest(directory: str | Path) -> Path | None:
    """Return the checkpoint of the highest step in `directory`, or None."""
    return next(reversed(list_checkpoints(Path(directory))), None)


def find_checkpoint(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, else the newest one in it. Raises CheckpointError if there are none."""
    if (directory / MANIFEST).exists():
        return directory
    for folder in (directory / "checkpoints", directory):
        if newest := find_newest(folder):
            return newest
    raise CheckpointError(directory, "contains no checkpoint", "Use a run's folder, or one of its checkpoints/00001000")


LONGEST = 80
"""Longest value in a message, characters."""


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run. A run resumes only from checkpoints of the same identity."""

    config: "RunSettings"
    data_fingerprint: str
    """Digest of the training data."""
    tokenizer: dict[str, str]
    """`name` and `sha256`."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return Path(self.config.run.directory) / "checkpoints"


@functools.cache  # digest the source as it was when the process started
def versions() -> dict[str, str]:
    """Return the versions of Python and packages; `source` is the SHA-256 of megasparse's *.py files."""
    names = {"python": platform.python_version(), "source": _source_digest(Path(__file__).parents[2])}
    for package in ("megasparse", "torch", "deepspeed", "safetensors"):
        with suppress(importlib.metadata.PackageNotFoundError):
            names[package] = importlib.metadata.version(package)
    return names


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dictionary to dotted keys."""
    if not (isinstance(value, dict) and value):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, part in value.items():
        flat |= flatten(part, f"{prefix}.{key}" if prefix else str(key))
    return flat


def differences(of_each_rank: Sequence[dict[str, Any]]) -> str:
    """List the differences of the ranks' JSON values: `run.seed: 0 on rank 0, 1 on ranks 1, 2`; "" if equal."""
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
