"""YOSO attention by kernels: no hash table and no long run's pairs are ever written down, and no step waits for data.

In each hash the sources lie sorted by (bucket, position). What a target may see of its bucket is then a window of
sorted places [first, end), causal or not, so the sum over it is a running sum read at the window's last place: the
array of running sums takes the place of a hash table, and needs no chunks. Each run is summed from its own beginning,
never as the difference of two sums. ∇v is the same with queries for sources, from the latest on if causal.

For ∇q_i = τ/2 Σ_j B_ij (g_i·v_j) k_j the window is cut at its last boundary between spans of 4·D places. What lies
before it is g_i times a running sum of the matrices v_j k_jᵀ, written at boundaries only; the rest goes pair by pair.
So a token costs its pairs in a small bucket, and less than 4·D pairs and one matrix in a bucket of any size: nothing is
to be chosen by the number of collisions. ∇k likewise.

A token is owned by one program of a launch and hashes are added in order: results are deterministic. There are no
atomics: to add rows to tables moves 8·D bytes a row, and 4·D to clear them, where running sums move 4·D.

Cost, for n = B·H·m·L (token, hash) pairs, L = Lq = Lk, e bytes a number of v, c of a code (8 with masks or documents),
T = 64 places in a product (32 in fp32), S the tokens of a run, as a token meets them:
- forward: n codes sorted; n·(2c + 28 + 8·D) bytes; 2·D·T·n FLOPs; values gathered, D·e·n bytes, mostly of the L2 cache.
- backward: 2n codes sorted, n·(c + 16) bytes more; the forward's for ∇v; and for ∇q and ∇k each n·(24 + 10·D) bytes
  besides D·e·n·(3 to 5) gathered, mostly of the L2 cache, and n·(4·D·max(T, min(S, 2·D)) + 4·D²) FLOPs.
Memory, besides inputs and outputs: that of one hash, 4·D + 40 bytes a token, or of as many hashes as fit 1 GiB; half
as much again in the backward. Launches: 4 a slab of such hashes, and in the backward 11 a slab and 2 a hash.

B batch, H heads, L length, D head dim, m hashes, τ code bits, G = B·H rows, S spans.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasparse.ops.autocast import Function
from megasparse.ops.blocks import at_most
from megasparse.ops.hash_table_attention import kernels
from megasparse.ops.hash_table_attention.layout import groups
from megasparse.ops.hash_table_attention.specification import HashTableAttentionSpec
from megasparse.ops.kernels import block, launch, precision

_BYTES = 1 << 30  # running sums of several hashes at a time; more only where one hash has more
_SEGMENT = 16  # spans whose runs one program joins
_SEARCHES = 256  # targets of a program that finds windows


class _Sizes(NamedTuple):
    """Sizes of the kernels' tiles. width: the head dim's power of two. span: sources whose sum is one program's. reads:
    targets of a program that reads sums. tile: sources in a product that sums runs or products; block and pairs:
    targets and sources in one that weights. columns: of the matrices and gradients that one program has. warps: of all
    these but reads.
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
    span, reads = max(128, 4 * width), max(16, 2048 // width)
    if dtype == torch.float32:
        return _Sizes(width, span, reads, 32, 32, 32, min(width, 32), 8 if width > 32 else 4)
    return _Sizes(width, span, reads, 64, 64, 32, min(width, 64), 8 if width > 128 else 4)


class _Sorted(NamedTuple):
    """Tokens of each (row, hash) by (bucket, position), from the latest position if reversed. (G, m, L) each.

    order: int32 token numbers. buckets: theirs.
    """

    buckets: Tensor
    order: Tensor
    reversed: bool


class _Windows(NamedTuple):
    """Ranges [first, end) of sorted sources that each target may see, (G, m, targets) int32."""

    first: Tensor
    end: Tensor


def hash_table_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_codes: Tensor,
    k_codes: Tensor,
    spec: HashTableAttentionSpec,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `operator.hash_table_attention` by kernels. Products are computed in v's dtype, their sums in
    fp32. Strided tensors are copied once.
    """
    group = groups(q[:, :1], k[:, :1], query_mask, key_mask, segments)
    return _HashTableAttention.apply(q, k, v, q_codes, k_codes, group, spec)


class _HashTableAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor,
        group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        hashes = q_codes.shape[2]
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float32, device=q.device)
        met = torch.zeros(q.shape[0] * q.shape[1], q.shape[2], dtype=torch.int64, device=q.device)
        values = _rows(v, v.dtype)
        for queries, keys in _slabs(q_codes, k_codes, group, spec, v.shape[3]):
            sources = _sorted(keys, reverse=False)
            windows = _windows(queries, sources, spec)
            met += (windows.end - windows.first).sum(1)
            _add_sums(out, values, sources, windows, 1 / hashes)
        ctx.spec, ctx.group = spec, group
        ctx.save_for_backward(q, k, v, q_codes, k_codes)
        total = (met.to(torch.float32) / hashes).view(q.shape[:3])
        ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, q_codes, k_codes = ctx.saved_tensors
        spec: HashTableAttentionSpec = ctx.spec
        hashes = q_codes.shape[2]
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        rows_q, rows_k, rows_v, g = (_rows(x, v.dtype) for x in (q, k, v, grads[0]))
        factor = spec.code_bits / (2 * hashes)
        for queries, keys in _slabs(q_codes, k_codes, ctx.group, spec, v.shape[3]):
            by_query, by_key = _sorted(queries, reverse=spec.causal), _sorted(keys, reverse=False)
            seen, seeing = _windows(queries, by_key, spec), _windows(keys, by_query, spec)
            _add_sums(dv, g, by_query, seeing, 1 / hashes)
            _add_weighted(dq, (g, by_query), seen, (rows_v, rows_k, by_key), factor)
            _add_weighted(dk, (rows_v, by_key), seeing, (g, rows_q, by_query), factor)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous().flatten(0, 1)


def _slabs(
    q_codes: Tensor, k_codes: Tensor, group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec, head_dim: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Buckets of queries (G, m', Lq) and keys (G, m', Lk) of some hashes at a time: the codes, or (group, code)."""
    rows, hashes = q_codes.shape[0] * q_codes.shape[1], q_codes.shape[2]
    longest = max(q_codes.shape[3], k_codes.shape[3])
    step = max(1, at_most(_BYTES) // max(1, rows * longest * head_dim * 4))
    for start in range(0, hashes, step):
        both = [codes[:, :, start : start + step] for codes in (q_codes, k_codes)]
        if group is not None:
            first = [(number << spec.code_bits)[:, None, None] for number in group]  # (B, 1, 1, L)
            both = [codes.to(torch.int64) + number for codes, number in zip(both, first, strict=True)]
        yield both[0].flatten(0, 1).contiguous(), both[1].flatten(0, 1).contiguous()


def _sorted(buckets: Tensor, reverse: bool) -> _Sorted:
    if not reverse:
        ordered, order = torch.sort(buckets, dim=-1, stable=True)
        return _Sorted(ordered, order.to(torch.int32), reverse)
    ordered, order = torch.sort(buckets.flip(-1), dim=-1, stable=True)
    return _Sorted(ordered, order.to(torch.int32).neg_().add_(buckets.shape[2] - 1), reverse)


def _windows(targets: Tensor, sources: _Sorted, spec: HashTableAttentionSpec) -> _Windows:
    rows, hashes, count = targets.shape
    length = sources.order.shape[2]
    windows = _Windows(*(torch.empty(targets.shape, dtype=torch.int32, device=targets.device) for _ in range(2)))
    blocks = -(-count // _SEARCHES)
    arguments = (targets, *sources[:2], *windows, count, length, blocks, length.bit_length())
    fixed = {"CAUSAL": spec.causal, "REVERSED": sources.reversed, "BLOCK": _SEARCHES}
    launch(kernels.find_windows, (rows * hashes * blocks,), *arguments, **fixed, num_warps=4)
    return windows


def _add_sums(out: Tensor, values: Tensor, sources: _Sorted, windows: _Windows, scale: float) -> None:
    """Add to out (B, H, targets, D) scale·Σ of the values (G, length, D) in the windows, over the hashes."""
    rows, hashes, count = windows.first.shape
    length, head_dim = values.shape[1:]
    sizes = _sizes(head_dim, values.dtype)
    spans = -(-length // sizes.span)
    sums = torch.empty(rows, hashes, length, head_dim, dtype=torch.float32, device=out.device)
    tails = torch.empty(rows, hashes, spans, head_dim, dtype=torch.float32, device=out.device)
    fixed = {"D": head_dim, "WIDTH": sizes.width, "SPAN": sizes.span}
    arguments = (values, sources.order, sources.buckets, sums, tails, hashes, length, spans)
    own = {"TILE": sizes.tile, "PRECISION": precision(), "num_warps": sizes.warps}
    launch(kernels.sum_runs, (rows * hashes * spans,), *arguments, **fixed, **own)
    _join_spans(tails, sources, sizes)
    blocks = -(-count // sizes.reads)
    targets = (*windows, out, scale, hashes, count, length, spans, blocks)
    launch(kernels.read_sums, (rows * blocks,), sums, tails, *targets, **fixed, BLOCK=sizes.reads, num_warps=4)


def _join_spans(tails: Tensor, sources: _Sorted, sizes: _Sizes) -> None:
    """Join tails (G, m, S, ...), in place."""
    spans = tails.shape[2]
    if spans == 1:
        return
    wide = tails[0, 0, 0].numel()
    columns = min(1024, block(wide))
    segments, parts = -(-spans // _SEGMENT), -(-wide // columns)
    arguments = (tails, sources.buckets, sources.order.shape[2], spans, segments, parts, wide)
    grid = (tails.shape[0] * tails.shape[1] * segments * parts,)
    fixed = {"SPAN": sizes.span, "SEGMENT": _SEGMENT, "BLOCK": columns}
    launch(kernels.join_spans, grid, *arguments, **fixed, num_warps=1 if columns < 256 else 4)


def _add_weighted(
    out: Tensor,
    targets: tuple[Tensor, _Sorted],
    windows: _Windows,
    sources: tuple[Tensor, Tensor, _Sorted],
    scale: float,
) -> None:
    """Add to out_i scale·Σ_j (left_i·left_j) right_j over i's windows in all hashes. targets: left (G, targets, D)
    and their own order. sources: left and right (G, length, D) and their order.
    """
    (target_left, target_order), (left, right, order) = targets, sources
    rows, hashes, count = windows.first.shape
    length, head_dim = left.shape[1:]
    sizes = _sizes(head_dim, left.dtype)
    spans = -(-length // sizes.span)
    parts = -(-head_dim // sizes.columns)
    fixed = {"D": head_dim, "WIDTH": sizes.width, "COLUMNS": sizes.columns, "SPAN": sizes.span}
    fixed |= {"num_warps": sizes.warps}
    products = torch.empty(rows, hashes, spans, head_dim, head_dim, dtype=torch.float32, device=out.device)
    arguments = (left, right, order.order, order.buckets, products, hashes, length, spans, parts)
    grid = (rows * hashes * spans * parts,)
    launch(kernels.sum_products, grid, *arguments, **fixed, TILE=sizes.tile, PRECISION=precision())
    _join_spans(products, order, sizes)
    blocks = -(-count // sizes.block)
    own = {"BLOCK": sizes.block, "TILE": sizes.pairs, "DEPTH": min(32, sizes.width), "PRECISION": precision()}
    # Neighbours in one hash are strangers in the next: a launch each keeps every row one program's.
    for number in range(hashes):
        tensors = (target_left, target_order.order, *windows, left, right, order.order, products, out)
        numbers = (scale, number, hashes, count, length, spans, blocks, parts)
        launch(kernels.weighted_sums, (rows * blocks * parts,), *tensors, *numbers, **fixed, **own, num_stages=2)
