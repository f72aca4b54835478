"""Memory of a rank by kind, in bytes."""

import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

KINDS = ("weights", "gradients", "optimizer")


def bytes_of(tensors: Iterable[Tensor], device: torch.device) -> tuple[int, int]:
    """Bytes of the storages of these tensors on `device`, and elsewhere. A shared storage counts once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor.device.type == device.type)
    on_device = sum(size for size, is_on_device in storages.values() if is_on_device)
    return on_device, sum(size for size, _ in storages.values()) - on_device


def memory_scalars(device: torch.device, held: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Return the scalars memory/... of this rank (docs/monitoring.md). held: of each of KINDS what `bytes_of` found."""
    scalars = {f"memory/{kind}_bytes": held[kind][0] for kind in KINDS if kind in held}
    peak = peak_bytes(device)
    scalars |= {"memory/peak_bytes": peak, "memory/other_bytes": max(0, peak - sum(scalars.values()))}
    scalars |= _of_process()
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device)
        scalars |= {
            "memory/offloaded_bytes": sum(elsewhere for _, elsewhere in held.values()),
            "memory/reserved_bytes": reserved,
        }
        return {**scalars, "memory/fragmentation": 1 - peak / max(1, reserved)}
    return {**scalars}


def peak_bytes(device: torch.device) -> int:
    """Most ever in use: allocated tensors on a GPU, resident memory of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """Resident memory of this process at the moment; 0 where the system does not report it."""
    return _of_process().get("memory/resident_bytes", 0)


def available_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, with what torch has cached, or of the CPU within the control group's limit."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    table = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    limits = [int(table["MemAvailable"].split()[0]) * 1024]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            texts = [(Path("/sys/fs/cgroup") / name).read_text().strip() for name in (limit, used)]
        except OSError:
            continue
        if texts[0].isdigit():
            limits.append(max(0, int(texts[0]) - int(texts[1])))
    return min(limits)


def _of_process() -> dict[str, int]:
    """Memory in use at the moment; nothing where the system does not report it."""
    scalars = {}
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        for name, field in (("resident", "VmRSS"), ("swapped", "VmSwap")):
            scalars[f"memory/{name}_bytes"] = 1024 * int(status.split(f"\n{field}:", 1)[1].split(maxsplit=1)[0])
    return scalars
