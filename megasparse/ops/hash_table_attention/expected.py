"""YOSO attention with the expectation of its sampled weights: O(L²) time in tiles of queries, linear memory.

B batch, H heads, L length, D head dim, τ code bits, G rows (a batch element's head) at a time, T queries in a tile.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.autocast import Function, without_autocast
from megasparse.ops.hash_table_attention.layout import groups, row_slices
from megasparse.ops.hash_table_attention.specification import HashTableAttentionSpec

_QUERIES = 64  # of a tile
_TILE_ELEMENTS = 1 << 18  # weights in a tile: 1 MB of fp32


@without_autocast
def expected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: HashTableAttentionSpec,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out_i = Σ_j W_ij v_j, W_ij = (1 − acos(q_i·k_j)/π)^τ over the keys visible to i (YOSO Eq. 4).

    As `hash_table_attention` with infinitely many hashes, masks alike. The cosine is clamped to [−1, 1] (rounding
    makes that of equal vectors more than 1); ∂W_ij/∂(q_i·k_j) is the paper's lower bound τ/2·W_ij (Eq. 19), finite
    where the true derivative is not. Returns out (B, H, Lq, D) and W's row sums (B, H, Lq), in fp32 at least.
    """
    assert not spec.causal or q.shape[2] == k.shape[2]
    return _ExpectedAttention.apply(q, k, v, groups(q, k, query_mask, key_mask, segments), spec)


def _tiles(
    q: Tensor, k: Tensor, group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec
) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Yield the tiles of all pairs: some rows, their queries, the keys that these may see, and the weights (G, T, Lk)
    between them. q, k: (B·H, L, D).
    """
    height = min(_QUERIES, q.shape[1])
    for rows in row_slices(len(q), _TILE_ELEMENTS, height * k.shape[1]):
        for start in range(0, q.shape[1], height):
            queries = slice(start, min(start + height, q.shape[1]))
            keys = slice(0, queries.stop if spec.causal else k.shape[1])
            weight = torch.bmm(q[rows, queries], k[rows, keys].transpose(1, 2)).clamp_(-1.0, 1.0)
            weight = _power(weight.acos_().mul_(-1 / math.pi).add_(1.0).clamp_min_(0.0), spec.code_bits)
            if spec.causal:
                weight = weight.tril_(start)
            if group is not None:
                weight = weight.mul_(group[0][rows, queries, None] == group[1][rows, None, keys])
            yield rows, queries, keys, weight


def _power(x: Tensor, n: int) -> Tensor:
    """Return x^n, n >= 1, by products: on a CPU ten times as fast as torch's power. Overwrites x."""
    result = x if n & (n - 1) == 0 else x.clone()
    for bit in bin(n)[3:]:
        result.square_()
        if bit == "1":
            result *= x
    return result


class _ExpectedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.group, ctx.spec = group, spec
        ctx.save_for_backward(q, k, v)
        dtype = torch.promote_types(v.dtype, torch.float32)
        flat_q, flat_k, flat_v = (x.flatten(0, 1).to(dtype) for x in (q, k, v))
        out = torch.empty(*flat_q.shape[:2], v.shape[3], dtype=dtype, device=v.device)
        total = torch.empty(flat_q.shape[:2], dtype=dtype, device=v.device)
        for rows, queries, keys, weight in _tiles(flat_q, flat_k, group, spec):
            out[rows, queries] = torch.bmm(weight, flat_v[rows, keys])
            total[rows, queries] = weight.sum(-1)
        out, total = out.view(*q.shape[:3], -1), total.view(q.shape[:3])
        ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        dtype = grads[0].dtype
        q, k, v, g = (x.flatten(0, 1).to(dtype) for x in (*saved, grads[0]))
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for rows, queries, keys, weight in _tiles(q, k, ctx.group, ctx.spec):
            dv[rows, keys] += torch.bmm(weight.transpose(1, 2), g[rows, queries])
            weight *= torch.bmm(g[rows, queries], v[rows, keys].transpose(1, 2))
            torch.bmm(weight, k[rows, keys], out=dq[rows, queries])
            dk[rows, keys] += torch.bmm(weight.transpose(1, 2), q[rows, queries])
        dq.mul_(ctx.spec.code_bits / 2)
        dk.mul_(ctx.spec.code_bits / 2)
        return *(x.view_as(y).to(y.dtype) for x, y in zip((dq, dk, dv), saved, strict=True)), None, None
