"""Memory that this process has in use, on a GPU or resident on a CPU."""

import contextlib
import ctypes
import resource
from pathlib import Path

import torch


def reset_peak(device: torch.device) -> int:
    """Bytes in use now, and the peak's measurement starts here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(AttributeError, OSError):  # what is free is the system's again, where libc is GNU's
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # where the kernel does not allow it, an earlier peak of the process counts too
        Path("/proc/self/clear_refs").write_text("5")
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak(device: torch.device) -> int:
    """Largest number of bytes in use since the reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Of this process alone: getrusage also knows the peak of the one that started it.
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
