"""The identity of a run, what must be the same on every rank, and how to name the differences."""

import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasparse.config.schema import RunSettings

LONGEST = 80
"""Characters of a value in a message."""


@dataclass(frozen=True)
class RunIdentity:
    """What makes a run the same run: one goes on only from checkpoints of its own identity."""

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
    found = {"python": platform.python_version(), "source": _source_digest(Path(__file__).parents[2])}
    for package in ("megasparse", "torch", "deepspeed", "safetensors"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


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
            reported.append(f"{key}: " + ", ".join(_held(value, ranks) for value, ranks in holders.items()))
    return "; ".join(reported)


def _held(value: str, ranks: list[str]) -> str:
    short = value if len(value) <= LONGEST else f"{value[:LONGEST]}…"
    return f"{short} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def _source_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(contents)}\n".encode() + contents)
    return digest.hexdigest()
