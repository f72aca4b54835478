"""Generate the data of ListOps as Long Range Arena has it (Nangia & Bowman 2018; Tay et al. 2021).

    megasparse listops --output data/listops
    megasparse listops --train 2000 --min-length 50 --max-length 200 --output data/small_listops

Writes basic_train.tsv, basic_val.tsv and basic_test.tsv with the columns Source and Target. Each example is a random
tree: a node is an operator with probability 1/4, and has 2 to --max-args arguments, equally likely; else, and at
--max-depth, it is a digit. Trees of --min-length tokens or fewer, of --max-length or more, and repeated ones are drawn
again; parentheses are no tokens. The operators are [MIN, [MAX, [MED (the median, rounded down) and [SM (the sum modulo
10). The same seed gives the same files.
"""

import argparse
from pathlib import Path

from megasparse.errors import ConfigError

NUMBERS = (
    ("--train", 96_000, "training examples"),
    ("--validation", 2_000, "validation examples"),
    ("--test", 2_000, "test examples"),
    ("--min-length", 500, "examples have more tokens than this"),
    ("--max-length", 2_000, "examples have fewer tokens than this"),
    ("--max-depth", 10, "nodes from the root to a digit, at most"),
    ("--max-args", 10, "arguments of an operator, at most"),
    ("--seed", 0, "seed of all draws"),
)
LEAST = {"train": 1, "validation": 1, "test": 1, "min_length": 0, "max_depth": 1, "max_args": 2, "seed": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, default, meaning in NUMBERS:
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")


def run(args: argparse.Namespace) -> None:
    for name, least in (*LEAST.items(), ("max_length", args.min_length + 2)):
        if getattr(args, name) < least:
            key = "--" + name.replace("_", "-")
            raise ConfigError(key, f"{getattr(args, name)} is too few", f"Give {least} or more")
    from megasparse.tasks.readers.long_range_arena import Sizes, write_listops

    sizes = Sizes(args.min_length, args.max_length, args.max_depth, args.max_args)
    files = {"basic_train.tsv": args.train, "basic_val.tsv": args.validation, "basic_test.tsv": args.test}
    write_listops(args.output, files, sizes, args.seed)
    print(f"{args.output}: {args.train:,} training, {args.validation:,} validation, {args.test:,} test examples")
