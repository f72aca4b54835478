r"""Predict what a pretraining run will take: memory, traffic, FLOPs, time, cost, and how to go further.

    megasparse plan reformer_64k --gpus 8 --gpu-memory 80GiB
    megasparse plan reformer_64k --set parallel.sequence=8 --gpus 64 --gpu-memory 80GiB --price-per-gpu-hour 2 --json
    megasparse plan llama_8b_1m --gpus 8 --gpu H100
    megasparse plan llama_8b_1m --gpus 8 --gpu H100 --timeline step.svg --slow-link 3=4
    megasparse plan decoder_64k --start runs/smollm2 --gpus 1 --gpu-memory 24GiB
    megasparse plan quickstart --gpus 1 --gpu-memory 4GiB --measure        # the code that runs on this CPU

Needs no GPU and no memory of the model's size: the GPU kernels' allocations are counted, not made. docs/scaling.md has
the formulae.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from megasparse.cli.arguments import add_config, add_start, config_from
from megasparse.config.messages import show
from megasparse.config.schema import Config
from megasparse.errors import ConfigError

DRAWN = 6
"""Ranks of a timeline at most: the first two, and those that are slow."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_start(parser)
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of all nodes together")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of one node (%(default)s)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="memory of one GPU, such as 80GiB; by default --gpu's")
    parser.add_argument(
        "--gpu", default="A100", metavar="NAME", help="A100-80GB, H100 or H200, or another with its peak"
    )
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="dense bf16 peak of one GPU")
    parser.add_argument("--mfu", type=float, default=0.3, metavar="X", help="model FLOPs utilisation to assume (0.3)")
    parser.add_argument("--network", metavar="SIZE", help="bytes/s of a node's network, such as 200GB (the default)")
    parser.add_argument("--price-per-gpu-hour", type=float, metavar="X", help="in any currency")
    parser.add_argument(
        "--measure", action="store_true", help="memory of the CPU's code, from short passes on this machine"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, FLOPs")
    parser.add_argument("--timeline", type=Path, metavar="SVG", help="draw a step's timeline by rank there")
    for slow, what in (("rank", "computes"), ("link", "exchanges")):
        parser.add_argument(
            f"--slow-{slow}", action="append", default=[], metavar="RANK=X",
            help=f"on the timeline: this rank {what} X times as long",
        )  # fmt: skip
    parser.add_argument("--host-memory", metavar="SIZE", help="on the timeline: a node's CPU memory; the rest on NVMe")


def run(args: argparse.Namespace) -> None:
    for option in ("gpus", "gpus_per_node", "mfu", "peak_tflops", "price_per_gpu_hour"):
        value = getattr(args, option)
        if value is not None and not (math.isfinite(value) and value > 0):
            name = option.replace("_", "-")
            raise ConfigError(f"--{name}", f"{show(value)} is not above 0", "Give a number above 0")
    if args.mfu > 1:
        raise ConfigError("--mfu", f"{args.mfu} is more than a GPU can reach", "Give a fraction, such as 0.3")
    config = config_from(args, Config)
    from megasparse.planning.further import longest_that_fits, pretraining_hints
    from megasparse.planning.hardware import hardware, parse_bytes
    from megasparse.planning.plan import Assumptions, Plan
    from megasparse.planning.report import as_json, assumption_lines, further_lines, lines

    gpu = hardware(args.gpu, args.peak_tflops)
    if args.network:
        gpu = replace(gpu, network=float(parse_bytes("--network", args.network)))
    on = Assumptions(
        gpu, args.gpus, args.gpus_per_node,
        parse_bytes("--gpu-memory", args.gpu_memory) if args.gpu_memory else gpu.memory, args.mfu,
        args.price_per_gpu_hour, "measured" if args.measure else "counted",
    )  # fmt: skip
    plan = Plan(config, on)
    if args.timeline is not None:
        _timeline(plan, args)
        return
    longest, changes = longest_that_fits(plan), pretraining_hints(plan)
    if args.json:
        print(json.dumps(as_json(plan, longest, changes), indent=2))
    else:
        print("\n".join([*lines(plan), *further_lines(plan, longest, changes), *assumption_lines(plan)]))


def _timeline(plan: Any, args: argparse.Namespace) -> None:
    """Draw a step, and say how long it takes."""
    from megasparse.benchmarks.timeline import draw
    from megasparse.evaluation.outputs import require_writable
    from megasparse.planning.hardware import parse_bytes
    from megasparse.planning.timeline import Circumstances, timeline

    require_writable(args.timeline)
    host = parse_bytes("--host-memory", args.host_memory) if args.host_memory else None
    ranks, links = (_slow(option, getattr(args, option), plan.on.gpus) for option in ("slow_rank", "slow_link"))
    found = timeline(plan, Circumstances(ranks, links, host))
    drawn = sorted({*range(min(2, plan.on.gpus)), *ranks, *links})[:DRAWN]
    draw(found, drawn, args.timeline)
    planned = timeline(plan).seconds
    computing = found.busy("compute", 0) / found.seconds
    about = f"as planned {planned:.4g} s; rank 0 computes {computing:.0%} of it"
    print(f"a step: {found.seconds:.4g} s, {about}; drawn in {args.timeline}")


def _slow(option: str, given: list[str], ranks: int) -> dict[int, float]:
    """Ranks, and how many times as long each takes."""
    name = f"--{option.replace('_', '-')}"
    found = {}
    for text in given:
        rank, _, factor = text.partition("=")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(name, f"{show(text)} is no rank and factor", "Write it as 3=2.5") from None
        if not 0 <= int(rank) < ranks or not 0 < float(factor) < math.inf:
            problem = f"{show(text)} names no rank below {ranks} with a factor above 0"
            raise ConfigError(name, problem, "Write it as 3=2.5")
    return found
