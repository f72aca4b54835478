"""Generate the data of ListOps as in Long Range Arena (Nangia & Bowman 2018; Tay et al. 2021).

    python tools/listops.py --output data/listops
    python tools/listops.py --train 2000 --min-length 50 --max-length 200 --output data/small_listops

Writes basic_train.tsv, basic_val.tsv and basic_test.tsv with the columns Source and Target. Each example is a random
tree such as `( ( ( [MAX 2 ) 9 ) ] )`. A node is an operator with probability 1/4, with 2 to --max-args arguments,
equally likely; otherwise, and at --max-depth, it is a digit. Trees of at most --min-length or at least --max-length
tokens (not counting parentheses) and duplicates are drawn again. The operators are [MIN, [MAX, [MED (the median,
rounded down) and [SM (the sum modulo 10). The same seed gives the same files.
"""

import argparse
import hashlib
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megasparse.errors import ConfigError, report_user_errors, whole
from megasparse.tasks.catalog import DIGITS

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
"""Operators from digits to a digit."""
OPERATOR_PROBABILITY = 0.25
MOST_TRIES = 100_000
"""Trees drawn in a row without a new one of the right length. With the default sizes, one in 15 is."""


class Sizes(NamedTuple):
    """Sizes of the trees in examples."""

    min_length: int
    max_length: int
    """Bounds of the number of tokens, both exclusive."""
    max_depth: int
    """Largest number of nodes from the root to a digit, both included."""
    max_args: int


def write_listops(output: Path, numbers: dict[str, int], sizes: Sizes, seed: int) -> None:
    """Write a folder with one file for each of `numbers` (name -> examples), without examples in common.

    Raises ConfigError if there are too few different trees, HubError if `output` exists or cannot be written.
    """
    from megasparse.hub.tensor_file import appearing  # slow: imports torch

    examples = distinct(random.Random(seed), sizes)
    with appearing(output) as folder, tqdm(total=sum(numbers.values()), unit="tree", disable=None) as progress:
        for name, count in numbers.items():
            with open(folder / name, "w", encoding="utf-8", newline="\n") as stream:
                stream.write("Source\tTarget\n")
                for _ in range(count):
                    source, target = next(examples)
                    stream.write(f"{source}\t{target}\n")
                    progress.update()


def distinct(draw: random.Random, sizes: Sizes) -> Iterator[tuple[str, int]]:
    """Yield source and target of distinct examples. Raises ConfigError if no more are found."""
    digests = set()
    tries = 0
    while tries < MOST_TRIES:
        tries += 1
        if (example := tree(draw, sizes)) is None:
            continue
        digest = hashlib.blake2b(example[0].encode(), digest_size=16).digest()
        if digest not in digests:
            digests.add(digest)
            tries = 0
            yield example
    problem = f"{sizes.max_length}, with the other options, allows too few trees: {len(digests):,} were found"
    raise ConfigError("--max-length", problem, "Allow more lengths, depth or arguments, or request fewer trees")


def tree(draw: random.Random, sizes: Sizes) -> tuple[str, int] | None:
    """Draw one tree as text, and its value; None if its length is out of bounds, which ends the drawing early."""
    parts: list[str] = []
    length = 0
    unfinished: list[tuple[str, int, list[int]]] = []  # operators, their numbers of arguments, their values so far
    while length < sizes.max_length:
        if len(unfinished) + 1 < sizes.max_depth and draw.random() < OPERATOR_PROBABILITY:
            arguments = 2 + _below(draw, sizes.max_args - 1)
            operator = [*OPERATORS][_below(draw, len(OPERATORS))]
            parts += ["("] * (arguments + 1) + [operator]
            unfinished.append((operator, arguments, []))
            length += 2  # with its end
            continue
        value = _below(draw, len(DIGITS))
        parts.append(DIGITS[value])
        length += 1
        while unfinished:
            operator, arguments, values = unfinished[-1]
            parts.append(")")
            values.append(value)
            if len(values) < arguments:
                break
            parts += ["]", ")"]
            value = OPERATORS[operator](values)
            unfinished.pop()
        if not unfinished:
            return (" ".join(parts), value) if sizes.min_length < length < sizes.max_length else None
    return None


def _below(draw: random.Random, number: int) -> int:
    """Draw from 0 … number − 1. Only `random.random` is guaranteed to be the same in later versions of Python."""
    return int(draw.random() * number)


NUMBERS = {
    "train": (96_000, 1, "training examples"),
    "validation": (2_000, 1, "validation examples"),
    "test": (2_000, 1, "test examples"),
    "min_length": (500, 0, "examples have more tokens than this"),
    "max_length": (2_000, 2, "examples have fewer tokens than this"),
    "max_depth": (10, 1, "most nodes from the root to a digit"),
    "max_args": (10, 2, "most arguments of an operator"),
    "seed": (0, 0, "seed of all draws"),
}
"""Option of listops -> (default, least value, meaning)."""


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, _, meaning) in NUMBERS.items():
        option, help = f"--{name.replace('_', '-')}", f"{meaning} (default: %(default)s)"
        parser.add_argument(option, type=whole, default=default, metavar="N", help=help)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    args = parser.parse_args(words)
    for name, (_, least, _) in NUMBERS.items():
        least += args.min_length if name == "max_length" else 0
        if getattr(args, name) < least:
            key = f"--{name.replace('_', '-')}"
            raise ConfigError(key, f"{getattr(args, name)} is too few", f"Give {least} or more")
    sizes = Sizes(args.min_length, args.max_length, args.max_depth, args.max_args)
    files = {"basic_train.tsv": args.train, "basic_val.tsv": args.validation, "basic_test.tsv": args.test}
    write_listops(args.output, files, sizes, args.seed)
    print(f"{args.output}: {args.train:,} training, {args.validation:,} validation, {args.test:,} test examples")


if __name__ == "__main__":
    main()
