"""Hold the predicted memory of training steps against what two steps allocate, on the CPU.

    megasparse bench memory quickstart --lengths 512,2048                                     # a minute
    megasparse bench memory decoder_64k --start runs/smollm2 --lengths 4096,8192 --set run.device=cpu \\
      --set training.global_batch=1 --json memory.json                                        # half an hour

The prediction continues passes of a quarter of the length and shorter; the steps are whole, with initial weights.
"""

import argparse

from megasparse.cli.arguments import add_config, add_json, add_start, config_from
from megasparse.config.schema import Config
from megasparse.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_start(parser)
    parser.add_argument("--lengths", metavar="N,N", required=True, help="tokens of a sequence")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    config = config_from(args, Config)
    parts = args.lengths.split(",")
    for part in parts:
        if not (part.isdecimal() and int(part) > 0):
            raise ConfigError("--lengths", f'"{part}" is no length', "Write whole numbers with commas: 512,4096")
    from megasparse.benchmarks.memory import bench_memory

    for line in bench_memory(config, [int(part) for part in parts], args.command, args.json):
        print(line, flush=True)
