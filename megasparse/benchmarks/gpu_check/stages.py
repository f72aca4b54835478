"""The stages that `megasparse gpu-check` runs, each in a process of its own (`runner.py`), and what each of them finds.

A stage adds a row a result to its report, which is written each time: what was found stays if the stage then fails, or
is ended at its limit. `small`: sizes for a CPU, kernels in Triton's interpreter or on the meta device.
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from megasparse.benchmarks.gpu_check.operators import EXACT, SMOOTH, Problem, check_exact, check_smooth
from megasparse.benchmarks.gpu_check.report import Report, Row, Skipped
from megasparse.benchmarks.kernel_cases import CASES, ONE, ONE_WIDTH
from megasparse.planning.measure import machine, time_passes
from megasparse.planning.plan import peaks_of

ROOT = Path(__file__).parents[3]
GIGABYTE = 1e9


@dataclass(frozen=True)
class Stage:
    """seconds: the limit on a GPU, with the start of the process."""

    seconds: int
    run: Callable[..., None]


def ceilings(report: Report, small: bool) -> None:
    """Copy and bf16 product: what this device reaches, beside the data sheet's."""
    device = device_of(small)
    report.about = machine(device)
    peaks = None if small else peaks_of(torch.cuda.get_device_name(device))
    numbers = 1 << (20 if small else 29)
    x, y = (torch.empty(numbers, dtype=torch.bfloat16, device=device).fill_(1) for _ in range(2))
    seconds = _least(lambda: y.copy_(x), device)
    moved = 4 * numbers / seconds
    share = None if peaks is None else moved / peaks.bandwidth
    report.add(Row("copy", seconds=seconds, roofline=share, note=f"{moved / GIGABYTE:,.0f} GB/s"))
    width = 256 if small else 8192
    a, b = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = _least(lambda: a @ b, device)
    rate = 2 * width**3 / seconds
    share = None if peaks is None else rate / peaks.peak
    report.add(Row("bf16 product", seconds=seconds, roofline=share, note=f"{rate / 1e12:,.1f} TFLOP/s"))


def warm(report: Report, small: bool) -> None:
    """Compile and launch what the later stages use, in as many processes as there are cores."""
    variants = [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)]
    work = [(name, *v) for v in variants for name in CASES if v[1] == ONE or name not in ONE_WIDTH]
    with ProcessPoolExecutor(_jobs(), multiprocessing.get_context("spawn")) as pool:
        tasks = {pool.submit(_launched, *item, small): item for item in work}
        for task in as_completed(tasks):
            name, dtype, dim = tasks[task]
            label = f"{name}, {str(dtype).removeprefix('torch.')}, D = {dim}"
            report.attempt(label, _compiled, label, task)


def _compiled(label: str, task: "Future[float]") -> Row:
    return Row(label, right=True, seconds=task.result())


def _launched(name: str, dtype: torch.dtype, head_dim: int, small: bool) -> float:
    began = time.perf_counter()
    with torch.device("meta" if small else "cuda"):
        CASES[name](dtype, head_dim)
    if not small:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def correct(report: Report, small: bool) -> None:
    """Each operator against its definition in float64, twice, in memory that holds NaN; then beyond 2^31 numbers."""
    device = device_of(small)
    sizes = [(37, 16, torch.float32)]
    if not small:
        long = 8192 if torch.cuda.get_device_properties(device).total_memory > 40e9 else 4096
        sizes = [(4099, 64, torch.float32), (long, 64, torch.bfloat16), (4099, 64, torch.float16)]
        sizes.append((4099, 128, torch.bfloat16))
    for length, dim, dtype in sizes:
        problem = Problem(length, dim, device)
        about = f"{str(dtype).removeprefix('torch.')}, L = {length:,}, D = {dim}"
        for name in SMOOTH:
            report.attempt(f"{name}, {about}", check_smooth, name, problem, dtype)
    problem = Problem(sizes[0][0], sizes[0][1], device)
    for name in EXACT:
        report.attempt(f"{name}, L = {problem.length:,}", check_exact, name, problem)
    report.attempt("the last head of more than 2^31 numbers", _beyond_32_bits, device, small)


def _beyond_32_bits(device: torch.device, small: bool) -> tuple[bool, float, str] | Row:
    """Local attention of so many heads that their numbers are more than 2^31: the last head is as it is alone."""
    from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention

    heads, length, dim = (2, 37, 16) if small else (33, 1 << 19, 128)
    if not small and torch.cuda.mem_get_info(device)[0] < 64e9:
        return Row("beyond 2^31 numbers", note="not run: it needs 64 GB")
    spec = BucketedAttentionSpec(Window("chunk", 128), True, dim**-0.5, exclude_self=False)
    shape = (1, heads, length, dim)
    q, k, v, g = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4))
    found = []
    for own in (slice(None), slice(heads - 1, None)):
        leaves = [x[:, own].detach().requires_grad_() for x in (q, k, v)]
        out, _ = bucketed_attention(leaves[0], leaves[1], leaves[2], None, spec)
        found.append([x[:, -1:].clone() for x in (out.detach(), *torch.autograd.grad(out, leaves, g[:, own]))])
        del out, leaves
    right = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return right, 0.0, "" if right else "it differs from the head alone"


def tests(report: Report, small: bool) -> None:
    """The quick tests of the kernels, and of the mechanisms under each implementation; in a checkout alone."""
    if not (ROOT / "tests" / "ops").is_dir():
        raise Skipped("an installed wheel has no tests: run it in a checkout")
    paths = ["tests/ops/test_unit_keys.py"] if small else ["tests/ops", "tests/attention/test_implementations.py"]
    result = Path(report.path).with_suffix(".xml")
    words = [sys.executable, "-m", "pytest", "-q", "-m", "not kernels and not soak", "-p", "no:cacheprovider"]
    if subprocess.run([sys.executable, "-c", "import xdist"], capture_output=True).returncode == 0:
        words += ["-n", str(_jobs())]
    done = subprocess.run([*words, f"--junitxml={result}", *paths], cwd=ROOT, capture_output=True, text=True)
    if not result.exists():
        raise Skipped((done.stderr or done.stdout).strip().splitlines()[-1])
    suite = ElementTree.parse(result).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    result.unlink()
    right = counts["failures"] + counts["errors"] == 0
    report.add(Row(" ".join(paths), right=right, note=", ".join(f"{n} {name}" for name, n in counts.items())))
    if not right:
        report.log = done.stdout[-20_000:]


TINY = "from megasparse.benchmarks.gpu_check.stages import tiny; tiny({small})"


def sanitizer(report: Report, small: bool) -> None:
    """Every operator at a tiny size under NVIDIA's compute-sanitizer; on a CPU without it."""
    found = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if found is None and not small:
        raise Skipped("compute-sanitizer is not installed")
    for tool in ("memcheck", "racecheck"):
        prefix = [] if small or found is None else [found, "--tool", tool, "--error-exitcode", "9"]
        words = [*prefix, sys.executable, "-c", TINY.format(small=small)]
        began = time.perf_counter()
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        lines = (done.stdout + done.stderr).strip().splitlines()
        if done.returncode and any("Device not supported" in line for line in lines):
            raise Skipped("compute-sanitizer does not take this machine")
        note = "ran without it" if small else lines[-1]
        report.add(Row(tool, right=done.returncode == 0, seconds=time.perf_counter() - began, note=note))
        if done.returncode:
            report.log = "\n".join(lines[-100:])
        if small:
            return


def tiny(small: bool) -> None:
    """One pass of the kernels that write most, at a size that a sanitizer gets through."""
    problem = Problem(37, 16, device_of(small))
    for name in ("unit_keys", "windows_of_positions") if small else SMOOTH:
        right, error, problem_found = check_smooth(name, problem, torch.float32)
        assert right, f"{name}: {problem_found or error}"


def bench(report: Report, small: bool) -> None:
    """Attention forward and backward, beside torch's, with what was counted; then LSH and torch's at 512K."""
    from megasparse.benchmarks.gpu_check.bench import measure_attention

    for heads in (8,) if small else (8, 64):
        for length in (128,) if small else (4096, 16384, 65536):
            measure_attention(report, length, heads, small)
    if not small:
        measure_attention(report, 524288, 8, small, ("sdpa", "lsh"), repeats=1)


def train(report: Report, small: bool) -> None:
    """Steps of configs/reformer_64k, beside the same with full attention."""
    from megasparse.benchmarks.gpu_check.bench import measure_training

    measure_training(report, small)


STAGES = {
    "ceilings": Stage(20, ceilings),
    "warm": Stage(60, warm),
    "correct": Stage(90, correct),
    "tests": Stage(120, tests),
    "sanitizer": Stage(60, sanitizer),
    "bench": Stage(150, bench),
    "train": Stage(70, train),
}
"""In the order in which they run: ten minutes."""


def device_of(small: bool) -> torch.device:
    return torch.device("cpu" if small else "cuda")


def _jobs() -> int:
    return max(1, (os.cpu_count() or 1) - 2)


def _least(run: Callable[[], Any], device: torch.device) -> float:
    def forward() -> Callable[[], None]:
        run()
        return lambda: None

    return min(seconds for seconds, _ in time_passes(forward, device, 5, 2))
