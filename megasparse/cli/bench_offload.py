"""Measure what ZeRO 3 costs per step with weights and optimizer in CPU memory or on a disk, at several lengths.

    megasparse bench offload reformer_64k --lengths 4096,65536 --nvme-path /nvme                  # a GPU
    megasparse bench offload quickstart --lengths 512,4096 --nvme-path /tmp \\
      --set model.d_model=256 --set model.d_ff=1024                                               # a CPU, minutes

One process builds the model three times, and the three take their steps in turn, on dummy tokens: what else the
machine does disturbs them alike. "none": ZeRO 3 without offload. "cpu": weights and optimizer in CPU memory. "nvme":
weights in CPU memory, optimizer on the disk, which takes 16 bytes a parameter.
"""

import argparse
from pathlib import Path

from megasparse.cli.arguments import add_config, config_from
from megasparse.config.schema import Config
from megasparse.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--lengths", default="512,4096,16384", metavar="N,N", help="tokens (default: %(default)s)")
    parser.add_argument("--nvme-path", type=Path, required=True, metavar="DIR", help="a folder on the disk")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="measured steps (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    config = config_from(args, Config)
    parts = args.lengths.split(",")
    for part in parts:
        if not part.isdecimal():
            raise ConfigError("--lengths", f'"{part}" is no length', "Write whole numbers with commas: 512,4096")
    from megasparse.benchmarks.offload import bench_offload

    for line in bench_offload(config, [int(part) for part in parts], args.nvme_path, args.steps):
        print(line, flush=True)
