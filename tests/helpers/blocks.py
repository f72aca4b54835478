"""Smaller blocks of the operators, so that short sequences fill several of them."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_SIZES = re.compile(r"_?[A-Z_]*ELEMENTS|_TILE|_BLOCK_PAIRS|_BYTES|_PARTS|_PROJECTED")


@contextmanager
def smaller_blocks(part: float) -> Iterator[None]:
    """Multiply the block sizes of all imported operators and mechanisms, their constants, by `part`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(("megasparse.ops", "megasparse.attention")) and module is not None:
                for constant, size in vars(module).copy().items():
                    if _SIZES.fullmatch(constant) and isinstance(size, int):
                        patch.setattr(module, constant, max(1, round(size * part)))
        yield
