"""How large blocks of blockwise code are: each op says how many numbers one holds at most, planning makes all smaller.

A pass over a part of a sequence with blocks of the same part takes that part of the whole pass's memory, whether or not
the whole pass fills its blocks: planning/pass_memory.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_part = 1.0


def at_most(numbers: int) -> int:
    """What an op's limit is now: the limit itself, or inside `smaller_blocks` a part of it, at least 1."""
    return max(1, round(numbers * _part))


@contextmanager
def smaller_blocks(part: float) -> Iterator[None]:
    """Every limit is this part of what it is elsewhere, in all threads: autograd has its own."""
    global _part
    before, _part = _part, part
    try:
        yield
    finally:
        _part = before
