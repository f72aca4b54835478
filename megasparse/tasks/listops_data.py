"""The data of ListOps as Long Range Arena has it (Nangia & Bowman 2018; Tay et al. 2021)."""

import hashlib
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from megasparse.errors import ConfigError
from megasparse.hub.output_folder import appearing
from megasparse.tasks.readers.listops import DIGITS, END, OPERATORS

OPERATOR_PROBABILITY = 0.25
MOST_TRIES = 100_000
"""Trees drawn in a row without a new one of the right length. With the default sizes, one of 15 is."""


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


def write_listops(output: Path, numbers: dict[str, int], sizes: Sizes, seed: int) -> None:
    """Write a folder with a file for each of `numbers` (name -> examples), which no two files share.

    Raises ConfigError where there are too few different trees, HubError where `output` exists or cannot be written.
    """
    examples = distinct(random.Random(seed), sizes)
    with appearing(output) as folder, tqdm(total=sum(numbers.values()), unit="tree", disable=None) as progress:
        for name, wanted in numbers.items():
            with open(folder / name, "w", encoding="utf-8", newline="\n") as stream:
                stream.write("Source\tTarget\n")
                for _ in range(wanted):
                    source, target = next(examples)
                    stream.write(f"{source}\t{target}\n")
                    progress.update()


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
    """One tree, as text, and its value; None where it does not have the wanted length, which ends the drawing early."""
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
    """A number of 0 … number − 1. Only `random.random` is promised to stay the same in later Pythons."""
    return int(draw.random() * number)
