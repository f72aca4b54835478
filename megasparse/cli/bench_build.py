"""Measure what building a run's model under ZeRO 3 takes of one rank, in time and memory of the host.

    megasparse bench build quickstart --ranks 8 --set deepspeed.zero_optimization.stage=3            # seconds
    megasparse bench build llama_8b_1m --ranks 8 --json docs/measured/build.json                     # 16 GB, minutes

On the CPU, in bytes of every tensor that exists and as resident memory. No other rank is started.
"""

import argparse

from megasparse.cli.arguments import add_config, add_json, config_from, positive
from megasparse.config.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--ranks", type=positive, default=8, metavar="N", help="ranks in all (default: %(default)s)")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    config = config_from(args, Config)
    from megasparse.benchmarks.build import bench_build

    for line in bench_build(config, args.ranks, args.command, args.json):
        print(line, flush=True)
