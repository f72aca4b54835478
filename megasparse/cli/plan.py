r"""Predict what a pretraining run will take: memory, traffic, FLOPs, time, cost, and how to go further.

    megasparse plan reformer_64k --gpus 8 --gpu-memory 80GiB
    megasparse plan reformer_64k --set parallel.sequence=8 --gpus 64 --gpu-memory 80GiB --price-per-gpu-hour 2 --json
    megasparse plan llama_8b_1m --gpus 8 --gpu H100
    megasparse plan decoder_64k --start runs/smollm2 --gpus 1 --gpu-memory 24GiB
    megasparse plan quickstart --gpus 1 --gpu-memory 4GiB --measure        # the code that runs on this CPU

Needs no GPU and no memory of the model's size: the GPU kernels' allocations are counted, not made. docs/scaling.md has
the formulae.
"""

import argparse
import json
import math
from dataclasses import replace

from megasparse.cli.arguments import add_config, add_start, config_from
from megasparse.config.messages import show
from megasparse.config.schema import Config
from megasparse.errors import ConfigError


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
    longest, changes = longest_that_fits(plan), pretraining_hints(plan)
    if args.json:
        print(json.dumps(as_json(plan, longest, changes), indent=2))
    else:
        print("\n".join([*lines(plan), *further_lines(plan, longest, changes), *assumption_lines(plan)]))
