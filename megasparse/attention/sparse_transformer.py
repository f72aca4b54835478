"""Strided attention of the Sparse Transformer (Child et al. 2019). B batch, H heads, L length, D head dim, S stride."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megasparse.attention.block_sparse import FixedPatternAttention
from megasparse.attention.contract import AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.costs import Passes
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Positive
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.cluster_attention import ClusterAttentionSpec, cluster_attention


@dataclass(frozen=True)
class StridedAttention:
    """The merged pattern, (B, H, L, D)."""

    stride: int

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        near, near_lse = self._near(inputs)
        far, far_lse = self._strided(inputs)
        lse = torch.logaddexp(near_lse, far_lse)
        out = near * torch.exp(near_lse - lse).unsqueeze(-1) + far * torch.exp(far_lse - lse).unsqueeze(-1)
        return out.to(inputs.q.dtype)

    def _near(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Over the other tokens nearer than S; the token itself is among the strided ones."""
        spec = BucketedAttentionSpec(Window("band", self.stride), inputs.causal, inputs.q.shape[-1] ** -0.5)
        out, lse = inputs.in_buckets(None, spec)
        alone = torch.arange(lse.shape[-1], device=lse.device) == 0
        if self.stride == 1 or lse.shape[-1] == 1:
            alone = torch.ones_like(alone)
        elif not inputs.causal:
            alone = torch.zeros_like(alone)
        return out, lse.masked_fill(alone, -torch.inf)  # where there is no other, the operator gives the token itself

    def _strided(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        length, stride = inputs.q.shape[2], min(self.stride, inputs.q.shape[2])
        rows = -(-length // stride)
        token = torch.arange(rows * stride, device=inputs.q.device)
        token = token.masked_fill(token >= length, -1).view(rows, stride).T[None, None]  # (1, 1, S, L/S)
        spec = ClusterAttentionSpec(inputs.causal, inputs.q.shape[-1] ** -0.5, count_clusters=False)
        return cluster_attention(inputs.q, inputs.k, inputs.v, token, token, spec, dropout=inputs.dropout)


class SparseTransformerAttentionConfig(MechanismSection):
    stride: Positive | None = None
    """A token sees the tokens of the last `stride` positions and every stride-th one; null takes √max_length."""


@mechanism("sparse_transformer", SparseTransformerAttentionConfig)
class SparseTransformerAttention(FixedPatternAttention):
    """One softmax over the last S positions, i − S < j <= i, and every S-th one, (i − j) mod S = 0.

    In an encoder |i − j| < S, and every S-th one on both sides. The paper's two patterns share a head here (its merged
    form). Time grows as L·(S + L/S).
    """

    def __init__(self, config: SparseTransformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.stride = config.stride or round(spec.max_length**0.5)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        if inputs.key_mask is not None and inputs.segments is None:
            # Without padding a token's rank, which makes the window, is its position, which makes the stride.
            inputs = inputs._replace(segments=torch.zeros_like(inputs.key_mask, dtype=torch.int64))
        return super().forward(x, inputs, context)

    def pattern(self, inputs: AttentionInputs, context: AttentionContext) -> StridedAttention:
        return StridedAttention(self.stride)

    def flops(self, length: int) -> Passes:
        """The last S positions (both ways S on either side) and every S-th one."""
        work = self.spec.workload(length)
        return work.pairs(self.stride * (1 if work.causal else 2) + work.visible / self.stride)

    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        near = torch.arange(max(0, position - self.stride + 1), position + 1, device=device)
        return torch.cat([torch.arange(position % self.stride, position, self.stride, device=device), near])[None]
