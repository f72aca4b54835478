"""The stable order by counting: passes over digits of up to 11 bits, the least significant first.

rows (batch, head and round), L length, N digits of a pass, T tiles of a row.
"""

import torch
from torch import Tensor

from megasparse.ops.counting_sort import kernels
from megasparse.ops.kernels import launch

_DIGIT_BITS = 11  # the buckets of 64K tokens in one pass
_TILE = 1024  # tokens that share a row of counts: at most 4 KB for 4 KB of places; of 11 bits four times as many
_BLOCK = 64  # tokens that are ranked against each other
_TILES_AT_ONCE = 128
_WIDE = 8  # digits of one program: 32 B, the least that a GPU reads


def counting_sort(keys: Tensor, bits: int, ordered: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Computes `operator.counting_sort` by kernels. Strided keys are copied once.

    Cost: ⌈bits/11⌉ passes. A pass moves rows·L·(2·key bytes + 4), and 8 more a token where it is not the first, besides
    16·rows·T·N of counts; its 64·rows·L comparisons are less than that on any GPU. No floating-point products.
    """
    keys = keys.contiguous()
    rows, length = keys.shape
    passes = -(-bits // _DIGIT_BITS)
    digit_bits = -(-bits // passes)
    digits = max(_WIDE, 1 << digit_bits)
    tile = _TILE if digits <= _TILE else 4 * _TILE
    tiles = -(-length // tile)
    counts = torch.empty(rows, tiles, digits, dtype=torch.int32, device=keys.device)
    totals = torch.empty(rows, digits, dtype=torch.int32, device=keys.device)
    order: Tensor | None = None
    for shift in range(0, bits, digit_bits):
        out = torch.empty(rows, length, dtype=torch.int32, device=keys.device)
        sizes = {"DIGITS": digits, "TILE": tile}
        launch(kernels.count, (rows * tiles,), keys, order, counts, length, tiles, shift, **sizes, num_warps=4)
        grid = (rows, digits // _WIDE)
        fixed = {"DIGITS": digits, "WIDE": _WIDE, "TILES": _TILES_AT_ONCE, "num_warps": 4}
        launch(kernels.add_up, grid, counts, totals, tiles, **fixed)
        last = shift + digit_bits >= bits
        sorted_keys = ordered if last else None
        arguments = (keys, order, counts, totals, out, sorted_keys, length, tiles, shift)
        own = {"BLOCK": _BLOCK, "REVERSED": reverse and last, "num_warps": 2}
        launch(kernels.place, (rows * tiles,), *arguments, **sizes, **own)
        order = out
    assert order is not None
    return order
