"""Local attention by definition, dense. B batch, H heads, L length, D head dim, C chunk, E distances."""

import torch
from torch import Tensor

from megasparse.ops.local_attention.specification import LocalAttentionSpec
from megasparse.ops.random import PairDropout


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
    dropout: PairDropout | None = None,
) -> Tensor:
    """Compute softmax_j(((q_i + u)·k_j + (q_i + w)·r_{i−j})·scale) v_j over i's chunk, the one before it, and where not
    causal the one after it. Arguments and result as those of `ops.local_attention.relative_local_attention`.
    """
    asked, dtype = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v, r, u, w = (x.to(dtype) for x in (q, k, v, r, u, w))
    batch, heads, length, _ = q.shape
    real = torch.ones(batch, length, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    document = torch.zeros_like(real, dtype=torch.int64) if segments is None else segments
    position = torch.arange(length, device=q.device)
    # How many real tokens come before each one, in the order of (document, position): its number.
    first, second = document[:, None, :], document[:, :, None]
    before = (first < second) | ((first == second) & (position < position[:, None]))
    number = (before & real[:, None]).sum(-1)
    distance = number[:, :, None] - number[:, None, :]  # (B, L, L)
    chunks_back = number[:, :, None] // spec.chunk - number[:, None, :] // spec.chunk
    seen = (chunks_back <= 1) & (chunks_back >= (0 if spec.causal else -1))
    seen = seen & (first == second) & real[:, :, None] & real[:, None, :]
    if spec.causal:
        seen = seen & (position <= position[:, None])
    row = (2 * spec.chunk - 1 - distance).clamp(0, r.shape[1] - 1)  # of r
    of_distance = torch.einsum("bhid,hed->bhie", q + w[:, None], r)
    relative = of_distance.gather(3, row[:, None].expand(-1, heads, -1, -1))
    score = ((q + u[:, None]) @ k.transpose(-1, -2) + relative) * spec.scale
    blind = ~real[:, None, :, None]
    score = score.masked_fill(~seen[:, None], -torch.inf).masked_fill(blind, 0.0)
    probability = torch.softmax(score, dim=-1)
    if dropout is not None:
        probability = probability * dropout.dense(length, dtype)
    return (probability @ v).masked_fill(blind, 0.0).to(asked)
