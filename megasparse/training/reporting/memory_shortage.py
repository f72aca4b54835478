"""Report of a run that ran out of memory: the bytes that were held, by kind."""

import json
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megasparse.data.files import replacing
from megasparse.errors import MemoryShortage
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.memory import KINDS, available_bytes, bytes_of, peak_bytes, resident_bytes

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
HINT = (
    "Use a smaller training.micro_batch, shorter sequences, a higher zero_optimization stage or more ranks; "
    "`--dry-run` and `megasparse plan` predict the memory of a change"
)


@dataclass(frozen=True)
class CountedMemory:
    """Memory of a process at the time of the failure. held: bytes by KINDS, and "other", which add up to the peak."""

    held: dict[str, int]
    requested: int
    """Size of the failed allocation in bytes; 0 if unknown."""
    limit: int
    """Bytes that were available to this process: those that it held, and those that were free."""

    @property
    def peak(self) -> int:
        return sum(self.held.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if Python, torch's allocators or CUDA report that memory did not suffice."""
    texts = ("can't allocate memory", "CUDA error: out of memory")
    by_text = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or by_text


def requested_bytes(error: BaseException) -> int:
    """Return the size of the failed allocation in torch's message; 0 if the message has none."""
    match = re.search(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", str(error), re.IGNORECASE)
    return int(float(match[1]) * UNITS[match[2]]) if match else 0


def count_memory(error: BaseException, engine: Engine | None, device: torch.device) -> CountedMemory:
    """Count the memory of this process. engine: None if memory did not suffice to build it."""
    held = dict.fromkeys(KINDS, 0)
    if engine is not None:
        parts = {"gradients": bytes_of(engine.gradients(), device), **engine.held()}
        held |= {kind: on_device for kind, (on_device, _) in parts.items()}
    peak = peak_bytes(device)
    used = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
    held["other"] = max(0, peak - sum(held.values()))
    return CountedMemory(held, requested_bytes(error), used + available_bytes(device))


def shortage(error: BaseException, engine: Engine | None, ranks: Ranks, directory: Path) -> MemoryShortage:
    """Print the held memory, write it to `directory`/out-of-memory-rank-N.json, and return the error to raise."""
    counted = count_memory(error, engine, ranks.device)
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    rows = {("activations and other" if kind == "other" else kind): size for kind, size in counted.held.items()}
    rows |= {"peak": counted.peak, "failed allocation": counted.requested, "limit": counted.limit}
    print("\n".join(f"{name:24} {size / 1e9:9,.2f} GB" for name, size in rows.items()), file=sys.stderr)
    path = directory / f"out-of-memory-rank-{ranks.rank}.json"
    facts: dict[str, Any] = {"error": str(error), "device": str(ranks.device), "counted": asdict(counted)}
    if ranks.device.type == "cuda":
        facts |= {"statistics": torch.cuda.memory_stats(ranks.device), "segments": torch.cuda.memory_snapshot()}
    with suppress(OSError), replacing(path) as file:
        file.write(json.dumps(facts, indent=1).encode() + b"\n")
    where = f"rank {ranks.rank} on {ranks.device}"
    return MemoryShortage(f"{where} is out of memory ({reason.rstrip('.')}). {HINT}. All figures: {path}")
