"""Strided attention of the Sparse Transformer (Child et al. 2019). B batch, H heads, L length, D head dim, S stride."""

import torch
from torch import Tensor

from megasparse.attention.block_sparse import FixedPatternAttention
from megasparse.attention.contract import AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.config.attention import SparseTransformerAttentionConfig
from megasparse.ops.bucketed_attention import Window, bucketed_attention
from megasparse.ops.cluster_attention import cluster_attention


class SparseTransformerAttention(FixedPatternAttention):
    """One softmax over the last S positions, i − S < j <= i, and every S-th one, (i − j) mod S = 0.

    In an encoder |i − j| < S, and every S-th one on both sides. The paper's two patterns share a head here (its merged
    form). Time grows as L·(S + L/S).
    """

    def __init__(self, config: SparseTransformerAttentionConfig, place: MechanismSpec):
        super().__init__(place)
        self.stride = config.stride or round(place.max_length**0.5)

    def forward(self, x: Tensor, heads: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        if heads.key_mask is not None and heads.segments is None:
            # Without padding a token's rank, which makes the window, is its position, which makes the stride.
            heads = heads._replace(segments=torch.zeros_like(heads.key_mask, dtype=torch.int64))
        return super().forward(x, heads, context)

    def attend(self, heads: AttentionInputs, context: AttentionContext) -> Tensor:
        near, near_z = self._near(heads)
        far, far_z = self._strided(heads)
        z = torch.logaddexp(near_z, far_z)
        out = near * torch.exp(near_z - z).unsqueeze(-1) + far * torch.exp(far_z - z).unsqueeze(-1)
        return out.to(heads.q.dtype)

    def _near(self, heads: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Over the other tokens nearer than S; the token itself is among the strided ones."""
        out, z = bucketed_attention(
            heads.q,
            heads.k,
            heads.v,
            None,
            Window("band", self.stride),
            causal=heads.causal,
            scale=heads.q.shape[-1] ** -0.5,
        )
        alone = torch.arange(z.shape[-1], device=z.device) == 0
        if self.stride == 1 or z.shape[-1] == 1:
            alone = torch.ones_like(alone)
        elif not heads.causal:
            alone = torch.zeros_like(alone)
        return out, z.masked_fill(alone, -torch.inf)  # where there is no other, the operator gives the token itself

    def _strided(self, heads: AttentionInputs) -> tuple[Tensor, Tensor]:
        length, stride = heads.q.shape[2], min(self.stride, heads.q.shape[2])
        rows = -(-length // stride)
        token = torch.arange(rows * stride, device=heads.q.device)
        token = token.masked_fill(token >= length, -1).view(rows, stride).T[None, None]  # (1, 1, S, L/S)
        return cluster_attention(
            heads.q,
            heads.k,
            heads.v,
            token,
            token,
            causal=heads.causal,
            scale=heads.q.shape[-1] ** -0.5,
            count_clusters=False,
        )

    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        near = torch.arange(max(0, position - self.stride + 1), position + 1, device=device)
        return torch.cat([torch.arange(position % self.stride, position, self.stride, device=device), near])[None]
