"""What ZeRO 3 costs a step with weights and optimizer in CPU memory or on a disk, at several lengths.

One process builds the model three times, and the three take their steps in turn, so that what else the machine does
disturbs them alike.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from megasparse.benchmarks.training import step_seconds
from megasparse.config.load import build_config
from megasparse.config.schema import Config
from megasparse.data.batches import Batch
from megasparse.errors import ConfigError
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.planning.dry_run import dummy_records
from megasparse.training.engines.build import build_engine
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, start_ranks

WARM_UP = 2


def bench_offload(config: Config, lengths: Sequence[int], disk: Path, steps: int) -> Iterator[str]:
    """Measure `steps` steps at every length; yield the rows of a Markdown table. Raises ConfigError."""
    if config.model.source is not None:
        raise ConfigError("model.kind", '"encoder_decoder" is not measured here', "Give a decoder or an encoder")
    ranks = start_ranks(config.run.model_copy(update={"engine": "deepspeed"}))
    yield "| tokens | none, s a step | cpu, s | nvme, s | cpu / none | nvme / none |\n|---|---|---|---|---|---|"
    for length in lengths:
        yield row(length, *measure(config, length, disk, steps, ranks))
    ranks.stop()


def measure(config: Config, length: int, disk: Path, steps: int, ranks: Ranks) -> list[list[float]]:
    """Seconds of each step without offload, with it to CPU memory, and with it to a disk."""
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(disk.absolute())}
    offloads = [{}, {"offload_param": cpu, "offload_optimizer": cpu}, {"offload_param": cpu, "offload_optimizer": nvme}]
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(engine_of(config, length, offload, ranks))) for offload in offloads]
        tokens = dummy_records(config.model, 1, length, config.run.seed)
        batch = Batch(tokens, torch.arange(1), 1)
        times = [[step_seconds(engine, batch, step, 1e-4) for engine in engines] for step in range(WARM_UP + steps)]
    return [list(column) for column in zip(*times[WARM_UP:], strict=True)]


def engine_of(config: Config, length: int, offload: dict[str, Any], ranks: Ranks) -> Engine:
    values = config.model_dump(mode="json")
    values["model"]["max_length"] = values["data"]["sequence_length"] = length
    values["training"] |= {"global_batch": ranks.world_size, "micro_batch": 1}
    values["deepspeed"]["zero_optimization"] = {"stage": 3, **offload}
    changed = build_config(values)
    seed = changed.run.seed
    return build_engine(
        build_model(changed.model, seed), changed, lambda step, samples: RngContext(seed, step, samples, True), ranks
    )


def row(length: int, none: list[float], cpu: list[float], nvme: list[float]) -> str:
    """Medians of the times, and of their ratios from step to step."""
    times = " | ".join(f"{statistics.median(column):.3g}" for column in (none, cpu, nvme))
    ratios = [statistics.median(a / b for a, b in zip(column, none, strict=True)) for column in (cpu, nvme)]
    return f"| {length:,} | {times} | {ratios[0]:.2f} | {ratios[1]:.2f} |"
