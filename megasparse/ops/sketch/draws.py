"""What the draws of the choice depend on."""

from typing import NamedTuple

from torch import Tensor

KEYS = 1 << 11
"""Keys of a tile. A part of what the draws are: those of every tile have a key of their own."""


class Noise(NamedTuple):
    """What u_ij depends on. key: of the layer. heads: their global numbers. rows: (B, Lq), see `Draws.rows`."""

    key: int
    heads: range
    rows: Tensor


def keys_in_tile() -> int:
    """C, keys whose draws have a key of their own."""
    return KEYS
