"""Bands of keys by rank inside their bucket, for queries and keys with separate codes."""

from typing import NamedTuple

import torch
from torch import Tensor


class KeyRange(NamedTuple):
    """One round. order: (B, H, Lk), keys by sorted index; rank: its inverse; group: of each sorted index, unique per
    bucket and document. Sorted indices [low, high) are visible to each query.
    """

    order: Tensor
    rank: Tensor
    low: Tensor
    high: Tensor
    group: Tensor


def key_range(
    query_codes: Tensor, key_codes: Tensor, chunk: int, causal: bool, key_mask: Tensor | None, segments: Tensor | None
) -> KeyRange:
    """Return the range of keys visible to queries. query_codes: (B, H, Lq). key_codes: (B, H, Lk)."""
    query_group = query_codes.to(torch.int64).contiguous()
    key_group = key_codes.to(torch.int64)
    if segments is not None:
        document = segments[:, None].to(torch.int64) << 32
        query_group = query_group + document[..., : query_codes.shape[-1]]
        key_group = key_group + document
    if key_mask is not None:  # into a group without queries
        key_group = key_group.masked_fill(~key_mask[:, None], torch.iinfo(torch.int64).max)
    group, order = torch.sort(key_group, dim=-1, stable=True)
    first, end = (torch.searchsorted(group, query_group, right=right) for right in (False, True))
    # Number of keys at or before a query in its group, counted in the order of (group number, position).
    number = torch.zeros_like(order)
    number[..., 1:] = (group[..., 1:] != group[..., :-1]).cumsum(dim=-1)
    stride = max(query_codes.shape[-1], key_codes.shape[-1])
    query_number = number.gather(-1, first.clamp_max(order.shape[-1] - 1))
    position = torch.arange(query_codes.shape[-1], device=order.device)
    count = torch.searchsorted(number * stride + order, query_number * stride + position, right=True)
    nearest = count.clamp(first, end)  # an empty group has first = end
    low = torch.maximum(nearest - chunk, first)
    high = nearest if causal else torch.minimum(nearest + chunk, end)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return KeyRange(order, rank, low, high, group)
