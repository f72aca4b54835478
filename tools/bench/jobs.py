"""Jobs in forked processes with time limits and a file of result rows, and ahead-of-time compilation of their kernels.

The parent process must not initialise CUDA; every job creates its CUDA context.
"""

import ctypes
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import triton
from torch import Tensor

from megasparse.ops.kernels import Launch, observed
from megasparse.planning.passes import META, as_on_a_gpu
from tools.bench.kernels import distinct

RESULTS = "results.jsonl"
FAULT = "\n\nCurrent thread"
"""Start of faulthandler's output."""
TOGETHER = 4
"""Most parallel jobs, because definitions in float64 need up to 15 GB."""
PROCESSES = min(15, max(1, (os.cpu_count() or 2) - 1))
Task = TypeVar("Task")


class Report:
    """Writer of a job's rows, which appends to a file shared by processes and prints them unless `quiet`."""

    def __init__(self, path: Path, job: str, terminal: int = 1):
        self.quiet = False
        self.path, self.job, self.terminal, self.start = path, job, terminal, time.monotonic()

    def add(
        self, name: str, figures: Mapping[str, float] | None = None, right: bool | None = None, note: str = ""
    ) -> None:
        """Add a row. right: verdict of a check, None for measurements. note: one line."""
        seconds, figures = round(time.monotonic() - self.start, 2), dict(figures or {})
        row = {"job": self.job, "name": name, "right": right, "figures": figures, "note": note, "seconds": seconds}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.quiet:
            return
        verdict = {None: "", True: "right ", False: "WRONG "}[right]
        line = f"{self.job}: {name}: {verdict}{_shown(figures)} {note}".replace(f"{self.job}: definition", self.job)
        os.write(self.terminal, f"{line[:150].rstrip()}\n".encode())


def _shown(figures: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


def write_table(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the rows as a Markdown table."""
    lines = ["| job | result | right | figures | note |", "|---|---|---|---|---|"]
    for row in rows:
        verdict = {None: "", True: "yes", False: "**no**"}[row["right"]]
        cells = (row["job"], row["name"], verdict, _shown(row["figures"]), row["note"].replace("|", "/"))
        lines.append(f"| {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Job:
    """A part of the check. seconds: expected duration. launches: launches the job's kernels with meta tensors.
    together: True if it may run in parallel with others.
    """

    name: str
    run: Callable[[Report], None]
    seconds: float
    launches: Callable[[], object] | None = None
    together: bool = False


class Running:
    """A job in a forked process."""

    def __init__(self, job: Job, output: Path, deadline: float):
        self.job, self.output, self.start = job, output, time.monotonic()
        self.limit = min(self.start + 20 + 4 * job.seconds, deadline + 20)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (open while the job runs)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run()

    def _run(self) -> None:
        code = 1
        try:
            end_with_parent()
            terminal = os.dup(1)
            for stream in (1, 2):
                os.dup2(self.log.fileno(), stream)
            faulthandler.enable(2)
            report, late = Report(self.output / RESULTS, self.job.name, terminal), count_compilations()
            self.job.run(report)
            if late:
                report.add("compiled late", {"binaries": len(late)}, note=", ".join(sorted(set(late))))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # the interpreter's shutdown would fail with a broken CUDA context

    def ended(self) -> bool:
        """Reap the process and report its end. Return True if it has ended."""
        late = time.monotonic() > self.limit
        if late:
            os.kill(self.pid, signal.SIGKILL)
        pid, status = os.waitpid(self.pid, 0 if late else os.WNOHANG)
        if pid == 0:
            return False
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        with (self.output / "log.txt").open("a") as file:
            file.write(f"=== {self.job.name}\n{text}")
        report = Report(self.output / RESULTS, self.job.name)
        report.start = self.start
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            report.quiet = True
            report.add("done")
        else:
            cause = "over its limit of time" if late else f"exit code {code}"
            tail = " / ".join(line.strip() for line in text.split(FAULT)[0].strip().splitlines()[-3:])
            report.add("failed", right=False, note=f"{cause}: {tail[-400:]}")
        return True


def end_with_parent() -> None:
    """Let Linux kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def run_jobs(jobs: Sequence[Job], output: Path, deadline: float) -> None:
    """Run the jobs in order, up to TOGETHER in parallel if allowed, and skip jobs that cannot end by the deadline."""
    waiting, running, late = deque(jobs), list[Running](), []
    while waiting or running:
        while waiting and (
            not running or (len(running) < TOGETHER and waiting[0].together and running[-1].job.together)
        ):
            job = waiting.popleft()
            if time.monotonic() + job.seconds > deadline:
                late.append(job.name)
            else:
                running.append(Running(job, output, deadline))
        time.sleep(0.01)
        for process in list(running):
            if process.ended():
                running.remove(process)
                write_table(rows_of(output / RESULTS), output / "table.md")
    if late:
        print("no time for", ", ".join(late), flush=True)


def listing(jobs: Sequence[Job], seconds: float) -> str:
    """Return a line for each job: when it starts if all take the expected time, its seconds and its name."""
    lines, running, together, clock = [], list[float](), False, 0.0
    for job in jobs:
        while running and not (job.together and together and len(running) < TOGETHER):
            clock = min(running)
            running.remove(clock)
        fits = clock + job.seconds <= seconds
        if fits:
            running.append(clock + job.seconds)
            together = job.together
        lines.append(f"{f'at {clock:.0f} s' if fits else 'no time':>9}  {job.seconds:4g} s  {job.name}")
    return "\n".join(lines)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read rows, skipping a truncated last one."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def count_compilations() -> list[str]:
    """Return a list that receives the names of kernels compiled by Triton from now on."""
    names: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names.append(src.name)

    triton.knobs.compilation.listener = listen
    return names


def spread(
    function: Callable[[Task], Any], tasks: Sequence[Task], processes: int
) -> Iterator[tuple[Task, Any, str | None]]:
    """Call function(task) in forked processes and yield (task, result, None), or (task, None, problem). The death of a
    process fails only its current task.
    """
    waiting, busy, children = deque(range(len(tasks))), dict[Any, int](), list[int]()

    def work(connection: Any) -> None:
        end_with_parent()
        while True:
            number = connection.recv()
            try:
                connection.send((function(tasks[number]), None))
            except Exception as error:
                connection.send((None, f"{type(error).__name__}: {str(error).strip()[-300:]}"))

    def start() -> Any:
        parent_end, child_end = multiprocessing.Pipe()
        children.append(os.fork())
        if children[-1] == 0:
            try:
                work(child_end)
            finally:
                os._exit(1)
        child_end.close()
        return parent_end

    idle = [start() for _ in range(min(processes, len(tasks)))]
    while waiting or busy:
        while waiting and idle:
            connection, number = idle.pop(), waiting.popleft()
            connection.send(number)
            busy[connection] = number
        for connection in cast(list[Any], wait(list(busy))):
            number = busy.pop(connection)
            try:
                result, problem = connection.recv()
                idle.append(connection)
            except (EOFError, OSError):
                result, problem = None, "its process died"
                idle.append(start())
            yield tasks[number], result, problem
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def recorded_launches(launches: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Record the kernel launches of a function with meta tensors: module and name of the kernel, arguments with dtypes
    for tensors, and settings.
    """
    recorded: list[Launch] = []
    Launch.start = lambda self: recorded.append(self)  # type: ignore[method-assign]
    with observed(recorded.append), as_on_a_gpu():
        launches()
    rows = []
    for item in distinct(recorded):
        arguments = tuple(x.dtype if isinstance(x, Tensor) else x for x in item.arguments)
        rows.append((item.kernel.fn.__module__, item.kernel.fn.__name__, arguments, item.settings))
    return rows


def launch_of(module: str, kernel: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Launch:
    tensors = [torch.empty(1, dtype=x, device=META) if isinstance(x, torch.dtype) else x for x in arguments]
    return Launch(getattr(importlib.import_module(module), kernel), (1,), tuple(tensors), settings)


def compile_launch(launch: Launch) -> float:
    """Compile a kernel and its launcher into Triton's cache, as a launch does. Return the seconds."""
    start = time.perf_counter()
    compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.settings)
    triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
    return time.perf_counter() - start


def compile_all(report: Report, name: str, functions: Sequence[Callable[[], object]]) -> None:
    """Compile the kernels that functions launch with meta tensors, in processes without a CUDA context."""
    start, seconds, failed, rows = time.perf_counter(), 0.0, 0, dict[str, tuple[Any, ...]]()
    for _, result, problem in spread(recorded_launches, functions, PROCESSES):
        if problem is not None:
            report.add(f"{name}: recording", right=False, note=problem)
        rows |= {repr(row): row for row in result or []}
    launches, recording = distinct(launch_of(*row) for row in rows.values()), time.perf_counter() - start
    launches.sort(key=lambda item: ("attention" in item.kernel.fn.__module__, len(item.kernel.src)), reverse=True)
    without_context()
    for item, duration, problem in spread(compile_launch, launches, PROCESSES):
        if problem is not None:
            failed += 1
            report.add(f"{name}: {item.kernel.fn.__module__}.{item.kernel.fn.__name__}", right=False, note=problem)
        seconds += duration or 0.0
    figures = {"binaries": len(launches), "failed": failed, "recording s": recording, "CPU s": seconds}
    report.add(name, figures | {"wall s": time.perf_counter() - start}, failed == 0)


def without_context() -> None:
    """Let Triton compile for the GPU of this machine without a CUDA context per process."""
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    class Compiler(CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device=0: 0
            self.get_device_capability = lambda device=0: (int(major), int(minor))

    major, minor = gpu_facts("compute_cap")[0].split(".")
    triton.runtime.driver.set_active(Compiler())


def gpu_facts(*names: str) -> list[str]:
    """Query the first GPU with nvidia-smi, which does not create a CUDA context; an empty list without a GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [word.strip() for word in lines[0].split(",")] if lines else []
