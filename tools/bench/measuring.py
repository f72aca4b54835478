"""Time and memory of a function, measured in a separate process."""

import contextlib
import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from megasparse.errors import UserError
from megasparse.planning.dry_run import peak, reset_peak

__all__ = ["MeasurementError", "alone", "machine", "mark", "peak", "reset_peak", "seconds_between", "time_passes"]
Result = TypeVar("Result")
PATIENCE = 600.0
"""Seconds after which no further repeat is started."""


class MeasurementError(UserError):
    """Failure of the measured function. problem: the reason, in one line."""

    def __init__(self, problem: str):
        super().__init__(f"a measurement in a separate process failed: {problem}. Correct it and run the command again")
        self.problem = problem


def alone(measure: Callable[..., Result], *arguments: Any) -> Result:
    """Run measure(*arguments) in a new process, whose memory is not used by anything else. `measure` must be a function
    of a module, and arguments and result must be picklable. Raises MeasurementError, also if the process is killed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_this_first) as pool:
        try:
            result, problem = pool.submit(_attempt, measure, arguments).result()
        except BrokenProcessPool:
            problem = "its process was killed, probably because the machine ran out of memory"
    if problem is not None:
        raise MeasurementError(problem)
    return result


def _attempt(measure: Callable[..., Result], arguments: tuple[Any, ...]) -> tuple[Any, str | None]:
    try:
        return measure(*arguments), None
    except Exception as error:  # report any error, so that later measurements can run
        lines = str(error).strip().splitlines() or [""]
        out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in lines[0]
        return None, "out of memory" if out_of_memory else f"{type(error).__name__}: {lines[0][:200]}"


def _end_this_first() -> None:
    """Let Linux kill this process first if memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def time_passes(
    forward: Callable[[], Callable[[], None]], device: torch.device, repeats: int, warm_up: int
) -> list[tuple[float, float]]:
    """Return pairs of seconds, of the forward pass and of forward and backward, one per repeat, fewer than `repeats`
    after `PATIENCE` seconds. forward: runs the forward pass and returns the backward pass. Uses CUDA events on GPUs.
    """
    times: list[tuple[float, float]] = []
    started = time.perf_counter()
    for number in range(warm_up + repeats):
        if len(times) and time.perf_counter() - started > PATIENCE:
            break
        marks = [mark(device)]
        backward = forward()
        marks.append(mark(device))
        backward()
        marks.append(mark(device))
        del backward
        seconds = seconds_between(marks[0], marks[1], device), seconds_between(marks[0], marks[2], device)
        if number >= warm_up:
            times.append(seconds)
    return times


def mark(device: torch.device) -> Any:
    """Return a CUDA event recorded on the device's stream, or the time of the CPU's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any, device: torch.device) -> float:
    """Return the seconds between two results of `mark`; waits for the second."""
    if device.type != "cuda":
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def machine(device: torch.device) -> dict[str, Any]:
    """Return the properties of the machine that affect a measurement."""
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        facts["cuda"] = torch.version.cuda
    for package in ("megasparse", "torch", "triton", "transformers", "reformer-pytorch"):
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
