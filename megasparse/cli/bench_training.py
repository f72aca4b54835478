"""Measure tokens per second and peak memory of training steps, beside those of the same model with full attention.

    megasparse bench training reformer_64k --json training.json                   # a GPU
    megasparse bench training quickstart --set data.sequence_length=256           # a CPU, a minute

Models of one configuration, each in a process of its own, on plain torch (no ZeRO, no offloading), dummy tokens, one
micro-batch per step:

    as configured
    full, checkpointed    every layer has full attention, in ordinary blocks with activation checkpointing
    hashed layers full    full attention in place of every mechanism but local attention
    2 layers, 20 layers   as configured, but for the depth; of 2 layers each has another mechanism

"activations" is the peak before the optimizer's step beyond weights, optimizer state and gradients.
"""

import argparse

from megasparse.cli.arguments import add_config, add_json, config_from
from megasparse.config.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="measured steps (default: %(default)s)")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    config = config_from(args, Config)
    from megasparse.benchmarks.training import bench_training, report

    found = bench_training(config, args.steps, args.command, args.json)
    print("\n".join(report(found, config)))
