"""Predicted memory of training steps, beside what they allocate: on the CPU, in one process on plain torch."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.evaluation.outputs import write_json
from megasparse.ops.positions import kept_sinusoids
from megasparse.planning.dry_run import trial_engine
from megasparse.planning.hardware import GPUS, gigabytes
from megasparse.planning.measure import machine
from megasparse.planning.plan import Assumptions, Plan
from megasparse.planning.planner import with_changes
from megasparse.training.ranks import start_ranks

STEPS = 2
"""The optimizer's state is made at the end of the first."""


def bench_memory(config: Config, lengths: Sequence[int], command: str, output: Path | None = None) -> Iterator[str]:
    """Yield the rows of a Markdown table, one a length, and write them to `output` as JSON after each. Raises
    ConfigError for a run that is not on the CPU, or a length that the model has not.
    """
    config = with_changes(config, "run", engine="torch")
    device = start_ranks(config.run).device
    if device.type != "cpu":
        raise ConfigError("run.device", f"{device}, where torch's profiler counts otherwise", 'Set it to "cpu"')
    for length in lengths:
        if length > config.model.max_length:
            problem = f"{length} is longer than model.max_length = {config.model.max_length}"
            raise ConfigError("--lengths", problem, "Raise model.max_length, or leave it out")
    rows: list[dict[str, Any]] = []
    yield "| tokens | predicted | from passes of | allocated | difference |\n|---|---|---|---|---|"
    for length in lengths:
        whole = with_changes(config, "data", sequence_length=length)
        predicted, allocated, longest = predicted_and_allocated(whole)
        rows.append({"tokens": length, "predicted": predicted, "longest_pass": longest, "allocated": allocated})
        if output is not None:
            write_json(output, {"command": command, "machine": machine(device), "rows": rows})
        sizes = f"{gigabytes(predicted)} | {longest:,} | {gigabytes(allocated)} | {predicted / allocated - 1:+.1%}"
        yield f"| {length:,} | {sizes} |"


def predicted_and_allocated(config: Config) -> tuple[int, int, int]:
    """Bytes at the peak of two steps on plain torch, weights, gradients and optimizer state included: predicted, and
    allocated as torch's profiler counts it, kernels' scratch memory included. And the longest pass, in tokens, that the
    prediction took.
    """
    kept_sinusoids.cache_clear()  # tables of an earlier model would be missed here, and freed in the profile
    plan = Plan(config, Assumptions(GPUS["A100"], path="measured"))
    predicted, longest = plan.peak, max(plan.passes.lengths)
    del plan
    kept_sinusoids.cache_clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine, batch = trial_engine(config, start_ranks(config.run))
        for step in range(STEPS):
            engine.train_step([batch] * (config.training.global_batch // config.training.micro_batch), step, 1e-3)
    engine.close()
    return predicted, allocated_peak(profiled), longest


def allocated_peak(profiled: Any) -> int:
    """The largest number of bytes allocated at a time since the profiler began."""
    records = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = accumulate(event.nbytes() for event in sorted(records, key=lambda event: event.start_ns()))
    return max(live)
