"""Local attention with relative positions as Triton kernels: any chunk, tokens gathered by index, deterministic.

Cost, with N = B·H·L, b bytes an element, K = 1.5·C + T/2 keys in the tiles of a query (3·C where not causal; T/2 + C at
least), for C >= T:
forward: 6·N·K·D FLOPs; from memory 5·N·D·b + 12·N bytes, and 3·N·(K/T)·D·b through the L2 cache.
backward: 34·N·K·D FLOPs (10 for dq, 12 for dk and dv, 12 for dr); from memory 16·N·D·b + 40·N bytes, and
11·N·(K/T)·D·b through the L2 cache; the parts of dr are at most about 1024·2·T·D·4 bytes, written and read once.

B batch, H heads, L length, D head dim, BD its block, C chunk, S chunks of keys that a chunk of queries meets, T tile, E
distances.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.autocast import Function
from megasparse.ops.blocks import at_most
from megasparse.ops.kernels import block, launch, precision, strides, whole_vectors
from megasparse.ops.local_attention.kernels import (
    local_backward_distances,
    local_backward_keys,
    local_backward_queries,
    local_forward,
    local_keys_bias,
)
from megasparse.ops.local_attention.layout import by_document
from megasparse.ops.local_attention.specification import LocalAttentionSpec

_PARTS = 1024  # programs that share the gradient of r, each with a part of its own: some tens of megabytes at most
_REGISTERS = 255  # all that a thread can have, or the assembler stops at 96 and spills two
_STAGES = 2  # tiles on their way from memory


def relative_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor,
    w: Tensor,
    spec: LocalAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Computes `operator.relative_local_attention` by kernels in fp32, bf16 or fp16; r enters products in q's dtype."""
    order, document = by_document(q, key_mask, segments)
    order = None if order is None else order.to(torch.int32)
    return _RelativeLocalAttention.apply(q, k, v, r, u, w, order, document, spec)


def _tile(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Places a tile and warps a program: what registers hold. Larger tiles spill, and rotating one 32 wide, a warp's
    lanes, takes half the shuffles.
    """
    if dtype == torch.float32:
        return (32, 8) if head_dim <= 64 else (16, 8)
    return (32, 4) if head_dim <= 128 else (32, 8)


def _token_major(like: Tensor) -> Tensor:
    """(B, H, L, D) in the memory order in which heads are joined."""
    batch, heads, length, width = like.shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _whole(x: Tensor | None, size: int) -> Tensor | None:
    """Pad x (B, L) with zeros up to `size` places, which belong to documents but are no keys."""
    return x if x is None else F.pad(x, (0, size - x.shape[1]))


@dataclass(frozen=True)
class _Shape:
    """Sizes of a launch. tile, warps: see `_tile`. reach: keys lie at most so many tiles from their queries, on a side.
    first: the row of r at which the first of `blocks` blocks of `tile` rows begins.
    """

    tile: int
    warps: int
    tiles: int
    reach: int
    blocks: int
    first: int

    @classmethod
    def of(cls, q: Tensor, spec: LocalAttentionSpec) -> "_Shape":
        tile, warps = _tile(q.shape[-1], q.dtype)
        reach = -(-(2 * spec.chunk - math.gcd(spec.chunk, tile)) // tile)
        blocks = reach + 2 if spec.causal else 2 * reach + 2
        return cls(tile, warps, -(-q.shape[2] // tile), reach, blocks, 2 * spec.chunk - 1 - (reach + 1) * tile)

    def pad(self, r: Tensor) -> Tensor:
        """Return r (H, E, D) in whole blocks, (H, blocks·T, D)."""
        return F.pad(r, (0, 0, -self.first, self.blocks * self.tile + self.first - r.shape[1]))

    def join(self, parts: Tensor, count: int) -> Tensor:
        """Join parts (H, blocks − 1, 2, T, D), of each difference of tiles: of the block before, and of its own, which
        is the block before the next one's. Returns (H, E, D).
        """
        before, own = parts.unbind(2)
        rows = (F.pad(before, (0, 0, 0, 0, 0, 1)) + F.pad(own, (0, 0, 0, 0, 1, 0))).flatten(1, 2)
        return F.pad(rows, (0, 0, self.first, count - self.first - rows.shape[1]))


class _RelativeLocalAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor,
        order: Tensor | None, document: Tensor | None, spec: LocalAttentionSpec,
    ) -> Tensor:  # fmt: skip
        q, k, v = (whole_vectors(x) for x in (q, k, v))
        batch, heads, length, width = q.shape
        shape = _Shape.of(q, spec)
        padded = shape.tiles * shape.tile
        order, document = _whole(order, padded), _whole(document, padded)
        blocks = shape.pad(r.to(q.dtype)).contiguous()
        r_bias = (blocks.float() * w.float()[:, None]).sum(-1)
        keys_bias, lse2 = (q.new_empty(batch * heads, padded, dtype=torch.float32) for _ in range(2))
        out, u, w = _token_major(q), u.contiguous(), w.contiguous()
        grid, wide = (shape.tiles, batch * heads), dict(D=width, BD=block(width), T=shape.tile, num_warps=shape.warps)
        launch(local_keys_bias, grid, k, u, order, keys_bias, *strides(k), heads, length, **wide)
        launch(
            local_forward, grid, q, k, v, blocks, keys_bias, r_bias, order, document, out, lse2,
            *strides(q, k, v), heads, length, spec.chunk, shape.reach, shape.blocks, spec.scale,
            CAUSAL=spec.causal, PRECISION=precision(), num_stages=_STAGES, **wide,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, blocks, u, w, order, document, out, lse2, keys_bias, r_bias)
        ctx.spec, ctx.like = spec, (r.new_empty(0), r.shape[1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, r, u, w, order, document, out, lse2, keys_bias, r_bias = ctx.saved_tensors
        spec, (of_r, count) = ctx.spec, ctx.like
        grad, shape = whole_vectors(grad), _Shape.of(q, spec)
        batch, heads, length, width = q.shape
        dq, dk, dv = (_token_major(x) for x in (q, k, v))
        delta, every = torch.empty_like(lse2), shape.tiles * batch
        du = lse2.new_empty(shape.tiles, batch, heads, width)
        grid, tensors = (shape.tiles, batch * heads), (q, k, v, r)
        given = (keys_bias, r_bias, order, document, grad)
        numbers = (*strides(q, k, v, grad), heads, length, spec.chunk, shape.reach, shape.blocks)
        settings = dict(CAUSAL=spec.causal, D=width, BD=block(width), T=shape.tile, PRECISION=precision())
        settings |= dict(num_warps=shape.warps, num_stages=_STAGES)
        arguments = (*tensors, *given, out, lse2, delta, dq, *numbers, spec.scale)
        launch(local_backward_queries, grid, *arguments, **settings)
        arguments = (*tensors, u, *given, lse2, delta, dk, dv, du, *numbers, spec.scale)
        launch(local_backward_keys, grid, *arguments, **settings)
        differences = shape.blocks - 1
        each = -(-every // max(1, at_most(_PARTS) // (heads * differences)))
        groups = -(-every // each)
        dr = lse2.new_empty(groups, heads, differences, 2, shape.tile, width)
        dw = lse2.new_empty(groups, heads, differences, width)
        launch(
            local_backward_distances, (differences, heads, groups), *tensors, w, *given, lse2, delta, dr, dw,
            *numbers, shape.tiles, every, each, spec.scale, **settings, maxnreg=_REGISTERS,
        )  # fmt: skip
        relative = shape.join(dr.sum(0), count).to(of_r.dtype), du.sum((0, 1)).to(u.dtype), dw.sum((0, 2)).to(w.dtype)
        return dq, dk, dv, *relative, None, None, None
