"""Visibility for kernels that gather: in sorted order every window is an interval of places.

In each round queries and keys are sorted by (segment, bucket, position), padding last. Query i sees the sorted key
places [low_i, high_i), and neither bound falls along the sorted queries: a block of queries meets a run of keys, and a
block of keys is met by a run of queries. B batch, H heads, R rounds, L length, M chunk, G rows of a layout.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention import kernels
from megasparse.ops.bucketed_attention.ranges import key_range
from megasparse.ops.bucketed_attention.specification import BucketedAttentionSpec
from megasparse.ops.counting_sort import counting_sort
from megasparse.ops.kernels import launch

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

    def of_queries(self, places: range) -> "Intervals":
        """The same, where the queries at no other sorted places see anything; padding keeps its bounds."""
        place = torch.arange(self.low.shape[-1], device=self.low.device)
        before, after = place < places.start, place >= places.stop

        def bound(x: Tensor) -> Tensor:
            outside = x.masked_fill(before, 0).masked_fill(after, self.low.shape[-1])
            return torch.where(x == NOWHERE, x, outside)

        return replace(self, low=bound(self.low), high=bound(self.high))

    def meeting(self, block: int) -> tuple[Tensor, Tensor]:
        """Return first, end (G, R, ⌈L / block⌉) int32: only sorted queries [first, end) see keys of a block."""
        groups, rounds, length = self.low.shape
        count = -(-length // block)
        first, end = (torch.empty(groups, rounds, count, dtype=torch.int32, device=self.low.device) for _ in range(2))
        grid = (-(-count // _BLOCKS) * groups * rounds,)
        sizes = (length, count, length.bit_length())
        launch(kernels.meeting, grid, self.low, self.high, first, end, *sizes, BLOCK=block, BLOCKS=_BLOCKS, num_warps=4)
        return first, end


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
    sorted_key = order = None
    if codes is not None or key_mask is not None or segments is not None:
        if codes is None:
            codes = torch.zeros(batch, 1, 1, length, dtype=torch.int32, device=like.device)
        sorted_key, order = _sort(codes, key_mask, segments, spec.buckets)
    return _bounds(sorted_key, order, spec, key_mask, segments, like)


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
    _, query_order = _sort(query_codes, key_mask, segments, spec.buckets)
    sorted_low, sorted_high = (x.gather(-1, query_order.long()) for x in (low, high))
    if len(rounds) == 1 or not spec.count_rounds:
        return Intervals(query_order, key_order, sorted_low, sorted_high, None, None, None)
    return Intervals(query_order, key_order, sorted_low, sorted_high, low, high, place)


_PADDING = torch.iinfo(torch.int32).max
_BITS = {torch.int16: 15, torch.int32: 31}
_BLOCKS = 256  # of keys, of a program that finds whom they meet
_PLACES = 512  # of a program that finds bounds


def _sort(
    codes: Tensor, key_mask: Tensor | None, segments: Tensor | None, buckets: int | None
) -> tuple[Tensor, Tensor]:
    """Sort codes (B, H, R, L) by (segment, bucket), or by bucket without masks: sorted codes and order, int32."""
    if key_mask is None and segments is None:
        key = codes.flatten(0, 1).contiguous()
        if codes.dtype in _BITS:
            bits = _BITS[codes.dtype] if buckets is None else max(1, (buckets - 1).bit_length())
            ordered = torch.empty_like(key)
            order = counting_sort(key.flatten(0, 1), bits, ordered.flatten(0, 1)).view(key.shape)
            return ordered, order
    else:
        segment = torch.zeros_like(codes[:, :1, :1], dtype=torch.int64)
        if segments is not None:
            segment = segments[:, None, None].to(torch.int64)
        if key_mask is not None:
            segment = segment.masked_fill(~key_mask[:, None, None], _PADDING)
        key = ((segment << 32) + codes).flatten(0, 1).contiguous()
    sorted_key, place = torch.sort(key, dim=-1, stable=True)
    return sorted_key, place.to(torch.int32)


def _bounds(
    sorted_key: Tensor | None, order: Tensor | None, spec: BucketedAttentionSpec, key_mask: Tensor | None,
    segments: Tensor | None, like: Tensor,
) -> Intervals:  # fmt: skip
    """The windows of sorted keys (G, R, L); None: one bucket and round."""
    length, window = like.shape[2], spec.window
    shape = (1, 1, length) if sorted_key is None else sorted_key.shape
    counted = order is not None and order.shape[1] > 1 and spec.count_rounds
    found: list[Any] = [torch.empty(shape, dtype=torch.int32, device=like.device) for _ in range(5 if counted else 2)]
    found += [None] * (5 - len(found))
    one_group = not window.same_bucket and key_mask is None and segments is None
    in_order = spec.causal and window.same_bucket
    steps = (window.chunk if window.kind == "band" else 3 * window.chunk).bit_length()
    numbers = (length, window.chunk, 0 if spec.exclude_self else 1, steps)
    settings = {
        "PADDING": None if key_mask is None else _PADDING << 32,
        "SHIFT": 0 if window.same_bucket else 32,
        "KIND": window.kind,
        "AHEAD": window.ahead,
        "IN_ORDER": in_order,
        "TOKENS": _PLACES,
    }
    launch(
        kernels.bounds, (-(-length // _PLACES) * shape[0] * shape[1],), None if one_group else sorted_key, order,
        *found, *numbers, **settings, num_warps=4,
    )  # fmt: skip
    return Intervals(order, order, *found)
