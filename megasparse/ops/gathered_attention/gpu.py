"""Gathered attention by kernels: queries gather their keys, forward and backward; keys collect over a sorted list.

The list of a row's entries by key is cut in tiles of equal size, and what a key gets from several tiles is added up in
their order: no program's work grows with the queries that chose one key, and two runs are the same to the last bit.

B batch, H heads, Lq queries, Lk keys, D head dim, K index places, T entries in a tile, n = B·H·Lq·K.

Cost, with e bytes a number of q and i of the index. Forward: 4D·n FLOPs; n·2D·e bytes gathered, B·H·Lq·(2D·e + 4) and
the index (n·i, or Lq·K·i where heads and sequences share it). Backward: 6D·n FLOPs and the forward's bytes again for
dq, besides B·H·Lq·2D·e, with n·2e bytes written; then for dk and dv 4D·T·n FLOPs (the products with T×T matrices; 4D·n
of them are of use), n·(2D·e gathered + 2e + 8) bytes and n/T·16D of parts, a counting sort of n keys (of Lq·K where the
index is shared), and 4·B·H·Lk·D·e bytes of dk and dv. Gathers mostly hit the L2 cache: a row's k and v take 2·Lk·D·e.
Memory, besides inputs and outputs, in the backward: 2e·n of pairs, 8 bytes an entry of the index, 16D·n/T of parts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasparse.ops.autocast import Function
from megasparse.ops.counting_sort import counting_sort
from megasparse.ops.gathered_attention import kernels
from megasparse.ops.kernels import block, launch, precision, steps_of_lists, strides, whole_vectors

_GATHERED = 1024  # numbers of k, and of v, that a warp gathers at a time: 32 a thread, which leaves room for others


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Computes `operator.gathered_attention` by kernels. Tensors are copied only where the head dim is strided."""
    out, lse = _GatheredAttention.apply(q, k, v, index, scale)
    return out, lse


class _Sizes(NamedTuple):
    """QUERIES and PLACES: of a query-centred program. TILE: entries of a key-centred one, of that many warps."""

    queries: int
    places: int
    tile: int
    warps: int


def _sizes(head_dim: int, dtype: torch.dtype) -> _Sizes:
    width = block(head_dim)
    places = min(8, _GATHERED // width)
    if dtype == torch.float32:  # products without tensor cores keep whole rows in registers
        return _Sizes(_GATHERED // width // places, places, 32 if width < 128 else 16, 4)
    return _Sizes(_GATHERED // width // places, places, 64 if width < 256 else 32, 4 if width < 128 else 8)


class _GatheredAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (whole_vectors(x) for x in (q, k, v))
        index = index.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        grid, numbers, fixed = _by_query(q, index)
        steps = (*steps_of_lists(index, index.shape[2] * index.shape[3]), *strides(q, k, v))
        launch(kernels.attend, grid, q, k, v, index, out, lse, scale, *numbers, *steps, **fixed)
        ctx.set_materialize_grads(False)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, index, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, index, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(q) if grads[0] is None else whole_vectors(grads[0])
        grad_lse = None if grads[1] is None else grads[1].contiguous()
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        pairs = torch.empty(*q.shape[:3], index.shape[3], 2, dtype=q.dtype, device=q.device)
        grid, numbers, fixed = _by_query(q, index)
        steps = (*steps_of_lists(index, index.shape[2] * index.shape[3]), *strides(q, k, v))
        arguments = (q, k, v, index, out, lse, grad, grad_lse, dq, pairs, ctx.scale, *numbers, *steps, *strides(grad))
        launch(kernels.query_gradients, grid, *arguments, **fixed)
        dk, dv = _key_gradients(q, k, index, grad, pairs, ctx.scale)
        return dq, dk, dv, None, None


def _by_query(q: Tensor, index: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
    """Grid, sizes and settings of the kernels that a block of queries is a program of."""
    batch, heads, queries, head_dim = q.shape
    sizes = _sizes(head_dim, q.dtype)
    blocks = -(-queries // sizes.queries)
    fixed = {"D": head_dim, "QUERIES": sizes.queries, "PLACES": sizes.places, "WIDTH": block(head_dim), "num_warps": 1}
    return (batch * heads * blocks,), (heads, queries, index.shape[3], blocks), fixed


def _key_gradients(
    q: Tensor, k: Tensor, index: Tensor, grad: Tensor, pairs: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    (batch, heads, queries, head_dim), key_count, places = q.shape, k.shape[2], index.shape[3]
    entries = queries * places
    sizes = _sizes(head_dim, q.dtype)
    tiles = -(-entries // sizes.tile)
    keys = torch.where(index < 0, key_count, index).to(torch.int32).view(-1, entries)
    order = counting_sort(keys, key_count.bit_length())
    steps = steps_of_lists(index, entries)
    dk, dv = (torch.zeros(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    parts = torch.empty(2, batch * heads, tiles, 2, head_dim, dtype=torch.float32, device=q.device)
    fixed = {"D": head_dim, "TILE": sizes.tile, "WIDTH": block(head_dim)}
    arguments = (order, keys, pairs, q, grad, dk, dv, *parts, scale, heads, entries, places, key_count, tiles, *steps)
    settings = {**fixed, "PRECISION": precision(), "num_warps": sizes.warps}
    launch(kernels.tile_gradients, (batch * heads * tiles,), *arguments, *strides(q, grad), **settings)
    arguments = (order, keys, dk, dv, *parts, heads, entries, key_count, tiles, *steps)
    settings = {**fixed, "AT_ONCE": 8 if head_dim <= 128 else 4, "num_warps": 1}
    launch(kernels.join_tiles, (batch * heads * tiles,), *arguments, **settings)
    return dk, dv
