"""Visibility for kernels that gather: in sorted order every window is an interval of places.

In each round queries and keys are sorted by (segment, bucket, position), padding last. Query i sees the sorted key
places [low_i, high_i), and neither bound falls along the sorted queries: a block of queries meets a run of keys, and a
block of keys is met by a run of queries. B batch, H heads, R rounds, L length, M chunk, G rows of a layout.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.ranges import key_range
from megasparse.ops.bucketed_attention.specification import BucketedAttentionSpec
from megasparse.ops.counting_sort import counting_sort

NOWHERE = 1 << 30
"""The bounds of padding, which sees nothing."""


@dataclass(frozen=True)
class Intervals:
    """Orders and bounds, (G, R, L) int32 each, G = B·H, B or 1: rows of q with the same codes share them.

    query_order, key_order: the token at each sorted place; None: sorted order is that of positions. low, high: bounds
    of the query at each sorted place. token_low, token_high, token_place: the bounds of a query and the place of a key
    by token; None where no other round is asked about.
    """

    query_order: Tensor | None
    key_order: Tensor | None
    low: Tensor
    high: Tensor
    token_low: Tensor | None
    token_high: Tensor | None
    token_place: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]

    def meeting(self, block: int) -> tuple[Tensor, Tensor]:
        """Return first, last (G, R, ⌈L / block⌉) int32: the sorted queries [first, last) may see keys of each block of
        sorted keys, and no others do.
        """
        length = self.low.shape[-1]
        start = torch.arange(0, length, block, dtype=torch.int32, device=self.low.device)
        start = start.expand(*self.low.shape[:2], -1).contiguous()
        first = torch.searchsorted(self.high, start, right=True, out_int32=True)
        end = (start + (block - 1)).clamp_(max=length - 1)
        return first, torch.searchsorted(self.low, end, right=True, out_int32=True)


def shared_intervals(
    codes: Tensor | None,
    like: Tensor,
    spec: BucketedAttentionSpec,
    key_mask: Tensor | None,
    segments: Tensor | None,
) -> Intervals:
    """Intervals for codes (B, H, R, L) that queries and keys share; None: one bucket and round. like: (B, H, L, D).

    Where a bucket's tokens stand in order of position and attention is causal, the bounds alone decide what is visible;
    elsewhere the kernels also compare positions.
    """
    batch, _, length, _ = like.shape
    if codes is None and key_mask is None and segments is None:
        sorted_key = torch.zeros(1, 1, length, dtype=torch.int32, device=like.device)
        order = None
    else:
        if codes is None:
            codes = torch.zeros(batch, 1, 1, length, dtype=torch.int32, device=like.device)
        sorted_key, order = _sort(codes, key_mask, segments)
    group = sorted_key
    if not spec.window.same_bucket:
        group = torch.zeros_like(sorted_key) if key_mask is None and segments is None else sorted_key >> 32
    low, high = _bounds(group, spec)
    if key_mask is not None:
        padding = sorted_key >= _PADDING << 32
        low, high = low.masked_fill_(padding, NOWHERE), high.masked_fill_(padding, NOWHERE)
    if order is None or order.shape[1] == 1 or not spec.count_rounds:
        return Intervals(order, order, low, high, None, None, None)
    place = _inverse(order)
    token_low, token_high = (x.gather(-1, place.long()) for x in (low, high))
    return Intervals(order, order, low, high, token_low, token_high, place)


def separate_intervals(
    query_codes: Tensor,
    key_codes: Tensor,
    spec: BucketedAttentionSpec,
    key_mask: Tensor | None,
    segments: Tensor | None,
) -> Intervals:
    """Intervals for separate codes (B, H, R, L) of queries and keys: the windows of `windows_by_key_rank`."""
    rounds = [
        key_range(query_codes[:, :, r], key_codes[:, :, r], spec.window.chunk, spec.causal, key_mask, segments)
        for r in range(query_codes.shape[2])
    ]
    key_order, place, low, high = (
        torch.stack(parts, dim=2).flatten(0, 1).to(torch.int32) for parts in zip(*rounds, strict=True)
    )
    if key_mask is not None:
        padding = ~key_mask[:, None, None].expand(query_codes.shape).flatten(0, 1)
        low, high = low.masked_fill_(padding, NOWHERE), high.masked_fill_(padding, NOWHERE)
    _, query_order = _sort(query_codes, key_mask, segments)
    sorted_low, sorted_high = (x.gather(-1, query_order.long()) for x in (low, high))
    if len(rounds) == 1 or not spec.count_rounds:
        return Intervals(query_order, key_order, sorted_low, sorted_high, None, None, None)
    return Intervals(query_order, key_order, sorted_low, sorted_high, low, high, place)


_PADDING = torch.iinfo(torch.int32).max


_BITS = {torch.int16: 15, torch.int32: 31}


def _sort(codes: Tensor, key_mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sort codes (B, H, R, L) by (segment, bucket): those as one number (G, R, L), without masks the bucket alone, in
    order, and the order, int32.
    """
    if key_mask is None and segments is None:
        key = codes.flatten(0, 1).contiguous()
        if codes.dtype in _BITS:
            order = counting_sort(key.flatten(0, 1), _BITS[codes.dtype]).view(key.shape)
            return key.gather(-1, order.long()), order
    else:
        segment = torch.zeros_like(codes[:, :1, :1], dtype=torch.int64)
        if segments is not None:
            segment = segments[:, None, None].to(torch.int64)
        if key_mask is not None:
            segment = segment.masked_fill(~key_mask[:, None, None], _PADDING)
        key = ((segment << 32) + codes).flatten(0, 1).contiguous()
    sorted_key, place = torch.sort(key, dim=-1, stable=True)
    return sorted_key, place.to(torch.int32)


def _bounds(group: Tensor, spec: BucketedAttentionSpec) -> tuple[Tensor, Tensor]:
    """Return low, high (G, R, L) int32 of sorted groups."""
    index = torch.arange(group.shape[-1], dtype=torch.int32, device=group.device)
    start = torch.searchsorted(group, group, out_int32=True)
    window = spec.window
    if window.kind == "band":
        nearest, furthest = index - (window.chunk - 1), index + window.chunk
    else:
        chunk = index // window.chunk * window.chunk
        nearest, furthest = chunk - window.chunk, chunk + window.chunk * (2 if window.ahead else 1)
    low = torch.maximum(start, nearest)
    if spec.causal and window.same_bucket:
        return low, (index + (0 if spec.exclude_self else 1)).expand_as(low).clone()
    return low, torch.minimum(torch.searchsorted(group, group, right=True, out_int32=True), furthest)


def _inverse(order: Tensor) -> Tensor:
    index = torch.arange(order.shape[-1], dtype=torch.int32, device=order.device)
    return torch.empty_like(order).scatter_(-1, order.long(), index.expand_as(order))
