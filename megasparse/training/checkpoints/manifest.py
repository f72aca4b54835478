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
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import FailFast, Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from megasparse.errors import CheckpointError, one_line
from megasparse.files import read_file

if TYPE_CHECKING:
    from megasparse.config.schema import RunSettings

FORMAT = 1
MANIFEST = "manifest.json"
NO_DATA = "none"
"""Data fingerprint of weights that megasparse did not train: training may continue on any data."""
RESTORE = "Restore it from a copy, or resume from an older checkpoint with --resume PATH"
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Piece(TypedDict):
    file: str
    key: str
    start: Count
    numel: Count


class _Tensor(TypedDict):
    shape: Annotated[list[Count], FailFast()]
    pieces: Annotated[list[_Piece], FailFast()]


class _File(TypedDict):
    bytes: Count
    sha256: str


class _Selection(TypedDict):
    metric: str
    step: Count | None
    value: float | None
    scalars: dict[str, float]
    without_better: Count


class _State(TypedDict, total=False):
    loss: float | None
    skipped_in_a_row: Count
    selection: _Selection | None
    evaluation_pending: bool


class _Manifest(TypedDict):
    step: Count
    sequences: Count
    optimizer_steps: Count
    state: NotRequired[_State]
    config: dict[str, Any]
    data_fingerprint: str
    tokenizer: dict[str, str]
    base: NotRequired[str | None]
    files: dict[Annotated[str, Field(pattern=r"^rank-[0-9]{5,}\.safetensors$")], _File]
    tensors: dict[str, dict[str, _Tensor]]
    versions: NotRequired[dict[str, str]]


_FIELDS = TypeAdapter(_Manifest)
"""Fields that the code uses. Dictionaries take less memory than objects: there may be a million pieces."""


def seal(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest's file, with a digest of its content."""
    return json.dumps({**manifest, "sha256": _digest(manifest, sort=True)}, indent=1, sort_keys=True) + "\n"


def _digest(manifest: dict[str, Any], sort: bool) -> str:
    """Return the digest over sorted keys. sort: False, to save memory, if they are sorted already, as by `seal`."""
    manifest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(manifest, sort_keys=sort).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint. Raises CheckpointError if it has changed or is invalid."""
    file = path / MANIFEST
    if path.is_symlink():
        raise CheckpointError(path, "is a symbolic link", "Use the folder that it points to")
    if not path.is_dir():
        raise CheckpointError(path, "not a folder" if path.exists() else "no such checkpoint", "Give a checkpoint")
    size_of(file)
    with CheckpointError.instead_of(OSError, file, "cannot be read ({})", RESTORE):
        return parse_manifest(read_file(file), file)


def parse_manifest(content: bytes, file: Path | str) -> dict[str, Any]:
    """Parse the content of a manifest as `read_manifest` does. file: its name in messages."""
    manifest: Any = None
    with suppress(ValueError, RecursionError):
        manifest = json.loads(content) if content.endswith(b"\n") else None
    del content  # free memory before the digest takes as much again
    if not isinstance(manifest, dict) or manifest.get("sha256") != _digest(manifest, sort=False):
        raise CheckpointError(file, "changed since it was written (sha256 differs)", RESTORE)
    if manifest.get("format") != FORMAT:
        problem = f"format {manifest.get('format')}, this version of megasparse reads {FORMAT}"
        raise CheckpointError(file, problem, "Use the version that wrote it")
    try:
        _FIELDS.validate_python(manifest, strict=True)
        invalid = _wrong_pieces(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        invalid = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if invalid:
        raise CheckpointError(file, f"invalid manifest: {invalid}", "Do not trust it")
    return manifest


def size_of(file: Path) -> int:
    """Return the size of a checkpoint's file, which must be a regular one."""
    with (
        CheckpointError.instead_of(OSError, file, "cannot be read ({})", RESTORE),
        CheckpointError.instead_of(FileNotFoundError, file, "missing", RESTORE),
    ):
        status = os.lstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(file, "not a regular file", RESTORE)
    return status.st_size


def _wrong_pieces(manifest: dict[str, Any]) -> str | None:
    """Describe the first tensor whose pieces do not cover it exactly or are in no file, if any."""
    for kind, tensors in manifest["tensors"].items():
        for name, tensor in tensors.items():
            end = 0
            for piece in sorted(tensor["pieces"], key=itemgetter("start")):
                if piece["start"] != end:
                    return f"{kind} of {name}: a piece that starts at {piece['start']} after one that ended at {end}"
                if piece["file"] not in manifest["files"]:
                    return f"{kind} of {name}: a piece in a file {piece['file']!r}"
                end += piece["numel"]
            if end != math.prod(tensor["shape"]):
                return f"{kind} of {name}: {end} numbers for the shape {tensor['shape']}"
    return None


TEMPORARY = ".tmp-"
"""Prefix of folders that are being written or deleted; a crash may leave them behind."""


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory`, oldest first. Saving renames complete ones only: a numbered folder that is
    incomplete is damaged, and listed, so that opening it reports the damage.
    """
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((p for p in paths if re.fullmatch("[0-9]{8,}", p.name)), key=lambda p: int(p.name))


def find_newest(directory: str | Path) -> Path | None:
    return next(reversed(list_checkpoints(Path(directory))), None)


def find_checkpoint(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, else the newest one in it."""
    if (directory / MANIFEST).exists():
        return directory
    for folder in (directory / "checkpoints", directory):
        if newest := find_newest(folder):
            return newest
    refuse_adapters(directory)
    hint = "Use a run's folder (megasparse quickstart makes runs/quickstart), or one of its checkpoints/00001000"
    problem = "contains no checkpoint"
    with suppress(OSError, ValueError, TypeError, RecursionError):
        if "model_type" not in json.loads(read_file(directory / "config.json")):
            problem += ', and its config.json lacks the "model_type" of a Hugging Face model'
    raise CheckpointError(directory, problem, hint)


def refuse_adapters(folder: Path) -> None:
    """Raise CheckpointError, which names the base model, for a folder of adapters in PEFT's format."""
    if not (file := folder / "adapter_config.json").is_file():
        return
    base = None
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        base = json.loads(read_file(file))["base_model_name_or_path"]
    problem = f"contains adapters of PEFT for {one_line(repr(base)) if base else 'a base model that it does not name'}"
    hint = "Merge them first: PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(new_folder)"
    raise CheckpointError(folder, f"{problem}, not a model", hint)


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run, which resumes only from checkpoints of the same identity. base: `weights_digest` of the frozen
    weights of a run that trains adapters.
    """

    config: "RunSettings"
    data_fingerprint: str
    tokenizer: dict[str, str]
    base: str | None = None

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.run.directory) / "checkpoints"


def build_manifest(run: RunIdentity, parts: Iterable[dict[str, Any]], **progress: Any) -> dict[str, Any]:
    """Return the manifest of a checkpoint. parts: `file`, `bytes` and `sha256` of each rank's file, and the `pieces` of
    its RankFile. progress: `step`, `sequences`, `state`, `optimizer_steps` and `world_size`.
    """
    files: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for part in parts:
        files[part["file"]] = {"bytes": part["bytes"], "sha256": part["sha256"]}
        for kind, name, shape, piece in part["pieces"]:
            entry = tensors.setdefault(kind, {}).setdefault(name, {"shape": shape, "pieces": []})
            entry["pieces"].append({"file": part["file"], **piece})
    manifest = {
        "format": FORMAT,
        **progress,
        "config": json.loads(run.config.model_dump_json()),
        "data_fingerprint": run.data_fingerprint,
        "base": run.base,
        "tokenizer": run.tokenizer,
        "versions": versions(),
        "files": files,
        "tensors": tensors,
    }
    assert (problem := _wrong_pieces(manifest)) is None, problem
    return manifest


def weights_digest(manifest: dict[str, Any]) -> str:
    digests = (entry["sha256"] for _, entry in sorted(manifest["files"].items()))
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


@functools.cache  # digest the source as it was when the process started
def versions() -> dict[str, str]:
    """Return the versions of Python and packages; `source` is the SHA-256 of megasparse's *.py files."""
    names = {"python": platform.python_version(), "source": _source_digest(Path(__file__).parents[2])}
    for package in ("megasparse", "torch", "deepspeed", "safetensors"):
        with suppress(importlib.metadata.PackageNotFoundError):
            names[package] = importlib.metadata.version(package)
    return names


def _source_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(contents)}\n".encode() + contents)
    return digest.hexdigest()


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
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
                f"{value[:80]}{'…' * (len(value) > 80)} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
                for value, ranks in holders.items()
            )
            reported.append(f"{key}: {', '.join(values)}")
    return "; ".join(reported)
