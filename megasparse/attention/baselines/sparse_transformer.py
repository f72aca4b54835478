"""Sparse Transformer attention (Child et al. 2019): a local window and a stride S."""

import torch
from torch import Tensor

from megasparse.attention.baselines.fixed_patterns import FixedPatternAttention, attention_of_clusters
from megasparse.attention.contract import AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.documents import padding_apart
from megasparse.attention.flops import Flops
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Positive
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window


class SparseTransformerAttentionConfig(MechanismSection):
    stride: Positive | None = None
    """A token attends to the last `stride` positions and to every stride-th one; null means √max_length."""


@mechanism("sparse_transformer", SparseTransformerAttentionConfig)
class SparseTransformerAttention(FixedPatternAttention):
    """One softmax over the last S positions, i − S < j <= i, and every S-th one, (i − j) mod S = 0.

    In an encoder |i − j| < S, and every S-th one on both sides. The paper's two patterns are merged in each head (its
    merged form). Time grows as L·(S + L/S).
    """

    computed_by_document = True

    def __init__(self, config: SparseTransformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.stride = config.stride or round(spec.max_length**0.5)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        # The window uses ranks and the stride positions, equal only without padding.
        return super().forward(x, padding_apart(inputs), context)

    def attend(self, inputs: AttentionInputs, context: AttentionContext) -> Tensor:
        length = inputs.q.shape[2]
        stride = min(self.stride, length)
        # The other tokens nearer than S; the token itself is in the strided pattern.
        spec = BucketedAttentionSpec(Window("band", self.stride), inputs.causal, inputs.q.shape[-1] ** -0.5)
        recent, recent_lse = inputs.in_buckets(None, spec)
        alone = torch.arange(length, device=inputs.q.device) < (length if stride == 1 else int(inputs.causal))
        recent_lse = recent_lse.masked_fill(alone, -torch.inf)  # the operator returns the token's own value
        rows = -(-length // stride)
        token = torch.arange(rows * stride, device=inputs.q.device)
        token = token.masked_fill(token >= length, -1).view(rows, stride).T[None, None]  # (1, 1, S, L/S)
        strided, strided_lse = attention_of_clusters(inputs, token, token)
        lse = torch.logaddexp(recent_lse, strided_lse)
        out = recent * torch.exp(recent_lse - lse).unsqueeze(-1) + strided * torch.exp(strided_lse - lse).unsqueeze(-1)
        return out.to(inputs.q.dtype)

    def flops(self, length: int) -> Flops:
        work = self.spec.workload(length)
        return work.pairs(self.stride * (1 if work.causal else 2) + work.visible / self.stride)

    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        recent = torch.arange(max(0, position - self.stride + 1), position + 1, device=device)
        return torch.cat([torch.arange(position % self.stride, position, self.stride, device=device), recent])[None]
