"""Time and memory of building a run's model as one rank of several, on the CPU; the other ranks are not there.

torch's fake process group, made for its own tests, stands for them: its collectives return at once, with this rank's
own numbers. Weights of ZeRO 3 are partitioned without any.
"""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megasparse.config.deepspeed_section import import_deepspeed
from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.evaluation.outputs import write_json
from megasparse.model.build import deferred_model, initial_weight
from megasparse.ops.random import RngContext
from megasparse.planning.hardware import GPUS, gigabytes
from megasparse.planning.live_bytes import LiveBytes
from megasparse.planning.measure import alone, machine, peak, reset_peak
from megasparse.planning.plan import Assumptions, Plan
from megasparse.planning.planner import with_changes
from megasparse.training.engines.build import build_engine
from megasparse.training.ranks import Ranks

CPU = torch.device("cpu")


def bench_build(config: Config, ranks: int, command: str, output: Path | None = None) -> Iterator[str]:
    """Yield lines of a Markdown table, and write the figures to `output` as JSON. ranks: of which this is the first.
    Raises ConfigError for a run that is not under ZeRO 3.
    """
    config = with_changes(config, "training", global_batch=config.training.micro_batch * ranks)
    config = with_changes(with_changes(config, "parallel", sequence=1), "run", device="cpu")
    plan = Plan(config, Assumptions(GPUS["A100"], gpus=ranks, per_node=ranks))
    if plan.zero.stage < 3:
        key, hint = "deepspeed.zero_optimization.stage", "Set it to 3, under which each rank has a piece"
        raise ConfigError(key, f"{plan.zero.stage} leaves every rank the whole model", hint)
    bucket = plan.zero.bucket * plan.passes.states.size
    found = {
        "bucket": bucket,
        "ranks": ranks,
        "weights": plan.passes.states.trained,
        "planned": sum(plan.building(on_gpu=False)),
    }
    found |= alone(_built, config, ranks)
    if output is not None:
        write_json(output, {"command": command, "machine": machine(CPU), **found})
    yield "| | |\n|---|---|"
    for name, key in (
        ("on the meta device", "meta_seconds"),
        ("its pieces, and DeepSpeed's optimizer", "build_seconds"),
    ):
        yield f"| {name} | {found[key]:.1f} s |"
    for name, key in (
        ("pieces of the weights", "pieces"),
        ("what the rank holds in the end", "held"),
        ("of it the bucket of gradients, not touched yet", "bucket"),
        ("peak, counted", "peak"),
        ("peak, resident, less what the process had before", "resident"),
        ("peak, planned", "planned"),
    ):
        yield f"| {name} | {gigabytes(found[key])} |"


def _built(config: Config, ranks: int) -> dict[str, Any]:
    """Build it, in a process of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), DS_ACCELERATOR="cpu")
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    import_deepspeed()
    before, started = reset_peak(CPU), time.perf_counter()
    model = deferred_model(config.model, config.run.seed)
    on_meta = time.perf_counter() - started
    make_rng = partial(RngContext, config.run.seed, training=True)
    initial = partial(initial_weight, config.model, config.run.seed)
    with LiveBytes() as live:
        engine = build_engine(model, config, make_rng, Ranks(0, ranks, CPU), initial=initial)
    return {
        "meta_seconds": on_meta,
        "build_seconds": time.perf_counter() - started - on_meta,
        "pieces": sum(engine.held()["weights"]),
        "held": live.live,
        "peak": live.mark(),
        "resident": peak(CPU) - before,
    }
