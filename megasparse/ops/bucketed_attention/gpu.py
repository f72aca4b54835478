"""Bucketed attention on GPUs: without sorted copies of q, k and v, one launch per round, deterministic.

The forward stores the layout (24 bytes per token, head and round; 12 without counting of rounds), because sorting again
would cost more. The backward recomputes scores by queries, for dq, and by keys, for dk and dv: programs write disjoint
rows.

In each round queries and keys are sorted by (segment, bucket, position), padding last. The sorted keys [low_i, high_i)
are visible to query i, and both bounds are nondecreasing: a block of queries needs a contiguous range of keys, and a
block of keys a contiguous range of queries.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention import kernels
from megasparse.ops.bucketed_attention.layouts import sort_keys
from megasparse.ops.bucketed_attention.ranges import key_range
from megasparse.ops.bucketed_attention.spec import BucketedAttentionSpec, Codes, split_codes
from megasparse.ops.counting_sort import counting_sort
from megasparse.ops.kernels import block, empty_alike, launch, precision, strides, whole_vectors
from megasparse.ops.operator import Function

NOWHERE = 1 << 30
"""Bounds of padding, an empty window."""
_PADDING = torch.iinfo(torch.int32).max
_BITS = {torch.int16: 15, torch.int32: 31}
_BLOCKS = 256  # blocks of keys per program of `kernels.meeting`
_PLACES = 512  # sorted indices per program of `kernels.bounds`


@dataclass(frozen=True)
class Intervals:
    """Orders and bounds, (G, R, L) int32 each, with G = B·H, B or 1: rows of q with the same codes share them.

    query_order, key_order: token at each sorted index; None if tokens are sorted by position. low, high: bounds of the
    query at each sorted index. token_low, token_high, token_index: bounds of a query and index of a key by token; None
    if other rounds are irrelevant. groups: sorted keys, equal within a bucket of a document; read only in the forward;
    None without codes.
    """

    query_order: Tensor | None
    key_order: Tensor | None
    low: Tensor
    high: Tensor
    token_low: Tensor | None
    token_high: Tensor | None
    token_index: Tensor | None
    groups: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)[:-1]]

    def slots(self, tile: int) -> tuple[Tensor, Tensor]:
        """Return the slot of each sorted key (G, R, L), and the token in each slot (G, R, 4·L), −1 if empty.

        Slots make the forward bit-identical for equal prefixes: later tokens move sorted indices, and so a bucket's
        keys among tiles and columns, but slots only by multiples of `tile`, or in smaller buckets of a power of two >=
        their size, which does not affect sums over blocks of powers of two.
        """
        assert self.groups is not None and self.key_order is not None
        rows, length = self.groups.flatten(0, 1).shape
        starts, widths, key_slot = (torch.empty_like(self.key_order) for _ in range(3))
        slot_key = starts.new_empty(*starts.shape[:2], 4 * length)
        grid = (-(-length // _PLACES) * rows,)
        sums = starts.new_empty(grid)
        shared = {"starts": starts, "widths": widths, "sums": sums, "slot_key": slot_key, "length": length}
        shared |= {"KEYS": tile, "TOKENS": _PLACES, "num_warps": 4}
        launch(kernels.runs, grid, keys=self.groups, steps=length.bit_length(), **shared)
        launch(kernels.slots, grid, order=self.key_order, key_slot=key_slot, **shared)
        return key_slot, slot_key

    def of_queries(self, places: range) -> "Intervals":
        """Return a copy in which queries at other sorted places have empty windows."""
        index = torch.arange(self.low.shape[-1], device=self.low.device)
        before = index < places.start
        after = index >= places.stop

        def bound(x: Tensor) -> Tensor:
            outside = x.masked_fill(before, 0).masked_fill(after, self.low.shape[-1])
            return torch.where(x == NOWHERE, x, outside)

        return replace(self, low=bound(self.low), high=bound(self.high))

    def meeting(self, block: int) -> tuple[Tensor, Tensor]:
        """Return first, end (G, R, ⌈L / block⌉) int32: only sorted queries [first, end) attend to keys of a block."""
        groups, rounds, length = self.low.shape
        count = -(-length // block)
        first, end = (self.low.new_empty(groups, rounds, count, dtype=torch.int32) for _ in range(2))
        grid = (-(-count // _BLOCKS) * groups * rounds,)
        launch(
            kernels.meeting, grid, lows=self.low, highs=self.high, first=first, end=end, length=length, count=count,
            steps=length.bit_length(), BLOCK=block, BLOCKS=_BLOCKS,
        )  # fmt: skip
        return first, end


def shared_intervals(
    codes: Tensor | None, like: Tensor, spec: BucketedAttentionSpec, key_mask: Tensor | None, segments: Tensor | None
) -> Intervals:
    """Return intervals for shared codes (B, H, R, L); None: one bucket and round. like: (B, H, L, D)."""
    batch, _, length, _ = like.shape
    sorted_key = order = None
    if codes is not None or key_mask is not None or segments is not None:
        if codes is None:
            codes = torch.zeros(batch, 1, 1, length, dtype=torch.int32, device=like.device)
        sorted_key, order = _sort(codes, key_mask, segments, spec.buckets)
    window = spec.window
    shape = (1, 1, length) if sorted_key is None else sorted_key.shape
    counted = order is not None and order.shape[1] > 1 and spec.count_rounds
    names = ["low", "high", *(["token_low", "token_high", "token_index"] if counted else [])]
    bounds: dict[str, Any] = dict.fromkeys(("token_low", "token_high", "token_index"))
    bounds |= {name: like.new_empty(shape, dtype=torch.int32) for name in names}
    one_group = not window.same_bucket and key_mask is None and segments is None
    steps = (window.chunk if window.kind == "band" else 3 * window.chunk).bit_length()
    launch(
        kernels.bounds, (-(-length // _PLACES) * shape[0] * shape[1],), keys=None if one_group else sorted_key,
        order=order, **bounds, length=length, chunk=window.chunk, offset=0 if spec.exclude_self else 1, steps=steps,
        PADDING=None if key_mask is None else _PADDING << 32, SHIFT=0 if window.same_bucket else 32, KIND=window.kind,
        AHEAD=window.ahead, IN_ORDER=spec.causal and window.same_bucket, TOKENS=_PLACES,
    )  # fmt: skip
    return Intervals(order, order, **bounds, groups=sorted_key)


def separate_intervals(
    query_codes: Tensor,
    key_codes: Tensor,
    spec: BucketedAttentionSpec,
    key_mask: Tensor | None,
    segments: Tensor | None,
) -> Intervals:
    """Return intervals for separate codes (B, H, R, L) of queries and keys."""
    rounds = [
        key_range(query_codes[:, :, r], key_codes[:, :, r], spec.window.chunk, spec.causal, key_mask, segments)
        for r in range(query_codes.shape[2])
    ]
    key_order, index, low, high, groups = (
        torch.stack(parts, dim=2).flatten(0, 1) for parts in zip(*rounds, strict=True)
    )
    key_order, index, low, high = (x.to(torch.int32) for x in (key_order, index, low, high))
    if key_mask is not None:
        padding = ~key_mask[:, None, None].expand(query_codes.shape).flatten(0, 1)  # (G, R, L)
        low = low.masked_fill_(padding, NOWHERE)
        high = high.masked_fill_(padding, NOWHERE)
    _, query_order = _sort(query_codes, key_mask, segments, spec.buckets)
    sorted_low, sorted_high = (x.gather(-1, query_order.long()) for x in (low, high))
    if len(rounds) == 1 or not spec.count_rounds:
        return Intervals(query_order, key_order, sorted_low, sorted_high, None, None, None, groups)
    return Intervals(query_order, key_order, sorted_low, sorted_high, low, high, index, groups)


def _sort(
    codes: Tensor, key_mask: Tensor | None, segments: Tensor | None, buckets: int | None
) -> tuple[Tensor, Tensor]:
    """Sort codes (B, H, R, L) by (segment, bucket): sorted keys and order."""
    if key_mask is None and segments is None:
        key = codes.flatten(0, 1).contiguous()  # (G, R, L)
        if codes.dtype in _BITS:
            bits = _BITS[codes.dtype] if buckets is None else max(1, (buckets - 1).bit_length())
            ordered = torch.empty_like(key)
            return ordered, counting_sort(key.flatten(0, 1), bits, ordered.flatten(0, 1)).view(key.shape)
    else:
        key = sort_keys(codes, key_mask, segments).flatten(0, 1).contiguous()  # (G, R, L)
    sorted_key, index = torch.sort(key, dim=-1, stable=True)
    return sorted_key, index.to(torch.int32)


def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | Codes | None,
    spec: BucketedAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    query_codes, key_codes = split_codes(codes)
    with torch.no_grad():
        if key_codes is None:
            intervals = shared_intervals(query_codes, q, spec, key_mask, segments)
        else:
            assert query_codes is not None
            intervals = separate_intervals(query_codes, key_codes, spec, key_mask, segments)
        if spec.pair_shard is not None:
            intervals = intervals.of_queries(spec.places(q.shape[2]))
        separate = key_codes is not None
        slots: tuple[Tensor | None, Tensor | None] = (None, None)
        if query_codes is not None and spec.causal and spec.window.same_bucket and spec.window.kind == "band":
            slots = intervals.slots(tiles(q.shape[3], q.dtype, separate, True).forward.keys)
    out, lse = _BucketedAttention.apply(q, k, v, spec, separate, slots, *intervals.tensors())
    return out, lse


def _order_rule(spec: BucketedAttentionSpec, separate: bool) -> str:
    """Return RULE of `kernels.visible`: the comparison of positions, if the bounds are not sufficient."""
    if separate or not spec.causal:
        return "others" if spec.exclude_self else "all"
    if spec.window.same_bucket:
        return "all"
    return "earlier" if spec.exclude_self else "not later"


class Tile(NamedTuple):
    """Queries and keys per tile, and the warps and pipeline stages of the program."""

    queries: int
    keys: int
    warps: int
    stages: int

    def settings(self) -> dict[str, int]:
        return {"QUERIES": self.queries, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


class TileShapes(NamedTuple):
    forward: Tile
    queries: Tile
    keys: Tile


def tiles(head_dim: int, dtype: torch.dtype, separate: bool, aligned: bool = False) -> TileShapes:
    """Return tiles that do not spill in half precision up to D = 128, with two programs per multiprocessor if possible.
    Loops with jumps, for separate codes or keys `aligned` in slots, need more registers.
    """
    wide = block(head_dim)
    if dtype == torch.float32:  # exact products keep whole rows in registers
        around = Tile(32, 32, 4 if wide <= 64 else 8, 1) if wide <= 128 else Tile(16, 16, 8, 1)
        jumping = Tile(16, 32 if wide <= 64 else 16, 4 if wide <= 32 else 8, 1)
        if separate:
            return TileShapes(jumping, jumping, around)
        if wide <= 128:
            return TileShapes(jumping if aligned and wide > 64 else Tile(32, 32, 8, 2), around, around)
        return TileShapes(jumping if aligned else Tile(16, 32, 8, 2), Tile(16, 32, 8, 1), around)
    # A pipeline of 3 stages prefetches the next tile's order and rows, one of 5 stages two tiles'.
    if wide <= 64:
        return TileShapes(Tile(64, 64, 4, 5), Tile(64, 32, 4, 3 if separate else 5), Tile(32, 64, 4, 3))
    jumping = Tile(64, 32, 4, 3) if wide <= 128 else Tile(32, 32, 8, 3)
    if separate:
        return TileShapes(jumping, Tile(32, 16 if wide <= 128 else 32, wide // 32, 3), Tile(32, 8192 // wide, 8, 3))
    if wide <= 128:
        return TileShapes(jumping if aligned else Tile(64, 32, 4, 5), Tile(64, 32, 4, 3), Tile(32, 64, 8, 3))
    return TileShapes(jumping if aligned else Tile(64, 32, 8, 3), Tile(64, 32, 8, 3), Tile(32, 32, 8, 3))


class _BucketedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: BucketedAttentionSpec, separate: bool,
        slots: tuple[Tensor | None, Tensor | None], *layout: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v = (whole_vectors(x) for x in (q, k, v))
        call = _Call(q, spec, separate, Intervals(*layout))  # type: ignore[arg-type]
        out = empty_alike(q)
        lse, lse2 = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
        partial = call.partial(out)
        key_slot, slot_key = slots
        shared: dict[str, Any] = {"q": q, "k": k, "v": v, "partial": partial, "out": out, "lse2": lse2, "lse": lse}
        shared |= {"key_slot": key_slot, "slot_key": slot_key, **strides(q=q, k=k, v=v, out=out)}
        tile = tiles(q.shape[3], q.dtype, separate, slots[0] is not None).forward
        shared |= call.values | tile.settings() | {"JUMP": separate or key_slot is not None}
        for round_ in range(call.rounds):
            launch(kernels.forward, call.grid(tile.queries), **shared, **call.number(round_))
        ctx.spec = spec
        ctx.separate = separate
        ctx.save_for_backward(q, k, v, out, lse2, *layout)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse2, *layout = ctx.saved_tensors
        grad = whole_vectors(grads[0].to(q.dtype))
        grad_lse = grads[1].contiguous()
        spec: BucketedAttentionSpec = ctx.spec
        call = _Call(q, spec, ctx.separate, Intervals(*layout))
        delta = torch.empty_like(lse2)
        dq = empty_alike(q)
        dk = empty_alike(k)
        dv = empty_alike(k)
        partial_q, partial_k, partial_v = (call.partial(x) for x in (dq, dk, dv))
        identity = call.intervals.query_order is None
        sorted_level = None if identity else torch.empty_like(lse2)
        sorted_delta = None if identity else torch.empty_like(delta)
        around_queries = call.tiles.queries
        around_keys = call.tiles.keys
        first_query, end_query = call.intervals.meeting(around_keys.keys)
        shared = call.values | {"q": q, "k": k, "v": v, "grad": grad, "grad_lse": grad_lse}
        shared |= strides(q=q, k=k, v=v, grad=grad)
        for_queries = shared | {"out": out, "lse2": lse2, "delta": delta, "partial": partial_q, "dq": dq}
        for_queries |= {"sorted_level": sorted_level, "sorted_delta": sorted_delta, **strides(out=out, dq=dq)}
        for_keys = shared | {"token_level": lse2, "partial_k": partial_k, "partial_v": partial_v, "dk": dk, "dv": dv}
        for_keys |= {"lse2": lse2, "delta": delta} if identity else {"lse2": sorted_level, "delta": sorted_delta}
        for_keys |= {"first_query": first_query, "end_query": end_query, **strides(dk=dk)}
        for round_ in range(call.rounds):
            number = call.number(round_)
            grid = call.grid(around_queries.queries)
            launch(kernels.query_gradient, grid, **for_queries, **number, **around_queries.settings())
            launch(kernels.key_gradient, call.grid(around_keys.keys), **for_keys, **number, **around_keys.settings())
        return dq, dk, dv, None, None, None, *[None] * len(layout)


class _Call:
    """Sizes and layouts that all launches of a call share. values: arguments of the kernels, by name."""

    def __init__(self, q: Tensor, spec: BucketedAttentionSpec, separate: bool, intervals: Intervals):
        batch, heads, self.length, head_dim = q.shape
        self.intervals = intervals
        self.rows = batch * heads
        layouts, self.rounds, _ = intervals.low.shape
        self.tiles = tiles(head_dim, q.dtype, separate)
        self.values: dict[str, Any] = {
            "query_order": intervals.query_order,
            "key_order": intervals.key_order,
            "lows": intervals.low,
            "highs": intervals.high,
            "past_low": intervals.token_low,
            "past_high": intervals.token_high,
            "past_index": intervals.token_index,
            "heads": heads,
            "sharing": self.rows // layouts,
            "length": self.length,
            "scale": spec.scale,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block(head_dim),
            "ROUNDS": self.rounds,
            "RULE": _order_rule(spec, separate),
            "JUMP": separate,
            # Queries without a visible key attend to themselves.
            "SELF": spec.self_at_last and (spec.exclude_self or separate),
            "PRECISION": precision(),
        }

    def number(self, round_: int) -> dict[str, int]:
        """Return the arguments that depend on the round."""
        return {"ROUND": round_, "EARLIER": 0 if self.intervals.token_index is None else round_}

    def grid(self, size: int) -> tuple[int]:
        return (-(-self.length // size) * self.rows,)

    def partial(self, x: Tensor) -> Tensor | None:
        """Return an fp32 accumulator between rounds, x itself if it is fp32; None for a single round."""
        if self.rounds == 1:
            return None
        return x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
