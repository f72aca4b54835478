r"""What ZeRO 3 costs a step with weights and optimizer in CPU memory or on a disk, at several lengths.

    python tools/bench_offload.py --config configs/reformer_64k.json --lengths 4096,65536 --nvme-path /nvme   # a GPU
    python tools/bench_offload.py --config configs/quickstart.json --lengths 512,4096 --nvme-path /tmp \
        --set model.d_model=256 --set model.d_ff=1024                                           # a CPU, minutes

One process builds the model three times, and the three take their steps in turn, on made-up tokens: what else the
machine does disturbs them alike. "none": ZeRO 3 without offload. "cpu": weights and optimizer in CPU memory. "nvme":
weights in CPU memory, optimizer on the disk, which takes 16 bytes a parameter.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from megasparse.config.command_line import config_from, config_parser
from megasparse.config.load import build_config
from megasparse.config.schema import Config
from megasparse.data.batches import Batch
from megasparse.errors import ConfigError, report_user_errors
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.planning.dry_run import dummy_records
from megasparse.training.engines.build import build_engine
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, start_ranks

WARM_UP = 2


@report_user_errors
def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    config = config_from(args, Config)
    if config.model.source is not None:
        raise ConfigError("model.kind", '"encoder_decoder" is not measured here', "Give a decoder or an encoder")
    ranks = start_ranks(config.run.model_copy(update={"engine": "deepspeed"}))
    print("| tokens | none, s a step | cpu, s | nvme, s | cpu / none | nvme / none |\n|---|---|---|---|---|---|")
    for length in lengths(args.lengths):
        print(row(length, *measure(config, length, args.nvme_path, args.steps, ranks)), flush=True)
    ranks.stop()


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = config_parser(__doc__)
    parser.add_argument("--lengths", default="512,4096,16384", metavar="N,N", help="tokens (default: %(default)s)")
    parser.add_argument("--nvme-path", type=Path, required=True, metavar="DIR", help="a folder on the disk")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="measured steps (default: %(default)s)")
    return parser.parse_args(given)


def lengths(given: str) -> list[int]:
    parts = given.split(",")
    for part in parts:
        if not part.isdecimal():
            raise ConfigError("--lengths", f'"{part}" is no length', "Write whole numbers with commas: 512,4096")
    return [int(part) for part in parts]


def measure(config: Config, length: int, disk: Path, steps: int, ranks: Ranks) -> list[list[float]]:
    """Seconds of each step without offload, with it to CPU memory, and with it to a disk."""
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(disk.absolute())}
    offloads = [
        {},
        {"offload_param": cpu, "offload_optimizer": cpu},
        {"offload_param": cpu, "offload_optimizer": nvme},
    ]
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(engine_of(config, length, offload, ranks))) for offload in offloads]
        tokens = dummy_records(config.model, 1, length, config.run.seed)
        batch = Batch(tokens, torch.arange(1), 1)
        times = [[step_seconds(engine, batch, step) for engine in engines] for step in range(WARM_UP + steps)]
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


def step_seconds(engine: Engine, batch: Batch, step: int) -> float:
    begun = time.perf_counter()
    engine.train_step([batch], step, 1e-4)
    if engine.ranks.device.type == "cuda":
        torch.cuda.synchronize(engine.ranks.device)
    return time.perf_counter() - begun


def row(length: int, none: list[float], cpu: list[float], nvme: list[float]) -> str:
    """Medians of the times, and of their ratios from step to step."""
    times = " | ".join(f"{statistics.median(column):.3g}" for column in (none, cpu, nvme))
    ratios = [statistics.median(a / b for a, b in zip(column, none, strict=True)) for column in (cpu, nvme)]
    return f"| {length:,} | {times} | {ratios[0]:.2f} | {ratios[1]:.2f} |"


if __name__ == "__main__":
    main()
