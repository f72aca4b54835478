"""YOSO attention as Triton kernels, without hash tables or lists of pairs in memory, and without host synchronisation.

In each hash the sources (tokens that are summed) of a (row, hash) are sorted by (bucket, position), so a bucket is a
run, and the sources visible to a target (the token that receives the sum) are a window [first, end) of sorted indices,
causal or not. The sum over a window is a running sum, from its run's start, read at the window's last index: the array
of running sums replaces a hash table, and needs no chunks. ∇v is the same with queries as sources, in reverse order if
causal.

For ∇q_i = τ/2 Σ_j B_ij (g_i·v_j) k_j the window is split at its last boundary between spans of 4·D indices. The part
before it is g_i times a running sum of the matrices v_j k_jᵀ, stored at boundaries only; the rest is computed pair by
pair: at most 4·D pairs and one matrix per token in a bucket of any size. ∇k likewise.

Each program sums one span, and `join_spans` adds the sums of whole spans. One program adds all hashes of a target in
order.

m hashes, τ code bits, S spans. Arrays of (row, hash) are contiguous: buckets and order (G, m, length), first and end
(G, m, targets' length).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megasparse.ops.counting_sort_kernels import counting_sort
from megasparse.ops.hash_table_attention import HashTableAttentionSpec, groups
from megasparse.ops.kernels import block, dot, launch, precision
from megasparse.ops.operator import Function


@triton.jit
def _rows(x, row, valid, columns, D: tl.constexpr):
    """Return rows (n) of x (..., D), 0 for invalid rows."""
    return tl.load(x + row[:, None] * D + columns[None, :], mask=valid[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _store_rows(x, row, valid, columns, value, ADD: tl.constexpr, D: tl.constexpr):
    """Store rows (n) of x (..., D) = value; ADD: add value to the stored rows."""
    address = x + row[:, None] * D + columns[None, :]
    mask = valid[:, None] & (columns < D)[None, :]
    if ADD:
        value += tl.load(address, mask=mask, other=0.0)
    tl.store(address, value.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["hashes", "length", "spans"])
def sum_runs(
    values, order, buckets, sums, tails, hashes, length, spans,
    D: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute sums (G, m, length, D): for each sorted index, the sum of values of its run, from the later of the run's
    start and the span's start on. tails (G, m, S, D): sums at each span's last index.
    """
    program = tl.program_id(0)
    span = program % spans
    row_hash = (program // spans).to(tl.int64)
    row = row_hash // hashes
    base = row_hash * length
    step = tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    carried = tl.zeros([WIDTH], tl.float32)
    stop = tl.minimum((span + 1) * SPAN, length)
    for begin in range(span * SPAN, stop, TILE):
        slot = begin + step
        bucket = tl.load(buckets + base + slot, mask=slot < stop, other=0)
        before = tl.load(buckets + base + tl.maximum(slot - 1, 0), mask=slot < stop, other=0)
        run = tl.cumsum((bucket != before).to(tl.int32), axis=0)  # 0: last run of the previous tile
        token = row * length + tl.load(order + base + slot, mask=slot < stop, other=0)
        value = _rows(values, token, slot < stop, columns, D)
        earlier = (run[:, None] == run[None, :]) & (step[:, None] >= step[None, :])
        total = dot(tl.where(earlier, 1.0, 0.0).to(value.dtype), value, PRECISION)
        total += tl.where((run == 0)[:, None], carried[None, :], 0.0)
        inside = (slot < stop)[:, None] & (columns < D)[None, :]
        address = sums + (base + slot)[:, None] * D + columns[None, :]
        tl.store(address, total.to(sums.dtype.element_ty), mask=inside)
        last = tl.minimum(begin + TILE, stop) - 1
        carried = tl.sum(tl.where((slot == last)[:, None], total, 0.0), axis=0)
    tl.store(tails + (row_hash * spans + span) * D + columns, carried, mask=columns < D)


@triton.jit(do_not_specialize=["length", "spans", "segments", "parts"])
def join_spans(
    tails, buckets, length, spans, segments, parts, wide,
    SPAN: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to each span's tail (G, m, S, wide), in place, the tails of preceding spans that end in the same run. A
    program processes the runs whose first span is in its segment of spans.
    """
    program = tl.program_id(0)
    part = program % parts
    segment = program // parts % segments
    row_hash = (program // parts // segments).to(tl.int64)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < wide
    base = row_hash * length
    span = segment * SEGMENT
    stop = tl.minimum(span + SEGMENT, spans)
    before = tl.load(buckets + base + tl.maximum(span * SPAN - 1, 0))
    active = stop < 0  # no run yet
    running = tl.zeros([BLOCK], tl.float32)
    while span < spans:
        bucket = tl.load(buckets + base + tl.minimum((span + 1) * SPAN, length) - 1)
        joins = (span > 0) & (bucket == before)
        active = (active & joins) | ((joins == 0) & (span < stop))
        tail = tails + (row_hash * spans + span) * wide + columns
        running = tl.where(joins, running, 0.0) + tl.load(tail, mask=inside & active, other=0.0)
        tl.store(tail, running.to(tails.dtype.element_ty), mask=inside & active & joins)
        before = bucket
        span = tl.where(active | (span + 1 < stop), span + 1, spans)


@triton.jit(do_not_specialize=["targets", "length", "blocks", "steps"])
def find_windows(
    target_buckets, buckets, order, first, end, targets, length, blocks, steps,
    CAUSAL: tl.constexpr, REVERSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute first, end (G, m, targets): start of the sources in a target's bucket, and end of the visible ones.

    target_buckets: (G, m, targets), in order of position. CAUSAL: only sources at or before the target are visible.
    REVERSED: sources are in reverse order, and causal ones are at or after the target. steps: bisection steps.
    """
    program = tl.program_id(0)
    row_hash = (program // blocks).to(tl.int64)
    base = row_hash * length
    target = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = target < targets
    bucket = tl.load(target_buckets + row_hash * targets + target, mask=inside, other=0)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + tl.where(inside, length, 0)
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        middle_bucket = tl.load(buckets + base + middle, mask=searching, other=0)
        below = searching & ((middle_bucket > bucket) if REVERSED else (middle_bucket < bucket))
        low = tl.where(below, middle + 1, low)
        high = tl.where(searching & (below == 0), middle, high)
    tl.store(first + row_hash * targets + target, low, mask=inside)
    high = tl.where(inside, length, low)
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        visible = searching & (tl.load(buckets + base + middle, mask=searching, other=0) == bucket)
        if CAUSAL:
            position = tl.load(order + base + middle, mask=searching, other=0)
            visible = visible & ((position >= target) if REVERSED else (position <= target))
        low = tl.where(visible, middle + 1, low)
        high = tl.where(searching & (visible == 0), middle, high)
    tl.store(end + row_hash * targets + target, low, mask=inside)


@triton.jit(do_not_specialize=["hashes", "targets", "length", "spans", "blocks"])
def read_sums(
    sums, tails, first, end, out, met, scale, met_scale, hashes, targets, length, spans, blocks,
    D: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store in out (G, targets, D) (ADD: add to it) scale·Σ_h of the target's window: the sum at its last index, plus
    the previous span's tail if the run started there. met (G, targets) or None: met_scale·Σ_h of its length.
    """
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    target = program % blocks * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, WIDTH)
    inside = target < targets
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    many = tl.zeros([BLOCK], tl.int32)
    for number in range(hashes):
        row_hash = row * hashes + number
        begin = tl.load(first + row_hash * targets + target, mask=inside, other=0)
        last = tl.load(end + row_hash * targets + target, mask=inside, other=0) - 1
        span = last // SPAN
        many += last + 1 - begin
        total += _rows(sums, row_hash * length + last, last >= begin, columns, D).to(tl.float32)
        total += _rows(tails, row_hash * spans + span - 1, (last >= begin) & (begin < span * SPAN), columns, D)
    _store_rows(out, row * targets + target, inside, columns, scale * total, ADD, D)
    if met is not None:
        count = met_scale * many.to(tl.float32)
        if ADD:
            count += tl.load(met + row * targets + target, mask=inside, other=0.0)
        tl.store(met + row * targets + target, count, mask=inside)


@triton.jit(do_not_specialize=["hashes", "length", "spans", "parts"])
def sum_products(
    left, right, order, buckets, products, hashes, length, spans, parts,
    D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute products (G, m, S, D, D): Σ left_j·right_jᵀ over a span's sources in the bucket of its last source."""
    program = tl.program_id(0)
    part = program % parts
    span = program // parts % spans
    row_hash = (program // parts // spans).to(tl.int64)
    row = row_hash // hashes
    base = row_hash * length
    step = tl.arange(0, TILE)
    rows = tl.arange(0, WIDTH)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    stop = tl.minimum((span + 1) * SPAN, length)
    last_bucket = tl.load(buckets + base + stop - 1)
    total = tl.zeros([WIDTH, COLUMNS], tl.float32)
    for begin in range(span * SPAN, stop, TILE):
        if tl.load(buckets + base + tl.minimum(begin + TILE, stop) - 1) == last_bucket:
            slot = begin + step
            inside = (slot < stop) & (tl.load(buckets + base + slot, mask=slot < stop, other=0) == last_bucket)
            token = row * length + tl.load(order + base + slot, mask=inside, other=0)
            a = _rows(left, token, inside, rows, D)
            b = _rows(right, token, inside, columns, D)
            total += dot(tl.trans(a), b, PRECISION)
    slot = (row_hash * spans + span) * D * D + rows[:, None] * D + columns[None, :]
    valid = (rows < D)[:, None] & (columns < D)[None, :]
    tl.store(products + slot, total.to(products.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["hashes", "targets", "length", "spans", "blocks", "parts"])
def weighted_sums(
    target_left, target_order, first, end, left, right, order, products, out,
    hashes, targets, length, spans, blocks, parts,
    D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out (G, m, targets, D): Σ_j (target_left_i·left_j)·right_j over the target's window in each hash.

    A program processes a block of targets sorted by their buckets, whose windows are close together. The part of a
    window before its last boundary between spans is in `products`.
    """
    program = tl.program_id(0)
    part = program % parts
    block = program // parts % blocks
    row_hash = (program // parts // blocks).to(tl.int64)
    row = row_hash // hashes
    base = row_hash * length
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_order + row_hash * targets + slot, mask=slot < targets, other=0)
    begin = tl.load(first + row_hash * targets + target, mask=slot < targets, other=0)
    close = tl.load(end + row_hash * targets + target, mask=slot < targets, other=0)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)

    span = close // SPAN
    whole = (begin < span * SPAN) & (begin < close)
    begin = tl.where(whole, span * SPAN, begin)
    at = tl.min(tl.where(begin < close, begin, length), axis=0)
    while at < length:
        source = at + tl.arange(0, TILE)
        token = row * length + tl.load(order + base + source, mask=source < length, other=0)
        weight = tl.zeros([BLOCK, TILE], tl.float32)
        for start in range(0, WIDTH, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            a = _rows(target_left, row * targets + target, slot < targets, depth, D)
            weight += dot(a, tl.trans(_rows(left, token, source < length, depth, D)), PRECISION)
        visible = (source[None, :] >= begin[:, None]) & (source[None, :] < close[:, None])
        b = _rows(right, token, source < length, columns, D)
        total += dot(tl.where(visible, weight, 0.0).to(b.dtype), b, PRECISION)
        at += TILE
        # Skip sources that are not visible to any target of this block
        at = tl.min(tl.where(at < close, tl.maximum(begin, at), length), axis=0)

    boundary = tl.min(tl.where(whole, span, spans + 1), axis=0)
    while boundary <= spans:
        for start in range(0, WIDTH, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            a = _rows(target_left, row * targets + target, whole & (span == boundary), depth, D)
            b = _rows(products, (row_hash * spans + boundary - 1) * D + depth, depth < D, columns, D)
            if a.dtype != tl.float32:  # sums of long runs can exceed the range of fp16
                a = a.to(tl.bfloat16)
                b = b.to(tl.bfloat16)
            total += dot(a, b, PRECISION)
        boundary = tl.min(tl.where(whole & (span > boundary), span, spans + 1), axis=0)

    _store_rows(out, row_hash * targets + target, slot < targets, columns, total, False, D)


@triton.jit(do_not_specialize=["hashes", "targets", "blocks"])
def add_hashes(
    partial, out, scale, hashes, targets, blocks,
    D: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store in out (G, targets, D) (ADD: add to it) scale·Σ_h partial (G, m, targets, D)."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    target = program % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for number in range(hashes):
        total += _rows(partial, (row * hashes + number) * targets + target, target < targets, columns, D).to(tl.float32)
    _store_rows(out, row * targets + target, target < targets, columns, scale * total, ADD, D)


_BYTES = 1 << 31  # memory for the results of several hashes, at least one hash
_SEGMENT = 16  # spans per program of `join_spans`
_SEARCHES = 256  # targets per program of `find_windows`


class _Sizes(NamedTuple):
    """Tile sizes. width: head dim rounded up to a power of two. span: sources summed by one program. reads: targets per
    program of `read_sums`. tile: sources per product in sums of runs or products; block and pairs: targets and sources
    per product in `weighted_sums`. columns: of matrices and gradients per program. warps: except for reads.
    """

    width: int
    span: int
    reads: int
    tile: int
    block: int
    pairs: int
    columns: int
    warps: int


def _sizes(head_dim: int, dtype: torch.dtype) -> _Sizes:
    width = block(head_dim)
    span = max(128, 4 * width)
    reads = max(16, 2048 // width)
    if dtype == torch.float32:
        return _Sizes(width, span, reads, 32, 32, 32, min(width, 32), 8 if width > 32 else 4)
    return _Sizes(width, span, reads, 64, 64, 32, min(width, 64), 8 if width > 128 else 4)


class _Sorted(NamedTuple):
    """Tokens of each (row, hash) sorted by (bucket, position), or in reverse order: their buckets and int32 numbers."""

    buckets: Tensor
    order: Tensor
    reversed: bool


def hash_table_attention(
    q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor, spec: HashTableAttentionSpec,
    key_mask: Tensor | None = None, segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `hash_table_attention.hash_table_attention`, products in v's dtype and their sums in fp32."""
    group = groups(q[:, :1], k[:, :1], key_mask, segments)
    width = v.shape[3]
    if width > q.shape[3]:  # pad keys or values, because their products are square
        q, k = (F.pad(x, (0, width - x.shape[3])) for x in (q, k))
    elif width < q.shape[3]:
        v = F.pad(v, (0, q.shape[3] - width))
    out, matches = _HashTableAttention.apply(q, k, v, q_codes, k_codes, group, spec)
    return out[..., :width], matches


class _HashTableAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor,
        group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        hashes = q_codes.shape[2]
        slabs = _slabs(q_codes, k_codes, v)
        several = len(slabs) > 1
        out = _total(q, (*q.shape[:3], v.shape[3]), torch.float32, several)
        matches = _total(q, q.shape[:3], torch.float32, several)
        [values] = _row_copies(v.dtype, v)
        for slab in slabs:
            queries, keys = _buckets(q_codes, k_codes, group, spec, slab)
            sources = _sorted(keys, spec.code_bits)
            _add_sums(out, values, sources, _windows(queries, sources, spec), hashes, several, matches)
        ctx.spec = spec
        ctx.group = group
        ctx.save_for_backward(q, k, v, q_codes, k_codes)
        total = matches / hashes if several else matches
        ctx.mark_non_differentiable(total)
        ctx.set_materialize_grads(False)  # `total` is not differentiable
        return out, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, q_codes, k_codes = ctx.saved_tensors
        spec: HashTableAttentionSpec = ctx.spec
        hashes = q_codes.shape[2]
        slabs = _slabs(q_codes, k_codes, v)
        several = len(slabs) > 1
        dq, dk, dv = (_total(x, x.shape, x.dtype, several) for x in (q, k, v))
        rows_q, rows_k, rows_v, g = _row_copies(v.dtype, q, k, v, grads[0])
        factor = spec.code_bits / (2 * hashes)
        for slab in slabs:
            queries, keys = _buckets(q_codes, k_codes, ctx.group, spec, slab)
            by_query = _sorted(queries, spec.code_bits, reverse=spec.causal)
            by_key = _sorted(keys, spec.code_bits)
            of_queries = _windows(queries, by_key, spec)
            of_keys = _windows(keys, by_query, spec)
            _add_sums(dv, g, by_query, of_keys, hashes, several)
            _add_weighted(dq, (g, by_query), of_queries, (rows_v, rows_k, by_key), factor, several)
            _add_weighted(dk, (rows_v, by_key), of_keys, (g, rows_q, by_query), factor, several)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _total(like: Tensor, shape: Sequence[int], dtype: torch.dtype, several: bool) -> Tensor:
    """Return the accumulator of slabs: fp32 zeros if there are several, else empty in the result's dtype."""
    return torch.zeros(shape, device=like.device) if several else like.new_empty(shape, dtype=dtype)


def _row_copies(dtype: torch.dtype, *xs: Tensor) -> list[Tensor]:
    """Return each x (B, H, L, D) as (G, L, D), contiguous and in the dtype, copied in one launch."""
    rows = [x if x.dtype == dtype and x.is_contiguous() else x.new_empty(x.shape, dtype=dtype) for x in xs]
    copied = [(row, x) for row, x in zip(rows, xs, strict=True) if row is not x]
    if copied:
        torch._foreach_copy_([row for row, _ in copied], [x for _, x in copied])
    return [row.flatten(0, 1) for row in rows]


def _own_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype of a hash's results; sums of long runs can exceed the range of fp16."""
    return torch.bfloat16 if values.dtype == torch.bfloat16 else torch.float32


def _slabs(q_codes: Tensor, k_codes: Tensor, v: Tensor) -> list[slice]:
    batch, heads, hashes, count = q_codes.shape
    size = batch * heads * max(count, v.shape[2]) * v.shape[3] * _own_dtype(v).itemsize
    step = max(1, _BYTES // max(1, size))
    return [slice(start, start + step) for start in range(0, hashes, step)]


def _buckets(
    q_codes: Tensor, k_codes: Tensor, group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec, slab: slice
) -> tuple[Tensor, Tensor]:
    """Return buckets of queries and keys (G, m', L) of a slab's hashes: the codes, or (group, code)."""
    both = [codes[:, :, slab] for codes in (q_codes, k_codes)]
    if group is not None:
        first = [(number << spec.code_bits)[:, None, None] for number in group]  # (B, 1, 1, L)
        both = [codes.to(torch.int64) + number for codes, number in zip(both, first, strict=True)]
    return both[0].flatten(0, 1).contiguous(), both[1].flatten(0, 1).contiguous()


def _sorted(buckets: Tensor, code_bits: int, reverse: bool = False) -> _Sorted:
    if buckets.dtype == torch.int64:
        ordered, order = torch.sort(buckets, dim=-1, stable=True)
        if reverse:
            ordered = ordered.flip(-1)
            order = order.flip(-1)
        return _Sorted(ordered, order.to(torch.int32), reverse)
    ordered = torch.empty_like(buckets)
    order = counting_sort(buckets.flatten(0, 1), code_bits, ordered.flatten(0, 1), reverse)
    return _Sorted(ordered, order.view(buckets.shape), reverse)


def _windows(targets: Tensor, sources: _Sorted, spec: HashTableAttentionSpec) -> dict[str, Tensor]:
    """Return the ranges first … end − 1 of sorted sources visible to each target, (G, m, targets) int32."""
    rows, hashes, count = targets.shape
    length = sources.order.shape[2]
    windows = {name: targets.new_empty(targets.shape, dtype=torch.int32) for name in ("first", "end")}
    blocks = -(-count // _SEARCHES)
    launch(
        find_windows, (rows * hashes * blocks,), target_buckets=targets, buckets=sources.buckets, order=sources.order,
        **windows, targets=count, length=length, blocks=blocks, steps=length.bit_length(), CAUSAL=spec.causal,
        REVERSED=sources.reversed, BLOCK=_SEARCHES,
    )  # fmt: skip
    return windows


def _add_sums(
    out: Tensor, values: Tensor, sources: _Sorted, windows: dict[str, Tensor], all_hashes: int, several: bool,
    met: Tensor | None = None,
) -> None:  # fmt: skip
    """Add to out (B, H, targets, D) the sum of values (G, length, D) in the windows, over the hashes, /all_hashes; and
    to met (B, H, targets) the number of values, /all_hashes if there is one slab.
    """
    rows, hashes, count = windows["first"].shape
    length, head_dim = values.shape[1:]
    sizes = _sizes(head_dim, values.dtype)
    spans = -(-length // sizes.span)
    sums = torch.empty(rows, hashes, length, head_dim, dtype=_own_dtype(values), device=out.device)
    tails = out.new_empty(rows, hashes, spans, head_dim, dtype=torch.float32)
    shared = {"sums": sums, "tails": tails, "hashes": hashes, "length": length, "spans": spans}
    shared |= {"D": head_dim, "WIDTH": sizes.width, "SPAN": sizes.span}
    launch(
        sum_runs, (rows * hashes * spans,), values=values, order=sources.order, buckets=sources.buckets, **shared,
        TILE=sizes.tile, PRECISION=precision(), num_warps=sizes.warps,
    )  # fmt: skip
    _join_spans(tails, sources, sizes)
    blocks = -(-count // sizes.reads)
    launch(
        read_sums, (rows * blocks,), **shared, **windows, out=out, met=met, scale=1 / all_hashes,
        met_scale=1.0 if several else 1 / all_hashes, targets=count, blocks=blocks, ADD=several, BLOCK=sizes.reads,
    )  # fmt: skip


def _join_spans(tails: Tensor, sources: _Sorted, sizes: _Sizes) -> None:
    """Join tails (G, m, S, ...), in place."""
    spans = tails.shape[2]
    if spans == 1:
        return
    wide = tails[0, 0, 0].numel()
    columns = min(1024, block(wide))
    segments = -(-spans // _SEGMENT)
    parts = -(-wide // columns)
    launch(
        join_spans, (tails.shape[0] * tails.shape[1] * segments * parts,), tails=tails, buckets=sources.buckets,
        length=sources.order.shape[2], spans=spans, segments=segments, parts=parts, wide=wide, SPAN=sizes.span,
        SEGMENT=_SEGMENT, BLOCK=columns, num_warps=1 if columns < 256 else 4,
    )  # fmt: skip


def _add_weighted(
    out: Tensor, targets: tuple[Tensor, _Sorted], windows: dict[str, Tensor], sources: tuple[Tensor, Tensor, _Sorted],
    scale: float, several: bool,
) -> None:  # fmt: skip
    """Add to out_i scale·Σ_j (left_i·left_j) right_j over i's windows in all hashes. targets: left (G, targets, D) and
    their order. sources: left and right (G, length, D) and their order.
    """
    target_left, target_order = targets
    left, right, order = sources
    rows, hashes, count = windows["first"].shape
    length, head_dim = left.shape[1:]
    sizes = _sizes(head_dim, left.dtype)
    spans = -(-length // sizes.span)
    parts = -(-head_dim // sizes.columns)
    dtype = _own_dtype(left)
    products = out.new_empty(rows, hashes, spans, head_dim, head_dim, dtype=dtype)
    shared = {"left": left, "right": right, "order": order.order, "products": products, "hashes": hashes}
    shared |= {"length": length, "spans": spans, "parts": parts, "D": head_dim, "WIDTH": sizes.width}
    shared |= {"COLUMNS": sizes.columns, "SPAN": sizes.span, "PRECISION": precision(), "num_warps": sizes.warps}
    launch(sum_products, (rows * hashes * spans * parts,), **shared, buckets=order.buckets, TILE=sizes.tile)
    _join_spans(products, order, sizes)
    blocks = -(-count // sizes.block)
    # Neighbours in one hash are unrelated in the next, so each hash writes separate results.
    partial = out.new_empty(rows, hashes, count, head_dim, dtype=dtype)
    launch(
        weighted_sums, (rows * hashes * blocks * parts,), **shared, target_left=target_left,
        target_order=target_order.order, **windows, out=partial, targets=count, blocks=blocks, BLOCK=sizes.block,
        TILE=sizes.pairs, DEPTH=min(32, sizes.width), num_stages=2,
    )  # fmt: skip
    blocks = -(-count // sizes.reads)
    launch(
        add_hashes, (rows * blocks,), partial=partial, out=out, scale=scale, hashes=hashes, targets=count,
        blocks=blocks, D=head_dim, WIDTH=sizes.width, ADD=several, BLOCK=sizes.reads,
    )  # fmt: skip
