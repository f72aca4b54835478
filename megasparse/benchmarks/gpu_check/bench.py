"""Attention and training steps on this GPU, beside torch's flash attention and beside what was counted.

B batch, H heads, L length.
"""

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType

from megasparse.benchmarks.attention import DTYPES, MECHANISMS, Case, build, model_of
from megasparse.benchmarks.gpu_check.report import Report, Row
from megasparse.benchmarks.launch_counts import Counts, count_step, total
from megasparse.benchmarks.launches import count_layer, seconds
from megasparse.benchmarks.training import models, step_seconds
from megasparse.config.load import build_config, load_config
from megasparse.config.schema import Config
from megasparse.planning.dry_run import trial_engine
from megasparse.planning.measure import peak, reset_peak, time_passes
from megasparse.planning.plan import GPUS, RESERVE, Plan, peaks_of
from megasparse.training.ranks import start_ranks

IMPLEMENTATIONS = ("sdpa", "lsh", "local", "yoso", "lha", "smart_bird")
PROFILED = (65536, 8)
"""Length and batch × heads of which the time of each kernel is kept."""
STEPS = 3
LONGEST = 12
"""Kernels that a row lists."""


def measure_attention(
    report: Report,
    length: int,
    heads: int,
    small: bool,
    implementations: Sequence[str] = IMPLEMENTATIONS,
    repeats: int = 5,
) -> None:
    """Add a row for each implementation: heads of 64 in sequences of 8 heads, a window of 128, 2 rounds, bf16."""
    device = "cpu" if small else "cuda"
    flash: list[float] = []
    for name in implementations:
        kind = MECHANISMS.get(name, "full")
        model = model_of(kind, length, 2 if small else 8, 16 if small else 64, 2, 32 if small else 128)
        case = Case(name, model, heads // 8, "fp32" if small else "bf16", device, 1 if small else repeats, 0)
        what = f"{name}, {length:,} tokens, batch × heads = {heads}"
        report.attempt(what, _attention, what, case, flash)
        gc.collect()
        if not small:
            torch.cuda.empty_cache()


def _attention(what: str, case: Case, flash: list[float]) -> Row:
    device, length = torch.device(case.device), case.model.max_length
    run, note = build(case, device)
    before = reset_peak(device)
    both = statistics.median(s for _, s in time_passes(run, device, case.repeats, 1 if case.repeats == 1 else 2))
    row = Row(what, seconds=both, peak=peak(device) - before, note=note)
    if case.implementation == "sdpa":
        flash.append(both)
    if flash:
        row.flash = flash[0] / both
    if case.implementation in MECHANISMS:
        counts = total(count_layer(MECHANISMS[case.implementation], case.model, case.batch, DTYPES[case.dtype]))
        _beside(row, counts, device)
    if (length, case.batch * case.model.heads) == PROFILED:
        row.launches, row.kernels = profiled(lambda: run()())
    return row


def measure_training(report: Report, small: bool) -> None:
    """Add a row for configs/reformer_64k, and one for it with full attention in place of hashes."""
    overrides = ["data.sequence_length=256", "model.max_length=256"] if small else []
    config = load_config("quickstart" if small else "reformer_64k", overrides)
    full = build_config(models(config)["hashed layers full"])
    report.attempt("step as configured", _training, "step as configured", config, small)
    report.attempt("step, hashed layers full", _training, "step, hashed layers full", full, small, 1)
    rows = report.rows
    if not small and all(row.seconds for row in rows):
        rows[0].note += f"; {rows[1].seconds / rows[0].seconds:.2f} × the tokens/s of full attention"  # type: ignore[operator]
        report.write()


def _training(what: str, config: Config, small: bool, steps: int = STEPS) -> Row:
    ranks = start_ranks(config.run.model_copy(update={"engine": "torch", "device": "cpu" if small else "cuda"}))
    before = reset_peak(ranks.device)
    engine, batch = trial_engine(config, ranks)

    def step(number: int = 0) -> float:
        return step_seconds(engine, batch, number, config.optimizer.learning_rate)

    middle = statistics.median([step(number) for number in range(1 + steps)][1:])
    tokens = config.training.micro_batch * config.data.sequence_length
    row = Row(what, seconds=middle, peak=peak(ranks.device) - before, note=f"{tokens / middle:,.0f} tokens/s")
    counts = total(count_step(config))
    _beside(row, counts, ranks.device)
    alone = config.model_copy(update={"run": config.run.model_copy(update={"engine": "torch"})})
    row.counted_peak = Plan(alone, GPUS["H200"]).peak - RESERVE
    if not small:
        row.launches, row.kernels = profiled(step)
    engine.close()
    return row


def _beside(row: Row, counts: Counts, device: torch.device) -> None:
    """Add what was counted of a pass."""
    row.counted_launches = counts.launches
    gpu = None if device.type == "cpu" else peaks_of(torch.cuda.get_device_name(device))
    row.counted = None if gpu is None else seconds(counts, gpu)


def profiled(run: Callable[[], Any]) -> tuple[int, list[tuple[str, int, float]]]:
    """Number of kernels that the GPU runs, and those that take longest: name, launches, seconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    found = [event for event in profile.key_averages() if event.device_type == DeviceType.CUDA]
    ranked = sorted(found, key=lambda event: event.self_device_time_total, reverse=True)
    longest = [(event.key[:120], event.count, event.self_device_time_total / 1e6) for event in ranked[:LONGEST]]
    return sum(event.count for event in found), longest
