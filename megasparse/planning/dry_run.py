"""A few trial steps of a configuration on synthetic tokens, in one process."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megasparse.config.schema import Config
from megasparse.data.batches import Batch
from megasparse.model.adapters import add_adapters, quantise_layers
from megasparse.model.build import build_model
from megasparse.model.encoder import Encoder
from megasparse.ops.random import RngContext
from megasparse.planning.flops import model_flops_per_token
from megasparse.planning.hardware import GPUS
from megasparse.planning.passes import dummy_records
from megasparse.planning.plan import Plan, duration
from megasparse.system import process_status, usable_cores
from megasparse.training.engines import build_engine
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, start_ranks
from megasparse.training.reporting.memory import peak_bytes, resident_bytes, trim_memory


@dataclass(frozen=True)
class DryRun:
    """Measurements of the trial steps."""

    parameters: int
    flops_per_step: float
    """Of a complete step of `training.global_batch` sequences."""
    peak_bytes: int
    """Peak of the step, gradients and optimizer state included, and of longer windows of evaluation."""
    seconds: float
    """The median of warm steps of one micro-batch."""
    ranks: int
    """Processes that this machine runs under torchrun, as many as share the batch evenly."""
    rank_seconds: float
    """Seconds of the step in such a process on one core."""
    loss: float
    """Of the untrained model, in nats per token."""
    device: str

    def lines(self, config: Config) -> str:
        data, training = config.data, config.training
        micro_batches = training.steps * training.global_batch // training.micro_batch
        time_of = f"about {duration(self.seconds * micro_batches)} in one process"
        if self.ranks > 1:
            together = duration(self.rank_seconds * micro_batches / self.ranks)
            time_of += f", {together} with torchrun --nproc-per-node {self.ranks}"
        step = f"{training.global_batch} sequences of {data.sequence_length:,} tokens"
        kind = "GPU memory" if self.device.startswith("cuda") else "resident memory, beyond the process before the step"
        return "\n".join(
            [
                f"parameters       {self.parameters:,}",
                f"FLOPs per step   {self.flops_per_step:.3g} ({step})",
                f"peak memory      {self.peak_bytes / 1e9:.2f} GB of {kind}, in one process without ZeRO",
                f"time             {self.seconds:.2g} s for a micro-batch of {training.micro_batch} on {self.device}",
                f"training         {training.steps:,} steps on this machine: {time_of}, at its present load",
                f"loss             {self.loss:.3f} nats per token, untrained",
            ]
        )


def dry_run_report(config: Config, gpus: int | None = None) -> Iterator[str]:
    """Yield the report of trial steps on this machine, which may take minutes, then the plan for `gpus` A100s."""
    yield "trial steps on synthetic data, on this machine:"
    yield dry_run(config).lines(config)
    if gpus is not None:
        plan = Plan(config, GPUS["A100"], gpus, 8).lines()
        yield "\n".join(["", "planned for A100 GPUs, see megasparse plan:", *plan])


WARM_STEPS, MOST_SECONDS = 5, 20.0
"""Warm steps to time, and seconds after which no further one starts."""


def dry_run(config: Config) -> DryRun:
    """Run a few optimizer steps on a micro-batch of synthetic records, in this process on plain torch. The first step,
    in which memory is allocated, is not timed, unless it takes more than MOST_SECONDS.
    """
    ranks = start_ranks(config.run.changed(engine="torch"))
    before = reset_peak(ranks.device)
    engine, batch = trial_engine(config, ranks)
    parameters = sum(p.numel() for p in engine.module.parameters())
    rate, losses = config.optimizer.learning_rate, list[float]()

    def timed(count: int) -> list[float]:
        seconds: list[float] = []
        while len(seconds) < count and sum(seconds) < MOST_SECONDS:
            started = time.perf_counter()
            losses.append(engine.train_step([batch], len(losses), rate).loss)
            seconds.append(time.perf_counter() - started)
        return seconds

    first, *warm = timed(1 + WARM_STEPS)
    seconds = statistics.median(warm or [first])
    is_gpu, threads = ranks.device.type == "cuda", torch.get_num_threads()
    processes = torch.cuda.device_count() if is_gpu else usable_cores()
    micro_batches = config.training.global_batch // config.training.micro_batch
    together = max(
        number for number in range(1, micro_batches + 1) if micro_batches % number == 0 and number <= processes
    )
    rank_seconds = seconds
    if together > 1 and threads > 1 and not is_gpu:
        torch.set_num_threads(1)
        rank_seconds = statistics.median(timed(WARM_STEPS))
        torch.set_num_threads(threads)
    tokens_per_step = config.training.global_batch * config.data.sequence_length
    flops = model_flops_per_token(config.model, config.data.sequence_length) * tokens_per_step
    if config.evaluation.every and (length := config.evaluation_length) > config.data.sequence_length:
        engine.evaluate(dummy_records(config.model, 1, length, config.run.seed), RngContext.evaluation(0, 1))
    peak_bytes = peak(ranks.device) - before
    engine.close()
    return DryRun(parameters, flops, peak_bytes, seconds, together, rank_seconds, losses[0], str(ranks.device))


def trial_engine(config: Config, ranks: Ranks) -> tuple[Engine, Batch]:
    micro = config.training.micro_batch
    config = config.changed(run={"engine": "torch"}, training={"global_batch": micro})
    seed = config.run.seed
    model = build_model(config.model, seed)
    if isinstance(model, Encoder) and config.model.masking.whole_words:
        model.set_word_starts(torch.ones(config.model.vocabulary, dtype=torch.bool))
    if config.lora is not None:
        add_adapters(model, config.lora, seed)
        dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
        quantise_layers(model, config.lora, dtype, ranks.device)
    engine = build_engine(model, config, lambda step, samples: RngContext(seed, step, samples, True), ranks)
    tokens = dummy_records(config.model, micro, config.data.sequence_length, seed)
    return engine, Batch(tokens, torch.arange(micro))


def reset_peak(device: torch.device) -> int:
    """Reset the measurement of the peak and return the bytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    trim_memory()
    with contextlib.suppress(OSError):  # if the kernel does not allow it, earlier peaks of the process are included
        Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes()


def peak(device: torch.device) -> int:
    """Return the largest number of bytes in use since the reset."""
    if device.type != "cuda":
        with contextlib.suppress(OSError):  # macOS, Windows; `peak_bytes` includes the parent process's on Linux
            return 1024 * int(process_status("VmHWM").split()[0])
    return peak_bytes(device)
