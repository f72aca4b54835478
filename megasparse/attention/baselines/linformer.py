"""Linformer attention (Wang et al. 2020). P projected length."""

import torch
from torch import Tensor, nn

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.documents import attend_each
from megasparse.attention.flops import Flops, product
from megasparse.attention.full import attend_to_all
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Positive


class SequenceProjection(nn.Module):
    """Learned matrix (P, max_length) over positions; a shorter sequence uses its first columns."""

    def __init__(self, projected: int, max_length: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(projected, max_length))

    def forward(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return (P, length) in this dtype, as a copy: under ZeRO 3 the weight is gathered only during this call."""
        return self.weight[:, :length].to(dtype, copy=True)


class LinformerAttentionConfig(MechanismSection):
    projected: Positive = 256
    """Length P to which the keys and values of all positions are projected."""

    bidirectional_only = "it projects the whole sequence"


@mechanism("linformer", LinformerAttentionConfig)
class LinformerAttention(Attention):
    """Linformer, softmax(q(E k)ᵀ/√D) F v, with keys and values projected over the sequence to length P by matrices E
    and F that all heads share. Padding is projected as zeros, packed documents separately.
    """

    def __init__(self, config: LinformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.keys = SequenceProjection(config.projected, spec.max_length)
        self.values = SequenceProjection(config.projected, spec.max_length)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        inputs = inputs.with_query_dtype()
        keys, values = (side(inputs.k.shape[2], inputs.k.dtype) for side in (self.keys, self.values))

        def attend(inputs: AttentionInputs) -> Tensor:
            length = inputs.k.shape[2]
            k = keys[:, :length] @ inputs.without_padding(inputs.k)  # (B, H, P, D)
            v = values[:, :length] @ inputs.without_padding(inputs.v)
            return attend_to_all(inputs.q, k, v, None, inputs.dropout)

        return AttentionOutput(attend_each(inputs, attend))

    def flops(self, length: int) -> Flops:
        """P projected keys, and the projections of keys and of values, 6·D each per projected key."""
        return product(self.spec.heads * 8.0 * self.spec.head_dim * self.keys.weight.shape[0])
