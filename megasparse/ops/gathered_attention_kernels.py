"""Gathered attention as Triton kernels: queries gather their keys, in forward and backward; keys sum their gradients
over a sorted list.

A row is one head of one sequence. An entry is one slot of a row's index, number query·K + slot; `keys` contains each
entry's key (Lk if empty), and `order` the entries sorted by (key, number). This list is split into tiles of T entries,
and a key's sums from several tiles are added in order: no program's work grows with the number of queries that chose a
key, and results are deterministic. K index slots.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasparse.ops.counting_sort import counting_sort
from megasparse.ops.kernels import block, dot, launch, load_rows, precision, steps_of_lists, strides, whole_vectors
from megasparse.ops.operator import Function


@triton.jit
def _gathered(x, row, valid, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows (n, m) of x in fp32, 0 for invalid rows: (n, m, WIDTH)."""
    d = tl.arange(0, WIDTH)[None, None, :]
    address = x + row.to(tl.int64)[:, :, None] * stride + d
    return tl.load(address, mask=valid[:, :, None] & (d < D), other=0.0).to(tl.float32)


@triton.jit
def _queries(heads, blocks, queries, QUERIES: tl.constexpr):
    """Return a program's row, its batch element and head, its queries, and a mask of those that exist."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    query = (program % blocks).to(tl.int32) * QUERIES + tl.arange(0, QUERIES)
    return row, row // heads, row % heads, query, query < queries


@triton.jit(do_not_specialize=["heads", "queries", "blocks"])
def attend(
    q, k, v, index, out, lse, scale, heads, queries, slots, blocks, key_heads, list_heads, index_batch, index_head,
    q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    D: tl.constexpr, QUERIES: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attend for a block of a row's queries, PLACES slots at a time, which are reduced at the end. key_heads,
    list_heads: number of neighbouring heads with the same keys, the same index.
    """
    row, batch, head, query, real = _queries(heads, blocks, queries, QUERIES)
    k += batch * k_batch + head // key_heads * k_head
    v += batch * v_batch + head // key_heads * v_head
    index += batch * index_batch + head // list_heads * index_head + query.to(tl.int64)[:, None] * slots
    query_rows = load_rows(q + batch * q_batch + head * q_head, query, real, q_stride, D, WIDTH).to(tl.float32)
    highest = tl.full([QUERIES], -1e38, tl.float32)  # −∞ − (−∞) would be NaN
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, PLACES, WIDTH], tl.float32)
    for first in range(0, slots, PLACES):
        slot = first + tl.arange(0, PLACES)[None, :]
        key = tl.load(index + slot, mask=real[:, None] & (slot < slots), other=-1)
        visible = key >= 0
        key_rows = _gathered(k, key, visible, k_stride, D, WIDTH)
        value_rows = _gathered(v, key, visible, v_stride, D, WIDTH)
        score = tl.where(visible, tl.sum(key_rows * query_rows[:, None, :], 2) * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        shrink = tl.exp(highest - higher)
        weight = tl.exp(score - higher[:, None])
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None, None] + weight[:, :, None] * value_rows
        highest = higher
    divisor = tl.where(total > 0, total, 1.0)
    mean = tl.sum(sums, 1) / divisor[:, None]
    row_lse = tl.where(total > 0, highest + tl.log(divisor), float("-inf"))
    number = row * queries + query
    d = tl.arange(0, WIDTH)[None, :]
    tl.store(out + number[:, None] * D + d, mean.to(out.dtype.element_ty), mask=real[:, None] & (d < D))
    tl.store(lse + number, row_lse, mask=real)


@triton.jit(do_not_specialize=["heads", "queries", "blocks"])
def query_gradients(
    q, k, v, index, out, lse, grad, grad_lse, dq, pairs, scale, heads, queries, slots, blocks, index_batch, index_head,
    q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride, grad_batch, grad_head, grad_stride,
    D: tl.constexpr, QUERIES: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of a row's queries, and pairs (B·H, Lq·K, 2): each entry's weight and gradient of the
    scaled score.
    """
    row, batch, head, query, real = _queries(heads, blocks, queries, QUERIES)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    number = row * queries + query
    index += batch * index_batch + head * index_head + query.to(tl.int64)[:, None] * slots
    query_rows = load_rows(q + batch * q_batch + head * q_head, query, real, q_stride, D, WIDTH).to(tl.float32)
    grad_rows = load_rows(grad + batch * grad_batch + head * grad_head, query, real, grad_stride, D, WIDTH).to(
        tl.float32
    )
    delta = tl.sum(grad_rows * load_rows(out, number, real, D, D, WIDTH).to(tl.float32), 1)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + number, mask=real, other=0.0)
    row_lse = tl.load(lse + number, mask=real, other=0.0)
    sums = tl.zeros([QUERIES, PLACES, WIDTH], tl.float32)
    for first in range(0, slots, PLACES):
        slot = first + tl.arange(0, PLACES)[None, :]
        inside = real[:, None] & (slot < slots)
        key = tl.load(index + slot, mask=inside, other=-1)
        visible = key >= 0
        key_rows = _gathered(k, key, visible, k_stride, D, WIDTH)
        value_rows = _gathered(v, key, visible, v_stride, D, WIDTH)
        score = tl.sum(key_rows * query_rows[:, None, :], 2) * scale
        # Clamp: rounding can make a huge score larger than its log-sum, and exp of the difference infinite.
        weight = tl.exp(tl.where(visible, tl.minimum(score - row_lse[:, None], 0.0), float("-inf")))
        # The delta of a query without visible keys is arbitrary, but affects no entry.
        score_grad = tl.where(visible, weight * (tl.sum(value_rows * grad_rows[:, None, :], 2) - delta[:, None]), 0.0)
        sums += score_grad[:, :, None] * key_rows
        pair = pairs + (number[:, None] * slots + slot) * 2
        tl.store(pair, weight.to(pairs.dtype.element_ty), mask=inside)
        tl.store(pair + 1, score_grad.to(pairs.dtype.element_ty), mask=inside)
    d = tl.arange(0, WIDTH)[None, :]
    total = tl.sum(sums, 1) * scale
    tl.store(dq + number[:, None] * D + d, total.to(dq.dtype.element_ty), mask=real[:, None] & (d < D))


@triton.jit
def _key(keys, order, at, inside):
    """Return the key of the entry at each position of the order, −1 outside."""
    return tl.load(keys + tl.load(order + at, mask=inside, other=0), mask=inside, other=-1)


@triton.jit
def _keep(sums, x, parts, key, slot, whole, cut, D: tl.constexpr, WIDTH: tl.constexpr):
    """Store sums (T, WIDTH): complete sums as a key's gradient in x, split ones in parts."""
    d = tl.arange(0, WIDTH)[None, :]
    address = key.to(tl.int64)[:, None] * D + d
    tl.store(x + address, sums.to(x.dtype.element_ty), mask=whole[:, None] & (d < D))
    tl.store(parts + slot[:, None] * D + d, sums, mask=cut[:, None] & (d < D))


@triton.jit(do_not_specialize=["heads", "entries", "key_count", "tiles"])
def tile_gradients(
    order, keys, pairs, q, grad, dk, dv, key_parts, value_parts, scale, heads, entries, slots, key_count, tiles,
    order_batch, order_head, q_batch, q_head, q_stride, grad_batch, grad_head, grad_stride,
    D: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of the keys whose entries are all in this tile. At most two keys are split: their partial sums
    are stored in key_parts and value_parts (B·H, tiles, 2, D), at index 0 for the tile's first key, else 1. Entries are
    summed per key by a product with the matrix of equal keys.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    tile = (program % tiles).to(tl.int32)
    batch = row // heads
    head = row % heads
    order += batch * order_batch + head * order_head
    keys += batch * order_batch + head * order_head
    start = tile * TILE
    first = _key(keys, order, start, True)
    if first < key_count:
        item = tl.arange(0, TILE)
        entry = tl.load(order + start + item, mask=start + item < entries, other=0)
        key = tl.load(keys + entry, mask=start + item < entries, other=key_count)
        real = key < key_count
        before = _key(keys, order, start - 1, start > 0)
        after = _key(keys, order, start + item + 1, start + item + 1 < entries)
        ends = (key != after) | (item == TILE - 1)
        whole = real & (key != after) & (key != before)
        cut = real & ends & ~whole
        slot = program * 2 + tl.where(key == first, 0, 1)
        same_key = (key[:, None] == key[None, :]) & real[None, :]
        pair = pairs + (row * entries + entry) * 2
        query = entry // slots
        weight = tl.load(pair, mask=real, other=0.0)
        grads = load_rows(grad + batch * grad_batch + head * grad_head, query, real, grad_stride, D, WIDTH)
        sums = dot(tl.where(same_key, weight[None, :], 0.0).to(grads.dtype), grads, PRECISION)
        _keep(sums, dv + row * key_count * D, value_parts, key, slot, whole, cut, D, WIDTH)
        score_grad = tl.load(pair + 1, mask=real, other=0.0)
        query_rows = load_rows(q + batch * q_batch + head * q_head, query, real, q_stride, D, WIDTH)
        sums = dot(tl.where(same_key, score_grad[None, :], 0.0).to(query_rows.dtype), query_rows, PRECISION) * scale
        _keep(sums, dk + row * key_count * D, key_parts, key, slot, whole, cut, D, WIDTH)


@triton.jit(do_not_specialize=["heads", "entries", "key_count", "tiles"])
def join_tiles(
    order, keys, dk, dv, key_parts, value_parts, heads, entries, key_count, tiles, order_batch, order_head,
    D: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of the key whose entries start in this tile and continue beyond it, as the sum of its parts."""
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    tile = (program % tiles).to(tl.int32)
    order += row // heads * order_batch + row % heads * order_head
    keys += row // heads * order_batch + row % heads * order_head
    start = tile * TILE
    end = start + TILE
    key = _key(keys, order, end - 1, end < entries)
    following = _key(keys, order, end, end < entries)
    before = _key(keys, order, start - 1, start > 0)
    if (key == following) & (key >= 0) & (key < key_count) & (key != before):
        d = tl.arange(0, WIDTH)
        slot = program * 2 + tl.where(key == _key(keys, order, start, True), 0, 1)
        key_sum = tl.load(key_parts + slot * D + d, mask=d < D, other=0.0)
        value_sum = tl.load(value_parts + slot * D + d, mask=d < D, other=0.0)
        next_tile = tile + 1
        count = AT_ONCE
        while count == AT_ONCE:
            later_tiles = next_tile + tl.arange(0, AT_ONCE)
            inside = later_tiles < tiles
            of_key = inside & (_key(keys, order, later_tiles * TILE, inside) == key)
            slots = (row * tiles + later_tiles) * 2
            key_sum += tl.sum(load_rows(key_parts, slots, of_key, D, D, WIDTH), 0)
            value_sum += tl.sum(load_rows(value_parts, slots, of_key, D, D, WIDTH), 0)
            count = tl.sum(of_key.to(tl.int32), 0)
            next_tile += AT_ONCE
        address = (row * key_count + key) * D + d
        tl.store(dk + address, key_sum.to(dk.dtype.element_ty), mask=d < D)
        tl.store(dv + address, value_sum.to(dv.dtype.element_ty), mask=d < D)


_GATHERED = 1024  # numbers of k and of v that a warp gathers at a time: 32 per thread, to leave registers free


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `gathered_attention.gathered_attention`. Tensors are copied only if the head dim is strided, or for the
    gradients of grouped heads.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        heads = q.shape[1]
        k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        if index.shape[1] not in (1, heads):
            index = index.repeat_interleave(heads // index.shape[1], dim=1)
    out, lse = _GatheredAttention.apply(q, k, v, index, scale)
    return out, lse


class _Sizes(NamedTuple):
    """QUERIES and PLACES of queries' programs. TILE and warps of keys' programs."""

    queries: int
    slots: int
    tile: int
    warps: int


def _sizes(head_dim: int, dtype: torch.dtype) -> _Sizes:
    width = block(head_dim)
    slots = min(8, _GATHERED // width)
    if dtype == torch.float32:  # products without tensor cores keep whole rows in registers
        return _Sizes(_GATHERED // width // slots, slots, 32 if width < 128 else 16, 4)
    return _Sizes(_GATHERED // width // slots, slots, 64 if width < 256 else 32, 4 if width < 128 else 8)


class _GatheredAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (whole_vectors(x) for x in (q, k, v))
        index = index.contiguous()
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        grid, settings = _by_query(q, index)
        launch(
            attend, grid, q=q, k=k, v=v, index=index, out=out, lse=lse, scale=scale, **strides(q=q, k=k, v=v),
            key_heads=q.shape[1] // k.shape[1], list_heads=q.shape[1] // index.shape[1], **settings,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, index, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, index, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(q) if grads[0] is None else whole_vectors(grads[0])
        grad_lse = None if grads[1] is None else grads[1].contiguous()
        dq = q.new_empty(q.shape)
        pairs = q.new_empty(*q.shape[:3], index.shape[3], 2)
        grid, settings = _by_query(q, index)
        launch(
            query_gradients, grid, q=q, k=k, v=v, index=index, out=out, lse=lse, grad=grad, grad_lse=grad_lse, dq=dq,
            pairs=pairs, scale=ctx.scale, **strides(q=q, k=k, v=v, grad=grad), **settings,
        )  # fmt: skip
        dk, dv = _key_gradients(q, k, index, grad, pairs, ctx.scale)
        return dq, dk, dv, None, None


def _by_query(q: Tensor, index: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Return grid and sizes of the kernels of queries."""
    batch, heads, queries, head_dim = q.shape
    sizes = _sizes(head_dim, q.dtype)
    blocks = -(-queries // sizes.queries)
    settings = {"heads": heads, "queries": queries, "slots": index.shape[3], "blocks": blocks, "num_warps": 1}
    settings |= {"D": head_dim, "QUERIES": sizes.queries, "PLACES": sizes.slots, "WIDTH": block(head_dim)}
    return (batch * heads * blocks,), settings | steps_of_lists("index", index, queries * index.shape[3])


def _key_gradients(
    q: Tensor, k: Tensor, index: Tensor, grad: Tensor, pairs: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, head_dim = q.shape
    key_count = k.shape[2]
    slots = index.shape[3]
    entries = queries * slots
    sizes = _sizes(head_dim, q.dtype)
    tiles = -(-entries // sizes.tile)
    keys = torch.where(index < 0, key_count, index).to(torch.int32).view(-1, entries)
    order = counting_sort(keys, key_count.bit_length())
    dk, dv = (torch.zeros(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    parts = q.new_empty(2, batch * heads, tiles, 2, head_dim, dtype=torch.float32)
    grid = (batch * heads * tiles,)
    shared: dict[str, Any] = {"order": order, "keys": keys, "dk": dk, "dv": dv, "key_parts": parts[0]}
    shared |= {
        "value_parts": parts[1],
        "heads": heads,
        "entries": entries,
        "key_count": key_count,
        "tiles": tiles,
        "D": head_dim,
    }
    shared |= {"TILE": sizes.tile, "WIDTH": block(head_dim), **steps_of_lists("order", index, entries)}
    launch(
        tile_gradients, grid, **shared, pairs=pairs, q=q, grad=grad, scale=scale, slots=slots,
        **strides(q=q, grad=grad), PRECISION=precision(), num_warps=sizes.warps,
    )  # fmt: skip
    launch(join_tiles, grid, **shared, AT_ONCE=8 if head_dim <= 128 else 4, num_warps=1)
    return dk, dv
