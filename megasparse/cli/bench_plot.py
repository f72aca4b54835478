"""Draw time and memory of attention against length, as `megasparse bench attention --json` measured them.

megasparse bench plot docs/measured/attention_cpu.json --output docs/pictures/attention.svg
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("measured", type=Path, metavar="JSON", help="what `megasparse bench attention --json` wrote")
    parser.add_argument("--output", type=Path, required=True, metavar="SVG", help="the picture to write")


def run(args: argparse.Namespace) -> None:
    from megasparse.benchmarks.picture import draw, read

    draw(read(args.measured), args.output)
    print(f"{args.output} written")
