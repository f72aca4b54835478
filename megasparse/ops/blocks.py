"""Sizes of the blocks of blockwise operators.

Each operator has a limit of the numbers that a block holds. Planning makes all limits smaller: a pass over 1/n of a
sequence with 1/n of the limits takes 1/n of the whole pass's memory, so it measures that memory cheaply.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_part = 1.0


def at_most(numbers: int) -> int:
    """The limit to obey now: `numbers` itself, or inside `smaller_blocks` a part of it, at least 1."""
    return max(1, round(numbers * _part))


@contextmanager
def smaller_blocks(part: float) -> Iterator[None]:
    """Multiplies every limit by `part` inside the context, in all threads: autograd has threads of its own."""
    global _part
    before, _part = _part, part
    try:
        yield
    finally:
        _part = before
