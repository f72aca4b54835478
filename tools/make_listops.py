"""Make the data of ListOps as Long Range Arena has it (Nangia & Bowman 2018; Tay et al. 2021).

    python tools/make_listops.py --output data/listops

writes basic_train.tsv, basic_val.tsv and basic_test.tsv with the columns Source and Target. Each example is a tree
drawn at random: a node is an operator with probability 1/4, and has 2 to --max-args arguments, as likely; else, and at
--max-depth, it is a digit. Trees of --min-length tokens or fewer, of --max-length or more, and those drawn before are
drawn again; parentheses are no tokens. The operators are [MIN, [MAX, [MED (the median, rounded down) and [SM (the sum
modulo 10). The same seed makes the same files.
"""

import argparse
import hashlib
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from megasparse.errors import ConfigError, report_user_errors
from megasparse.hub.output_folder import appearing
from megasparse.tasks.readers.listops import DIGITS, END, OPERATORS

OPERATOR_PROBABILITY = 0.25
MOST_TRIES = 100_000
"""Trees drawn in a row without a new one of the right length. By default one of 15 is."""


class Sizes(NamedTuple):
    """Which trees are examples."""

    min_length: int
    max_length: int
    """Tokens between these two, which are excluded."""
    max_depth: int
    """Nodes from the root to a digit, both included, at most."""
    max_args: int


class Open(NamedTuple):
    """An operator of which not all arguments are drawn yet."""

    operator: str
    arguments: int
    values: list[int]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make_listops.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = (
        ("--train", 96_000, "training examples"),
        ("--validation", 2_000, "validation examples"),
        ("--test", 2_000, "test examples"),
        ("--min-length", 500, "examples have more tokens than this"),
        ("--max-length", 2_000, "examples have fewer tokens than this"),
        ("--max-depth", 10, "nodes from the root to a digit, at most"),
        ("--max-args", 10, "arguments of an operator, at most"),
        ("--seed", 0, "of all draws"),
    )
    for option, default, what in numbers:
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    return parser


@report_user_errors
def main(arguments: Sequence[str] | None = None) -> None:
    given = build_parser().parse_args(arguments)
    least = {"train": 1, "validation": 1, "test": 1, "min_length": 0, "max_depth": 1, "max_args": 2, "seed": 0}
    for name, number in (*least.items(), ("max_length", given.min_length + 2)):
        if getattr(given, name) < number:
            key = "--" + name.replace("_", "-")
            raise ConfigError(key, f"{getattr(given, name)} is too few", f"Give {number} or more")
    sizes = Sizes(given.min_length, given.max_length, given.max_depth, given.max_args)
    examples = distinct(random.Random(given.seed), sizes)
    files = {"basic_train.tsv": given.train, "basic_val.tsv": given.validation, "basic_test.tsv": given.test}
    with appearing(given.output) as folder, tqdm(total=sum(files.values()), unit="tree", disable=None) as progress:
        for name, wanted in files.items():
            with open(folder / name, "w", encoding="utf-8", newline="\n") as stream:
                stream.write("Source\tTarget\n")
                for _ in range(wanted):
                    source, target = next(examples)
                    stream.write(f"{source}\t{target}\n")
                    progress.update()
    print(f"{given.output}: {given.train:,} training, {given.validation:,} validation, {given.test:,} test examples")


def distinct(draw: random.Random, sizes: Sizes) -> Iterator[tuple[str, int]]:
    """Source and target of one example after another, none twice. Raises ConfigError where no more are found."""
    seen = set()
    tries = 0
    while tries < MOST_TRIES:
        tries += 1
        if (example := tree(draw, sizes)) is None:
            continue
        digest = hashlib.blake2b(example[0].encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            tries = 0
            yield example
    problem = f"{sizes.max_length}, with the other options, leaves too few trees: {len(seen):,} were found"
    raise ConfigError("--max-length", problem, "Allow more lengths, more depth or more arguments, or ask for fewer")


def tree(draw: random.Random, sizes: Sizes) -> tuple[str, int] | None:
    """One tree, as text, and its value; None where it has not the length wanted, which ends the drawing early."""
    parts: list[str] = []
    length = 0
    unfinished: list[Open] = []
    while length < sizes.max_length:
        if len(unfinished) + 1 < sizes.max_depth and draw.random() < OPERATOR_PROBABILITY:
            arguments = 2 + _below(draw, sizes.max_args - 1)
            operator = OPERATORS[_below(draw, len(OPERATORS))]
            parts += ["("] * (arguments + 1) + [operator]
            unfinished.append(Open(operator, arguments, []))
            length += 2  # its end too
            continue
        value = _below(draw, len(DIGITS))
        parts.append(DIGITS[value])
        length += 1
        while unfinished:
            last = unfinished[-1]
            parts.append(")")
            last.values.append(value)
            if len(last.values) < last.arguments:
                break
            parts += [END, ")"]
            value = evaluate(last.operator, last.values)
            unfinished.pop()
        if not unfinished:
            return (" ".join(parts), value) if sizes.min_length < length < sizes.max_length else None
    return None


def evaluate(operator: str, values: Sequence[int]) -> int:
    """The value of an operator of OPERATORS on digits, itself a digit."""
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[MED":
        return int(statistics.median(values))
    return sum(values) % 10


def _below(draw: random.Random, number: int) -> int:
    """A number of 0 … number − 1. Of Python's draws only `random` is promised to stay the same in later versions."""
    return int(draw.random() * number)


if __name__ == "__main__":
    main()
