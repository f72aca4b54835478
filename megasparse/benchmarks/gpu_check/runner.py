"""Stages one after the other, each in a process with a limit: one that fails or hangs stops no other."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from megasparse.benchmarks.gpu_check.report import Report, failed, table
from megasparse.data.files import replacing

SLOWER = 20
"""Times as long as on a GPU that stages may take on a CPU."""


def check(folder: Path, stages: dict[str, tuple[float, Callable[[Report], None]]], say: Callable[[str], None]) -> bool:
    """Run the stages, name -> (limit in seconds, function of a module). Writes folder/STAGE.json after each result and
    folder/table.md after each stage. Returns whether nothing was wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reports = []
    for name, (limit, run) in stages.items():
        say(f"{name}: at most {limit:.0f} s")
        reports.append(_alone(folder / f"{name}.json", name, limit, run))
        say(f"{name}: {reports[-1].state}, {reports[-1].seconds:.0f} s")
        with replacing(folder / "table.md") as file:
            file.write("\n".join([*table(reports), ""]).encode())
    say("\n".join(["", *table(reports)]))
    return all(report.right for report in reports)


def _alone(path: Path, name: str, limit: float, run: Callable[[Report], None]) -> Report:
    """Run a stage in a process group of its own, which is ended at the limit."""
    Report(path, name).write()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(path, name, run))
    began = time.perf_counter()
    process.start()
    process.join(limit)
    over = process.is_alive()
    with contextlib.suppress(ProcessLookupError, PermissionError):  # what it has started ends with it
        os.killpg(process.pid or 0, signal.SIGKILL)
    if over:
        process.kill()
    process.join()
    report = Report.read(path)
    report.seconds = time.perf_counter() - began
    if over:
        report.state = f"over its limit of {limit:.0f} s"
    elif report.state == "running":
        report.state = f"failed: its process ended with {process.exitcode}"
    report.write()
    return report


def _run(path: Path, name: str, run: Callable[[Report], None]) -> None:
    os.setsid()
    report = Report(path, name)
    try:
        run(report)
        report.state = "done"
    except Exception as error:
        report.state = failed(error)
    report.write()
