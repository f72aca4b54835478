"""Visibility of tokens: their order by (segment, bucket, position), and a window on that order.

Visibility in a round is one integer comparison. Every token gets a `slot`, and j is visible to i iff 0 <= slot_i −
slot_j < width, or where the window is two-sided |slot_i − slot_j| < width:

    band   slot = sorted index + M·(rank of the bucket), width M:    the last M tokens of i's own bucket, i included;
    two-sided: also the next M − 1
    chunk  slot = ⌊sorted index / M⌋ + 2·(rank of the bucket), width 2:  i's chunk of M sorted tokens and the one
    before it; two-sided: also the one after it

The gap between buckets keeps tokens of different buckets apart; without the same-bucket mask only segments and
padding are. Padding sorts last, so it moves nothing. B batch, H heads, R rounds, L length, M chunk.
"""

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.specification import Window


def lay_out(codes: Tensor, window: Window, key_mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sorts each round's tokens and gives them their slots.

    codes: (B, H, R, L) buckets, any integer type. key_mask: (B, L) bool, true for real tokens. segments: (B, L)
    document numbers >= 0. Returns order (B, H, R, L) int64: the token at each sorted index; slot (B, H, R, L) int32,
    by token.
    """
    segment = torch.zeros_like(codes[:, :1, :1], dtype=torch.int64)  # (B, 1, 1, L), broadcast
    if segments is not None:
        segment = segments[:, None, None].to(torch.int64)
    if key_mask is not None:
        segment = segment.masked_fill(~key_mask[:, None, None], torch.iinfo(torch.int32).max)
    key = (segment << 32) + codes
    sorted_key, order = torch.sort(key, dim=-1, stable=True)
    group = sorted_key if window.same_bucket else sorted_key >> 32
    rank = torch.zeros_like(order)
    rank[..., 1:] = (group[..., 1:] != group[..., :-1]).cumsum(dim=-1)
    index = torch.arange(codes.shape[-1], device=codes.device)
    sorted_slot = index + window.chunk * rank if window.kind == "band" else index // window.chunk + 2 * rank
    return order, torch.empty_like(order).scatter_(-1, order, sorted_slot).to(torch.int32)
