r"""Predict what a pretraining run will take: memory, FLOPs, seconds by part, and the longest sequence that fits.

    megasparse plan reformer_64k --gpus 8 --gpu-memory 80GiB
    megasparse plan reformer_64k --set parallel.sequence=8 --gpus 64 --gpu-memory 80GiB --json
    megasparse plan llama_8b_1m --gpus 8 --gpu H100
    megasparse plan decoder_64k --start runs/smollm2 --gpus 1 --gpu-memory 24GiB

Needs no GPU and no memory of the model's size: the GPU kernels' allocations are counted, not made. docs/scaling.md has
the formulae.
"""

import argparse
import json
import math

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
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, FLOPs")


def run(args: argparse.Namespace) -> None:
    for option in ("gpus", "gpus_per_node", "peak_tflops"):
        value = getattr(args, option)
        if value is not None and not (math.isfinite(value) and value > 0):
            name = option.replace("_", "-")
            raise ConfigError(f"--{name}", f"{show(value)} is not above 0", "Give a number above 0")
    config = config_from(args, Config)
    from megasparse.planning.plan import Plan, hardware, parse_bytes

    memory = parse_bytes("--gpu-memory", args.gpu_memory) if args.gpu_memory else None
    plan = Plan(config, hardware(args.gpu, args.peak_tflops), args.gpus, args.gpus_per_node, memory)
    print(json.dumps(plan.as_json(), indent=2) if args.json else "\n".join(plan.lines()))
