"""Inputs of the random draws of the choice."""

from typing import NamedTuple

from torch import Tensor

from megasparse.ops.keys import Key, derive, words

KEYS = 1 << 11
"""Keys of a tile. A part of what the draws are: those of every tile have a key of their own."""


class Noise(NamedTuple):
    """Inputs of u_ij. key: the layer's; or what `of_tiles` makes of it, (H, tiles, 2) int32. heads: their global
    numbers. rows: (B, Lq), see `RngContext.rows`.
    """

    key: Key | Tensor
    heads: range
    rows: Tensor

    def of_tiles(self, length: int) -> "Noise":
        """The same draws for `length` keys; the keys of every head's tiles are on the device."""
        key, tiles = self.key, -(-length // KEYS)
        if isinstance(key, Tensor):
            return self
        own = words([derive(key, head, tile) for head in self.heads for tile in range(tiles)], self.rows.device)
        return self._replace(key=own.view(len(self.heads), tiles, 2))

    def tile(self, number: int, tile: int) -> Key | Tensor:
        """The key of a tile of head `number` of those here."""
        return self.key[number, tile] if isinstance(self.key, Tensor) else derive(self.key, self.heads[number], tile)


def keys_in_tile() -> int:
    """C, keys whose draws have a key of their own."""
    return KEYS
