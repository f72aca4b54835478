"""Inputs of the random draws of the choice."""

from typing import NamedTuple

from torch import Tensor

KEYS = 1 << 11
"""Keys of a tile. A part of what the draws are: those of every tile have a key of their own."""


class Noise(NamedTuple):
    """Inputs of u_ij. key: the layer's. heads: their global numbers. rows: (B, Lq), see `RngContext.rows`."""

    key: int
    heads: range
    rows: Tensor


def keys_in_tile() -> int:
    """C, keys whose draws have a key of their own."""
    return KEYS
