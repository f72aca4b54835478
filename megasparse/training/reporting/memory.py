"""Scalars of speed and memory, and the report of an out-of-memory error."""

import ctypes
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasparse.errors import MemoryShortage
from megasparse.files import write_file
from megasparse.system import process_status
from megasparse.training.ranks import Ranks
from megasparse.training.reporting import PEAK_TFLOPS

KINDS = ("weights", "gradients", "optimizer")
HINT = (
    "Use a smaller training.micro_batch, shorter sequences, a higher zero_optimization stage or more ranks; "
    "`--dry-run` and `megasparse plan` predict the memory of a change"
)


def bytes_of(tensors: Iterable[Tensor], device: torch.device) -> tuple[int, int]:
    """Return the bytes of the tensors' storages, each once, on `device` and elsewhere."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor.device.type == device.type)
    on_device = sum(size for size, is_on_device in storages.values() if is_on_device)
    return on_device, sum(size for size, _ in storages.values()) - on_device


def trim_memory() -> None:
    """Return freed memory to the system, which glibc otherwise keeps."""
    with suppress(AttributeError, OSError, TypeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def memory_scalars(device: torch.device, held: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Return this rank's scalars memory/... held: result of `bytes_of` for each of KINDS."""
    scalars: dict[str, float] = {f"memory/{kind}_bytes": held[kind][0] for kind in KINDS if kind in held}
    peak = peak_bytes(device)
    scalars |= {"memory/peak_bytes": peak, "memory/other_bytes": max(0, peak - sum(scalars.values()))}
    scalars |= _of_process()
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device)
        scalars |= {"memory/offloaded_bytes": sum(elsewhere for _, elsewhere in held.values())}
        scalars |= {"memory/reserved_bytes": reserved, "memory/fragmentation": 1 - peak / max(1, reserved)}
    return scalars


def speed_scalars(ranks: Ranks, flops: tuple[float, ...], tokens: int, seconds: float, wait: float) -> dict[str, float]:
    """Return a step's scalars speed/... flops: per token of model and hardware, if known. tokens: over all ranks."""
    rate, size = tokens / seconds, ranks.world_size
    scalars = {"tokens_per_second": rate, "tokens_per_second_per_device": rate / size}
    scalars |= {"step_seconds": seconds, "data_wait_seconds": wait}
    if (peak := _peak(ranks.device)) is not None:
        for kind, number in zip(("model", "hardware"), flops, strict=False):
            scalars[f"{kind}_flops_utilisation"] = number * rate / (size * peak * 1e12)
    return {f"speed/{name}": value for name, value in scalars.items()}


def _peak(device: torch.device) -> float | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for word, peak in PEAK_TFLOPS.items() if word in name), None)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory use: tensors on GPUs, resident memory of this process on CPUs; 0 on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    return _of_process().get("memory/resident_bytes", 0)


def available_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU with torch's cache, or of the CPU within the control group's limit."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if not (report := Path("/proc/meminfo")).exists():
        return sys.maxsize
    table = dict(line.split(":") for line in report.read_text().splitlines())
    limits = [int(table["MemAvailable"].split()[0]) * 1024]
    for names in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):  # of cgroup 2 and 1
        folder = Path("/sys/fs/cgroup" if names[0] == "max" else "/sys/fs/cgroup/memory")
        with suppress(OSError, ValueError):  # no such file, or no limit
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in names)
            limits.append(max(0, limit - used))
    return min(limits)


def _of_process() -> dict[str, int]:
    scalars = {}
    with suppress(OSError, ValueError, IndexError):
        for name, field in (("resident", "VmRSS"), ("swapped", "VmSwap")):
            scalars[f"memory/{name}_bytes"] = 1024 * int(process_status(field).split()[0])
    return scalars


def is_out_of_memory(error: BaseException) -> bool:
    texts = ("can't allocate memory", "CUDA error: out of memory")
    by_text = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or by_text


def shortage(error: BaseException, parts: dict[str, tuple[int, int]], ranks: Ranks, directory: Path) -> MemoryShortage:
    """Print the memory use, write it to `directory`/out-of-memory-rank-N.json, and return the error to raise. parts:
    result of `bytes_of` for KINDS, if the engine was built.
    """
    device = ranks.device
    held = dict.fromkeys(KINDS, 0) | {kind: on_device for kind, (on_device, _) in parts.items()}
    used = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
    held["other"] = max(0, peak_bytes(device) - sum(held.values()))
    limit = used + available_bytes(device)
    rows = {("activations and other" if kind == "other" else kind): size for kind, size in held.items()}
    rows |= {"peak": sum(held.values()), "limit": limit}
    print("\n".join(f"{name:24} {size / 1e9:9,.2f} GB" for name, size in rows.items()), file=sys.stderr)
    path = directory / f"out-of-memory-rank-{ranks.rank}.json"
    facts: dict[str, Any] = {"error": str(error), "device": str(device), "counted": {"held": held, "limit": limit}}
    if device.type == "cuda":
        facts |= {"statistics": torch.cuda.memory_stats(device), "segments": torch.cuda.memory_snapshot()}
    with suppress(OSError):
        write_file(path, json.dumps(facts, indent=1) + "\n")
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    name = f"rank {ranks.rank} on {device}"
    return MemoryShortage(f"{name} is out of memory ({reason.rstrip('.')}). {HINT}. All figures: {path}")
