"""YOSO attention by kernels: no hash table and no long run's pairs are ever written down, and no step waits for data.

In each hash the sources lie sorted by (bucket, position). What a target may see of its bucket is then a window of
sorted places [first, end), causal or not, so the sum over it is a running sum read at the window's last place: the
array of running sums takes the place of a hash table, and needs no chunks. Each run is summed from its own beginning,
never as the difference of two sums. ∇v is the same with queries for sources, from the latest on if causal.

For ∇q_i = τ/2 Σ_j B_ij (g_i·v_j) k_j the window is cut at its last boundary between spans of 4·D places. What lies
before it is g_i times a running sum of the matrices v_j k_jᵀ, written at boundaries only; the rest goes pair by pair.
So a token costs its pairs in a small bucket, and less than 4·D pairs and one matrix in a bucket of any size: nothing is
to be chosen by the number of collisions. ∇k likewise.

A hash's results are added to a target's by one program, in order of the hashes: they are deterministic. There are no
atomics: to add rows to tables moves 8·D bytes a row, and 4·D to clear them, where running sums move 2·p·D.

Cost, for n = B·H·m·L (token, hash) pairs, L = Lq = Lk, e bytes a number of v, p bytes one of a hash's own results (2 in
bf16, else 4), c of a code (2 or 4, 8 with masks or documents), T = 64 places in a product (32 in fp32), S the tokens of
a run, as a token meets them:
- forward: n codes sorted; n·(2c + 20 + 2·p·D) bytes; 2·D·T·n FLOPs; values gathered, D·e·n bytes, mostly of the L2
  cache.
- backward: 2n codes sorted, n·(c + 16) bytes more; the forward's for ∇v; and for ∇q and ∇k each n·(24 + 2.5·p·D) bytes
  besides D·e·n·(3 to 5) gathered, mostly of the L2 cache, and n·(4·D·max(T, min(S, 2·D)) + 4·D²) FLOPs.
Memory, besides inputs and outputs: that of one hash, p·D + 24 bytes a token, or of as many hashes as fit 2 GiB; a
quarter more in the backward. Launches: 7 a slab of such hashes, and in the backward 19.

B batch, H heads, L length, D head dim, m hashes, τ code bits, G = B·H rows, S spans.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.autocast import Function
from megasparse.ops.blocks import at_most
from megasparse.ops.counting_sort.gpu import counting_sort
from megasparse.ops.hash_table_attention import kernels
from megasparse.ops.hash_table_attention.layout import groups
from megasparse.ops.hash_table_attention.specification import HashTableAttentionSpec
from megasparse.ops.kernels import block, launch, precision

_BYTES = 1 << 31  # what several hashes write for themselves at a time; more only where one hash has more
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
    """Tokens of each (row, hash) by (bucket, position), from the last of that order if reversed. (G, m, L) each.

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
    if v.shape[3] > q.shape[3]:  # values with a 1 beside them: products of values and keys are square
        q, k = (F.pad(x, (0, v.shape[3] - x.shape[3])) for x in (q, k))
    return _HashTableAttention.apply(q, k, v, q_codes, k_codes, group, spec)


class _HashTableAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor,
        group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        hashes, slabs = q_codes.shape[2], _slabs(q_codes, k_codes, v)
        several = len(slabs) > 1
        out = _total((*q.shape[:3], v.shape[3]), torch.float32, q.device, several)
        met = _total(q.shape[:3], torch.float32, q.device, several)
        [values] = _rows(v.dtype, v)
        for slab in slabs:
            queries, keys = _buckets(q_codes, k_codes, group, spec, slab)
            sources = _sorted(keys, spec.code_bits)
            _add_sums(out, values, sources, _windows(queries, sources, spec), hashes, several, met)
        ctx.spec, ctx.group = spec, group
        ctx.save_for_backward(q, k, v, q_codes, k_codes)
        total = met / hashes if several else met
        ctx.mark_non_differentiable(total)
        ctx.set_materialize_grads(False)  # of the total
        return out, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, q_codes, k_codes = ctx.saved_tensors
        spec: HashTableAttentionSpec = ctx.spec
        hashes, slabs = q_codes.shape[2], _slabs(q_codes, k_codes, v)
        several = len(slabs) > 1
        dq, dk, dv = (_total(x.shape, x.dtype, x.device, several) for x in (q, k, v))
        rows_q, rows_k, rows_v, g = _rows(v.dtype, q, k, v, grads[0])
        factor = spec.code_bits / (2 * hashes)
        for slab in slabs:
            queries, keys = _buckets(q_codes, k_codes, ctx.group, spec, slab)
            by_query, by_key = _sorted(queries, spec.code_bits, reverse=spec.causal), _sorted(keys, spec.code_bits)
            seen, seeing = _windows(queries, by_key, spec), _windows(keys, by_query, spec)
            _add_sums(dv, g, by_query, seeing, hashes, several)
            _add_weighted(dq, (g, by_query), seen, (rows_v, rows_k, by_key), factor, several)
            _add_weighted(dk, (rows_v, by_key), seeing, (g, rows_q, by_query), factor, several)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _total(shape: Sequence[int], dtype: torch.dtype, device: torch.device, several: bool) -> Tensor:
    """What slabs are summed in: of several ones in fp32, from 0 on; one writes it in its own dtype."""
    if several:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    return torch.empty(shape, dtype=dtype, device=device)


def _rows(dtype: torch.dtype, *xs: Tensor) -> list[Tensor]:
    """Each x (B, H, L, D) as (G, L, D), contiguous in the dtype; those that are not yet are copied in one launch."""
    rows = [
        x if x.dtype == dtype and x.is_contiguous() else torch.empty(x.shape, dtype=dtype, device=x.device) for x in xs
    ]
    copied = [(row, x) for row, x in zip(rows, xs, strict=True) if row is not x]
    if copied:
        torch._foreach_copy_([row for row, _ in copied], [x for _, x in copied])
    return [row.flatten(0, 1) for row in rows]


def _own_dtype(values: Tensor) -> torch.dtype:
    """The dtype of a hash's own results: a long run's sum may leave the range of fp16."""
    return torch.bfloat16 if values.dtype == torch.bfloat16 else torch.float32


def _slabs(q_codes: Tensor, k_codes: Tensor, v: Tensor) -> list[slice]:
    """Hashes at a time."""
    batch, heads, hashes, count = q_codes.shape
    each = batch * heads * max(count, v.shape[2]) * v.shape[3] * _own_dtype(v).itemsize
    step = max(1, at_most(_BYTES) // max(1, each))
    return [slice(start, start + step) for start in range(0, hashes, step)]


def _buckets(
    q_codes: Tensor, k_codes: Tensor, group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec, slab: slice
) -> tuple[Tensor, Tensor]:
    """Buckets of queries (G, m', Lq) and keys (G, m', Lk) of a slab's hashes: the codes, or (group, code)."""
    both = [codes[:, :, slab] for codes in (q_codes, k_codes)]
    if group is not None:
        first = [(number << spec.code_bits)[:, None, None] for number in group]  # (B, 1, 1, L)
        both = [codes.to(torch.int64) + number for codes, number in zip(both, first, strict=True)]
    return both[0].flatten(0, 1).contiguous(), both[1].flatten(0, 1).contiguous()


def _sorted(buckets: Tensor, code_bits: int, reverse: bool = False) -> _Sorted:
    if buckets.dtype == torch.int64:
        ordered, order = torch.sort(buckets, dim=-1, stable=True)
        if reverse:
            ordered, order = ordered.flip(-1), order.flip(-1)
        return _Sorted(ordered, order.to(torch.int32), reverse)
    ordered = torch.empty_like(buckets)
    order = counting_sort(buckets.flatten(0, 1), code_bits, ordered.flatten(0, 1), reverse)
    return _Sorted(ordered, order.view(buckets.shape), reverse)


def _windows(targets: Tensor, sources: _Sorted, spec: HashTableAttentionSpec) -> _Windows:
    rows, hashes, count = targets.shape
    length = sources.order.shape[2]
    windows = _Windows(*(torch.empty(targets.shape, dtype=torch.int32, device=targets.device) for _ in range(2)))
    blocks = -(-count // _SEARCHES)
    arguments = (targets, *sources[:2], *windows, count, length, blocks, length.bit_length())
    fixed = {"CAUSAL": spec.causal, "REVERSED": sources.reversed, "BLOCK": _SEARCHES}
    launch(kernels.find_windows, (rows * hashes * blocks,), *arguments, **fixed, num_warps=4)
    return windows


def _add_sums(
    out: Tensor,
    values: Tensor,
    sources: _Sorted,
    windows: _Windows,
    all_hashes: int,
    several: bool,
    met: Tensor | None = None,
) -> None:
    """Add to out (B, H, targets, D) Σ of the values (G, length, D) in the windows, over the hashes, /all_hashes; to met
    (B, H, targets) their number, also /all_hashes where out is not of several slabs.
    """
    rows, hashes, count = windows.first.shape
    length, head_dim = values.shape[1:]
    sizes = _sizes(head_dim, values.dtype)
    spans = -(-length // sizes.span)
    sums = torch.empty(rows, hashes, length, head_dim, dtype=_own_dtype(values), device=out.device)
    tails = torch.empty(rows, hashes, spans, head_dim, dtype=torch.float32, device=out.device)
    fixed = {"D": head_dim, "WIDTH": sizes.width, "SPAN": sizes.span}
    arguments = (values, sources.order, sources.buckets, sums, tails, hashes, length, spans)
    own = {"TILE": sizes.tile, "PRECISION": precision(), "num_warps": sizes.warps}
    launch(kernels.sum_runs, (rows * hashes * spans,), *arguments, **fixed, **own)
    _join_spans(tails, sources, sizes)
    blocks = -(-count // sizes.reads)
    scales = 1 / all_hashes, 1.0 if several else 1 / all_hashes
    targets = (*windows, out, met, *scales, hashes, count, length, spans, blocks)
    own = {"ADD": several, "BLOCK": sizes.reads, "num_warps": 4}
    launch(kernels.read_sums, (rows * blocks,), sums, tails, *targets, **fixed, **own)


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
    several: bool,
) -> None:
    """Add to out_i scale·Σ_j (left_i·left_j) right_j over i's windows in all hashes. targets: left (G, targets, D)
    and their own order. sources: left and right (G, length, D) and their order. several: out is of several slabs.
    """
    (target_left, target_order), (left, right, order) = targets, sources
    rows, hashes, count = windows.first.shape
    length, head_dim = left.shape[1:]
    sizes = _sizes(head_dim, left.dtype)
    spans = -(-length // sizes.span)
    parts = -(-head_dim // sizes.columns)
    fixed = {"D": head_dim, "WIDTH": sizes.width, "COLUMNS": sizes.columns, "SPAN": sizes.span}
    fixed |= {"num_warps": sizes.warps}
    own_dtype = _own_dtype(left)
    products = torch.empty(rows, hashes, spans, head_dim, head_dim, dtype=own_dtype, device=out.device)
    arguments = (left, right, order.order, order.buckets, products, hashes, length, spans, parts)
    grid = (rows * hashes * spans * parts,)
    launch(kernels.sum_products, grid, *arguments, **fixed, TILE=sizes.tile, PRECISION=precision())
    _join_spans(products, order, sizes)
    blocks = -(-count // sizes.block)
    # Neighbours in one hash are strangers in the next: each hash writes its own, in any order of its targets.
    own = torch.empty(rows, hashes, count, head_dim, dtype=own_dtype, device=out.device)
    tensors = (target_left, target_order.order, *windows, left, right, order.order, products, own)
    numbers = (hashes, count, length, spans, blocks, parts)
    tiles = {"BLOCK": sizes.block, "TILE": sizes.pairs, "DEPTH": min(32, sizes.width), "PRECISION": precision()}
    grid = (rows * hashes * blocks * parts,)
    launch(kernels.weighted_sums, grid, *tensors, *numbers, **fixed, **tiles, num_stages=2)
    blocks = -(-count // sizes.reads)
    settings = {"D": head_dim, "WIDTH": sizes.width, "ADD": several, "BLOCK": sizes.reads, "num_warps": 4}
    launch(kernels.add_hashes, (rows * blocks,), own, out, scale, hashes, count, blocks, **settings)
