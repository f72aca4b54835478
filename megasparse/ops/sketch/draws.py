"""Inputs of the random draws of the choice."""

from typing import NamedTuple

import torch
from torch import Tensor

from megasparse.ops.random import derive, halves

KEYS = 1 << 11
"""Keys of a tile. A part of what the draws are: those of every tile have a key of their own."""


class Noise(NamedTuple):
    """Inputs of u_ij. key: the layer's. heads: their global numbers. rows: (B, Lq), see `RngContext.rows`."""

    key: int
    heads: range
    rows: Tensor

    def tile(self, number: int, tile: int) -> int:
        """The key of a tile of head `number` of those here."""
        return derive(self.key, self.heads[number], tile)

    def tiles(self, length: int) -> Tensor:
        """The halves of the keys of every head's tiles for `length` keys, (H, tiles, 2) int32 on the device."""
        device = self.rows.device
        seeds = [
            [halves(self.tile(number, tile)) for tile in range(-(-length // KEYS))] for number in range(len(self.heads))
        ]
        pinned = device.type == "cuda"  # copied without a wait
        return torch.tensor(seeds, dtype=torch.int32, pin_memory=pinned).to(device, non_blocking=True)


def keys_in_tile() -> int:
    """C, keys whose draws have a key of their own."""
    return KEYS
