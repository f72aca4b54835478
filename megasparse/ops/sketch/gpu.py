"""The sketch by Triton kernels, in fp32 whatever the dtype. Memory O(L·(d + H·K)).

Cost, of n visible pairs (B·L², half of it if causal). All of it is arithmetic of ordinary cores: the vectors of a head
(16·B·L·d bytes) stay in the L2 cache. Operations are multiplications or additions; exponentials and roots come apart.
sketched_attention: forward 6·d·n (scores twice, sums), n exponentials; bytes 16·B·L·d + 4·B·L.
its backward: 14·d·n (scores and ∂α twice, three sums), 2n exponentials; bytes 40·B·L·d + 16·B·L.
chosen_keys, of each of H heads: 2·d·n and about 10·n; n roots; where a tile is not passed over, 16·n integer operations
for its draws; about K·ln(L/K) insertions a row, of some 40 instructions of a warp. Bytes 8·B·L·d + 4·B·H·L·K.

B batch, H heads, L length, Lq queries, d width of the sketch, K keys a query chooses.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from megasparse.ops.autocast import Function
from megasparse.ops.kernels import launch
from megasparse.ops.sketch import choice_kernels, draws, kernels
from megasparse.ops.sketch.draws import Noise
from megasparse.ops.sketch.specification import KeyChoiceSpec

_LANES = 32  # of a warp: a column each
_WARPS = 4
_CHOOSING = 4  # rows of a program that chooses


def sketched_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes `operator.sketched_attention`. Takes any strides."""
    return _Attention.apply(q, k, v, causal, _documents(key_mask, segments))


class _Attention(Function):
    """Keeps q, k, v, h and lse; the backward computes α again, ∂q by queries, ∂k and ∂v by keys: no sum is shared."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        batch, length, width = q.shape
        ctx.dtypes, ctx.causal = [x.dtype for x in (q, k, v)], causal
        q, k, v = _coordinates(q, width**-0.5), _coordinates(k), _coordinates(v)
        h, lse = q.new_empty(batch, length, width), q.new_empty(batch, length)
        _launch(kernels.attend, 8, q, k, v, documents, h, lse, CAUSAL=causal)
        ctx.save_for_backward(q, k, v, documents, h, lse)
        return h, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, documents, h, lse = ctx.saved_tensors
        grad_h, grad_lse = grads
        shift = (h * grad_h).sum(-1) - grad_lse
        shared = (q, k, v, documents, lse, _coordinates(grad_h), shift)
        grad_q, grad_k, grad_v = (torch.empty_like(h) for _ in range(3))
        _launch(kernels.grad_queries, 4, *shared, grad_q, q.shape[1] ** -0.5, CAUSAL=ctx.causal)
        _launch(kernels.grad_keys, 4, *shared, grad_k, grad_v, CAUSAL=ctx.causal)
        return *(x.to(d) for x, d in zip((grad_q, grad_k, grad_v), ctx.dtypes, strict=True)), None, None


def _launch(kernel: Any, most: int, q: Tensor, *arguments: Any, CAUSAL: bool) -> None:
    """Launch a kernel. most: rows of a thread at d <= 4; wider ones leave registers for fewer."""
    batch, width, length = q.shape
    rows = _WARPS * max(1, min(most, 1 << (4 * most // width).bit_length() - 1))
    launch(
        kernel, (-(-length // rows), batch), q, *arguments, length,
        WIDTH=width, CAUSAL=CAUSAL, ROWS=rows, COLUMNS=_LANES, num_warps=_WARPS,
    )  # fmt: skip


@torch.no_grad()
def chosen_keys(
    q: Tensor,
    k: Tensor,
    spec: KeyChoiceSpec,
    noise: Noise | None,
    lse: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    first_query: int = 0,
) -> Tensor:
    """Computes `operator.chosen_keys`. Takes any strides.

    s is computed in fp32, for each pair by the same operations in the same order, so that equal keys tie in whatever
    tile they stand, and a row by itself chooses what it does among others.
    """
    batch, queries, width = q.shape
    length, heads = k.shape[1], 1 if noise is None else len(noise.heads)
    out = torch.empty(batch, heads, queries, spec.count, dtype=torch.int32, device=q.device)
    drawn = spec.sampling if noise is None or spec.sampling != "top_k" else "raw"
    needs_lse = noise is not None and spec.sampling.startswith("inverse_log")
    launch(
        choice_kernels.choose, (-(-queries // _CHOOSING), batch * heads),
        _coordinates(q, width**-0.5), _coordinates(k),
        lse.float().contiguous() if needs_lse and lse is not None else None,
        _documents(key_mask, segments),
        None if noise is None else noise.rows.contiguous(),
        None if noise is None else noise.tiles(length),
        out, queries, length, first_query,
        WIDTH=width, CAUSAL=spec.causal, HEADS=heads, COUNT=spec.count, SAMPLING=drawn, TILE=draws.KEYS,
        ROWS=_CHOOSING, COLUMNS=64, PLACES=max(_LANES, triton.next_power_of_2(spec.count)), num_warps=1,
    )  # fmt: skip
    return out


def _coordinates(x: Tensor, scale: float = 1.0) -> Tensor:
    """(B, L, d) -> (B, d, L) fp32, times `scale`: each coordinate by itself, so that a warp reads it in one piece."""
    return x.float().mul(scale).transpose(1, 2).contiguous()


def _documents(key_mask: Tensor | None, segments: Tensor | None) -> Tensor | None:
    """(B, L) int32: the document of every token, `kernels.PADDING` for padding; None where there is but one."""
    if key_mask is None:
        return None if segments is None else segments.to(torch.int32).contiguous()
    inside = torch.zeros_like(key_mask, dtype=torch.int32) if segments is None else segments.to(torch.int32)
    return torch.where(key_mask, inside, kernels.PADDING.value).contiguous()


def exact_projection(x: Tensor, weight: Tensor) -> Tensor:
    """Computes `operator.exact_projection` in one launch: it reads x once and does 2·d·E float64 operations a row."""
    rows, width = x.reshape(-1, x.shape[2]), len(weight)
    out = torch.empty(len(rows), width, dtype=torch.float64, device=x.device)
    wide = triton.next_power_of_2(width)
    settings = {"WIDTH": wide, "ROWS": 64 // wide, "COLUMNS": 64, "num_warps": _WARPS}
    arguments = (rows, weight.contiguous(), out, len(rows), rows.shape[1], width)
    launch(kernels.project, (-(-len(rows) * wide // 64),), *arguments, **settings)
    return out.view(*x.shape[:2], width)
