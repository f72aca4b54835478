"""Writing checkpoints so that whatever happens, the newest complete one can be opened.

All ranks write into one temporary directory and fsync every file; the manifest comes last; a rename makes the
checkpoint appear, complete, in one instant. What is to be deleted is renamed first, so that nothing half-deleted is
ever found.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megasparse.config.schema import Config
from megasparse.errors import CheckpointError, UserError
from megasparse.training.checkpoint import FORMAT, MANIFEST, Fragment, seal
from megasparse.training.engine import Engine
from megasparse.training.ranks import Ranks
from megasparse.training.run_folder import TEMPORARY, list_checkpoints


@dataclass(frozen=True)
class Saver:
    """Saves a run's checkpoints, and keeps the newest `config.checkpoint.keep` of them; knows what tells runs apart."""

    config: Config
    ranks: Ranks
    data_fingerprint: str
    tokenizer: dict[str, str]
    """`name` and `sha256`."""

    @property
    def directory(self) -> Path:
        """Where the run's checkpoints lie."""
        return Path(self.config.run.directory) / "checkpoints"

    def save(self, engine: Engine, step: int, sequences: int) -> Path:
        """Write the checkpoint of `step`; `sequences` is the data's position. All ranks call it, all return its path.

        Raises CheckpointError, the same on every rank, if any rank could not write its part or holds a number that is
        not finite. Then nothing is left of the attempt, and the older checkpoints are untouched.
        """
        temporary = self.directory / self.ranks.gather(f"{TEMPORARY}{step:08d}-{uuid.uuid4().hex}")[0]
        final = self.directory / f"{step:08d}"

        def write_own_part() -> dict[str, Any]:
            temporary.mkdir(parents=True, exist_ok=True)
            name = f"rank-{self.ranks.rank:05d}.safetensors"
            return {"file": name, **_write_fragments(temporary / name, engine.fragments())}

        def finish() -> None:
            if self.ranks.rank == 0:
                _write(temporary / MANIFEST, seal(self._manifest(engine, step, sequences, parts)).encode())
                _sync_directory(temporary)
                temporary.rename(final)
                _sync_directory(self.directory)
                self._tidy(final)

        parts = self._together(write_own_part, temporary)
        self._together(finish, temporary)
        return final

    def _tidy(self, newest: Path) -> None:
        """Point `latest` at the newest checkpoint and delete the oldest. Saving is done: trouble here is only told."""
        try:
            _write(self.directory / f"{TEMPORARY}latest", f"{newest.name}\n".encode())
            os.replace(self.directory / f"{TEMPORARY}latest", self.directory / "latest")
            for old in list_checkpoints(self.directory)[: -self.config.checkpoint.keep]:
                remove(old)
        except OSError as error:
            print(f"warning: {newest} is saved, but older ones could not be deleted: {error}", file=sys.stderr)

    def _together(self, work: Callable[[], Any], temporary: Path) -> list[Any]:
        """Do `work` on every rank and gather the results; if any rank fails, all of them clean up and raise."""
        report: dict[str, Any] = {"problem": None, "result": None}
        try:
            report["result"] = work()
        except OSError as error:
            free = shutil.disk_usage(next(p for p in [temporary, *temporary.parents] if p.exists())).free
            report["problem"] = f"{error.filename or temporary}: {error.strerror or error} ({free:,} bytes free)"
        except Exception as error:  # told to the other ranks, who would otherwise wait for this one for ever
            report["problem"] = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        reports = self.ranks.gather(report)
        for rank, other in enumerate(reports):
            if other["problem"] is not None:
                if self.ranks.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)
                mend = "Older checkpoints are untouched: mend it and start again"
                problem = f"the checkpoint was not saved. Rank {rank}: {other['problem']}"
                raise CheckpointError(self.directory, problem, mend)
        return [other["result"] for other in reports]

    def _manifest(self, engine: Engine, step: int, sequences: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
        tensors: dict[str, dict[str, Any]] = {}
        for part in parts:
            for kind, name, shape, piece in part["pieces"]:
                entry = tensors.setdefault(kind, {}).setdefault(name, {"shape": shape, "pieces": []})
                entry["pieces"].append({"file": part["file"], **piece})
        for kind, entries in tensors.items():
            for name, entry in entries.items():
                _check_covered(kind, name, entry)
        return {
            "format": FORMAT,
            "step": step,
            "sequences": sequences,
            "optimizer_steps": engine.steps_done(),
            "world_size": self.ranks.world_size,
            "config": json.loads(self.config.model_dump_json()),
            "data_fingerprint": self.data_fingerprint,
            "tokenizer": self.tokenizer,
            "versions": _versions(),
            "files": {part["file"]: {"bytes": part["bytes"], "sha256": part["sha256"]} for part in parts},
            "tensors": tensors,
        }


def remove(path: Path) -> None:
    """Delete a checkpoint so that it is never found half-deleted."""
    doomed = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Delete what an interrupted save or deletion left in `directory`."""
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.startswith(TEMPORARY):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def _check_covered(kind: str, name: str, entry: dict[str, Any]) -> None:
    """Over all ranks, a tensor's pieces follow each other without gap or overlap."""
    end = 0
    for piece in sorted(entry["pieces"], key=lambda piece: piece["start"]):
        assert piece["start"] == end, (
            f"{kind} of {name}: a piece starts at {piece['start']}, the last one ended at {end}"
        )
        end += piece["numel"]
    assert end == math.prod(entry["shape"]), f"{kind} of {name}: {end} numbers for the shape {entry['shape']}"


def _write_fragments(path: Path, fragments: list[Fragment]) -> dict[str, Any]:
    """Write one rank's fragments as a safetensors file, one at a time: {bytes, sha256, pieces}.

    The format is the length of a JSON header (8 bytes), the header, and the numbers, little endian. It is written here
    and not by the library, which would first put all of it together in memory.
    """
    assert sys.byteorder == "little"
    header: dict[str, Any] = {}
    pieces, end = [], 0
    for number, f in enumerate(fragments):
        key, begin, end = str(number), end, end + 4 * f.numel
        header[key] = {"dtype": "F32", "shape": [f.numel], "data_offsets": [begin, end]}
        pieces.append((f.kind, f.name, list(f.shape), {"key": key, "start": f.start, "numel": f.numel}))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # numbers start at a multiple of 8
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            digest.update(block)
            file.write(block)
        for f in fragments:
            tensor = f.read().contiguous()
            if not bool(torch.isfinite(tensor).all()):
                mend = "Resume from an older checkpoint, with a lower learning rate"
                raise CheckpointError(path, f"{f.kind} of {f.name} holds a number that is not finite", mend)
            numbers = tensor.numpy().data.cast("B") if f.numel else b""
            digest.update(numbers)
            file.write(numbers)
        _sync(file)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest(), "pieces": pieces}


def _write(path: Path, contents: bytes) -> None:
    with path.open("wb") as file:
        file.write(contents)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("megasparse", "torch", "deepspeed", "safetensors"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
