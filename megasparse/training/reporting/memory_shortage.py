"""The end of a run that memory did not suffice for: what held it, as planned and as counted, and what would fit."""

import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megasparse.callbacks import Progress
from megasparse.data.files import replacing
from megasparse.errors import ConfigError, MemoryShortage
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.memory import KINDS, available_bytes, bytes_of, peak_bytes, resident_bytes

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
ENOUGH = 3
"""Changes that are named."""


@dataclass(frozen=True)
class PlannedMemory:
    """A plan. held: bytes at the peak by KINDS, and "other". changes: what to write into the configuration, the mildest
    first, and a function that predicts the peak after this change alone; it raises ConfigError where the changed
    configuration is not valid.
    """

    held: dict[str, int]
    changes: Iterable[tuple[str, Callable[[], int]]] = ()

    @property
    def peak(self) -> int:
        return sum(self.held.values())


Plan = Callable[[], PlannedMemory]


@dataclass(frozen=True)
class CountedMemory:
    """What there was when memory did not suffice. held: bytes by KINDS, and "other", which make up the peak so far."""

    held: dict[str, int]
    requested: int
    """What was asked for in vain; 0 where that is not known."""
    limit: int
    """What this process could have had: what it held, and what was free."""

    @property
    def peak(self) -> int:
        return sum(self.held.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch's allocators or CUDA say that memory did not suffice."""
    said = ("can't allocate memory", "CUDA error: out of memory")
    by_text = isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or by_text


def requested_bytes(error: BaseException) -> int:
    """The size that torch's message says was asked for; 0 where it says none."""
    found = re.search(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", str(error), re.IGNORECASE)
    return int(float(found[1]) * UNITS[found[2]]) if found else 0


def count_memory(error: BaseException, engine: Engine | None, device: torch.device) -> CountedMemory:
    """engine: None where memory did not suffice for building it."""
    held = dict.fromkeys(KINDS, 0)
    if engine is not None:
        parts = {"gradients": bytes_of(engine.gradients(), device), **engine.held()}
        held |= {kind: here for kind, (here, _) in parts.items()}
    peak = peak_bytes(device)
    now = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
    held["other"] = max(0, peak - sum(held.values()))
    return CountedMemory(held, requested_bytes(error), now + available_bytes(device))


def shortage(
    error: BaseException, engine: Engine | None, ranks: Ranks, directory: Path, plan: Plan, alive: Progress
) -> MemoryShortage:
    """Print what held the memory, write it to `directory`/out-of-memory-rank-N.json, and return the error to raise.

    plan: predicts the peak. alive: called before each prediction, which may take a minute.
    """
    counted = count_memory(error, engine, ranks.device)
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    print(f"rank {ranks.rank} on {ranks.device}: {reason}. Planning what would fit", file=sys.stderr, flush=True)
    planned, fitting, unplanned = None, {}, ""
    try:
        alive("out of memory: planning")
        planned = plan()
        fitting = changes_that_fit(planned, counted, alive)
    except Exception as problem:  # the run's own error must be reported, whatever ails the plan
        unplanned = str(problem).strip().partition("\n")[0] or type(problem).__name__
    print("\n".join(_lines(counted, planned, unplanned, fitting)), file=sys.stderr)
    path = directory / f"out-of-memory-rank-{ranks.rank}.json"
    facts: dict[str, Any] = {
        "error": str(error),
        "device": str(ranks.device),
        "counted": asdict(counted),
        "planned": planned.held if planned else None,
        "fitting": fitting,
    }
    if ranks.device.type == "cuda":
        facts |= {"statistics": torch.cuda.memory_stats(ranks.device), "segments": torch.cuda.memory_snapshot()}
    with suppress(OSError), replacing(path) as file:
        file.write(json.dumps(facts, indent=1).encode() + b"\n")
    hint = "No single change is predicted to fit: use more ranks, or shorter sequences"
    if fitting:
        hint = f"Change one of these, each of which is predicted to fit: {'; '.join(fitting)}"
    where = f"rank {ranks.rank} on {ranks.device}"
    return MemoryShortage(f"{where} is out of memory ({reason.rstrip('.')}). {hint}. All figures: {path}")


def changes_that_fit(planned: PlannedMemory, counted: CountedMemory, alive: Progress) -> dict[str, int]:
    """The first three changes after each of which memory suffices, and the peak then: as planned, and as much more as
    the plan has missed so far.
    """
    missed = max(0, counted.peak + counted.requested - planned.peak)
    fitting: dict[str, int] = {}
    for change, predict in planned.changes:
        alive(f"out of memory: planning {change}")
        with suppress(ConfigError):
            peak = predict()
            if peak < planned.peak and peak + missed <= counted.limit:
                fitting[change] = peak + missed
        if len(fitting) == ENOUGH:
            break
    return fitting


def _lines(
    counted: CountedMemory, planned: PlannedMemory | None, unplanned: str, fitting: dict[str, int]
) -> Iterable[str]:
    yield f"{'held':24} {'planned':>12} {'counted':>12}"
    for kind in (*KINDS, "other"):
        title = "activations and other" if kind == "other" else kind
        yield f"{title:24} {_size(planned.held[kind] if planned else None)} {_size(counted.held[kind])}"
    yield f"{'peak':24} {_size(planned.peak if planned else None)} {_size(counted.peak)}"
    yield f"{'asked for in vain':37} {_size(counted.requested)}"
    yield f"{'limit':37} {_size(counted.limit)}"
    if unplanned:
        yield f"the plan failed: {unplanned}"
    for change, peak in fitting.items():
        yield f"{'fits, with':24} {_size(peak)} {change}"


def _size(size: int | None) -> str:
    return f"{'-':>12}" if size is None else f"{size / 1e9:9,.2f} GB"
