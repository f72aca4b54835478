"""What fits one GPU: pretrained decoders of 0.1B, 1B and 8B weights, with adapters or all weights trained.

    megasparse bench fits decoder_64k --gpu-memory 24GB,48GB,80GB --json docs/measured/decoder_fits.json   # minutes

Peaks are at the configuration's length; a cell under a GPU's memory is the longest sequence that fits it. Counted, not
measured: see megasparse plan.
"""

import argparse

from megasparse.cli.arguments import add_config, add_json, config_from
from megasparse.config.schema import Config
from megasparse.planning.hardware import parse_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--gpu-memory", default="24GB,48GB,80GB", metavar="SIZE,SIZE", help="of the GPUs (default: %(default)s)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    config = config_from(args, Config)
    memories = [parse_bytes("--gpu-memory", size) for size in args.gpu_memory.split(",")]
    from megasparse.benchmarks.fits import bench_fits

    for line in bench_fits(config, memories, args.command, args.json):
        print(line, flush=True)
