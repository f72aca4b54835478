"""ListOps (Nangia & Bowman 2018) in Long Range Arena's version: its tokens, and its generator.

An example is a tree of MIN, MAX, MED and SM over digits, such as `( ( ( [MAX 2 ) 9 ) ] )`. The parentheses are
redundant and omitted. The remaining tokens are 0-9, [MIN, [MAX, [MED, [SM and ], at most 1,999, as Tay et al. (2021)
describe the task. Their published input pipeline also dropped every bracket, an error by its authors.
"""

import hashlib
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from megasparse.errors import ConfigError

DIGITS = tuple("0123456789")
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
"""Operators from digits to a digit."""
END = "]"
TOKENS = (*DIGITS, *OPERATORS, END)
"""Tokens by id."""
IDS = {token: number for number, token in enumerate(TOKENS)}
PARENTHESES = ("(", ")")


def token_ids(row: dict[str, Any]) -> np.ndarray:
    """Return the token ids of the column Source, int64 (L,). Raises ValueError for an unknown token."""
    tokens = [token for token in row["Source"].split() if token not in PARENTHESES]
    if unknown := [token for token in tokens if token not in IDS]:
        raise ValueError(f'unknown token "{unknown[0][:80]}" in Source; ListOps has ( ) {" ".join(TOKENS)}')
    return np.array([IDS[token] for token in tokens], dtype=np.int64)


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
    from megasparse.hub.tensor_file import appearing

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
            parts += [END, ")"]
            value = OPERATORS[operator](values)
            unfinished.pop()
        if not unfinished:
            return (" ".join(parts), value) if sizes.min_length < length < sizes.max_length else None
    return None


def _below(draw: random.Random, number: int) -> int:
    """Draw from 0 … number − 1. Only `random.random` is guaranteed to be the same in later versions of Python."""
    return int(draw.random() * number)
