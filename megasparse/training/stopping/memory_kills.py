"""Whether the kernel has killed for want of memory. No torch here: the supervisor asks."""

from pathlib import Path


def oom_kills() -> int | None:
    """Processes that the kernel has killed for want of memory since it started; None where it does not say."""
    try:
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return None


def killed_for_memory(before: int | None, after: int | None) -> str:
    """What a SIGKILL was sent for, by the kernel's count before and after; to be written behind it."""
    if before is None or after is None:
        return "; was the machine out of memory?"
    if after == before:
        return "; not by the kernel for want of memory, which it counts"
    return (
        "; the machine was out of memory, and the kernel killed for it. The last line of metrics.jsonl has what rank 0 "
        "held (memory/...), megasparse plan what a rank takes and what would take less"
    )
