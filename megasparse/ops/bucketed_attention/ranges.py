"""Keys of a query by rank inside its bucket: bands for queries and keys with separate codes.

B batch, H heads, R rounds, Lq queries, Lk keys, M chunk, W keys per window: M, or 2M if two-sided.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_PIECE_ELEMENTS = 1 << 20  # key numbers per piece: 8 MB of int64


def windows_by_key_rank(
    query_codes: Tensor,
    key_codes: Tensor,
    chunk: int,
    causal: bool,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    *,
    distinct: bool = True,
    first_query: int = 0,
) -> Tensor:
    """Return the keys visible to each query: in every round, the last M keys of bucket h(q_i) at or before position i
    and, if not causal, the next M.

    With c keys of that bucket at or before i, these are the key ranks [c − M, c), or [c − M, c + M). They include the
    query's own key only if that is in the same bucket. query_codes: (B, H, R, Lq), key_codes: (B, H, R, Lk), any
    integer type. key_mask: (B, Lk) bool, true for real keys. segments: (B, Lk) document numbers >= 0, of keys, and of
    queries by position. distinct: include a key of several rounds only in the first of them. first_query: position of
    the first query; the first key is at position 0. Returns (B, H, Lq, R·W) int32 key numbers, −1 in empty slots.
    """
    batch, heads, rounds, queries = query_codes.shape
    width = chunk if causal else 2 * chunk
    ranges = [
        key_range(query_codes[:, :, r], key_codes[:, :, r], chunk, causal, key_mask, segments, first_query)
        for r in range(rounds)
    ]
    index = torch.empty(batch, heads, queries, rounds, width, dtype=torch.int32, device=query_codes.device)
    column = torch.arange(width, device=index.device)
    step = max(1, _PIECE_ELEMENTS // (batch * heads * width))
    for start in range(0, queries, step):
        piece = slice(start, start + step)
        for r, range_ in enumerate(ranges):
            key_index = range_.low[:, :, piece, None] + column  # (B, H, l, W)
            visible = key_index < range_.high[:, :, piece, None]
            key = _pick(range_.order, key_index.clamp_max_(key_codes.shape[-1] - 1))
            for earlier in ranges[:r] if distinct else []:
                other = _pick(earlier.rank, key)
                visible &= (other < earlier.low[:, :, piece, None]) | (other >= earlier.high[:, :, piece, None])
            index[:, :, piece, r] = key.masked_fill_(~visible, -1)
    return index.flatten(3)


class KeyRange(NamedTuple):
    """One round. order: (B, H, Lk), keys by sorted index; rank: its inverse; group: group of each sorted index, unique
    per bucket and document. Sorted indices [low, high) are visible to each query.
    """

    order: Tensor
    rank: Tensor
    low: Tensor
    high: Tensor
    group: Tensor


def key_range(
    query_codes: Tensor,
    key_codes: Tensor,
    chunk: int,
    causal: bool,
    key_mask: Tensor | None,
    segments: Tensor | None,
    first_query: int = 0,
) -> KeyRange:
    """Return the range of keys visible to queries. query_codes: (B, H, Lq). key_codes: (B, H, Lk)."""
    query_group, key_group = query_codes.to(torch.int64).contiguous(), key_codes.to(torch.int64)
    if segments is not None:
        document = segments[:, None].to(torch.int64) << 32
        query_group = query_group + document[..., first_query : first_query + query_codes.shape[-1]]
        key_group = key_group + document
    if key_mask is not None:  # into a group without queries
        key_group = key_group.masked_fill(~key_mask[:, None], torch.iinfo(torch.int64).max)
    group, order = torch.sort(key_group, dim=-1, stable=True)
    first, end = (torch.searchsorted(group, query_group, right=right) for right in (False, True))
    # Number of keys at or before a query in its group, counted in the order of (group number, position).
    number = torch.zeros_like(order)
    number[..., 1:] = (group[..., 1:] != group[..., :-1]).cumsum(dim=-1)
    stride = max(first_query + query_codes.shape[-1], key_codes.shape[-1])
    query_number = number.gather(-1, first.clamp_max(order.shape[-1] - 1))
    position = first_query + torch.arange(query_codes.shape[-1], device=order.device)
    count = torch.searchsorted(number * stride + order, query_number * stride + position, right=True)
    nearest = count.clamp(first, end)  # an empty group has first = end
    low = torch.maximum(nearest - chunk, first)
    high = nearest if causal else torch.minimum(nearest + chunk, end)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return KeyRange(order, rank, low, high, group)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Return the elements of each row of x (B, H, L) at index (B, H, l, W)."""
    return x.gather(-1, index.flatten(2)).view_as(index)
