"""Linformer attention (Wang et al. 2020). B batch, H heads, L length, D head dim, P projected length."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    MechanismSpec,
    Passes,
    product,
)
from megasparse.attention.documents import attend_each
from megasparse.attention.full import attend_to_all
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Positive


class SequenceProjection(nn.Module):
    """A learned matrix (P, max_length) over positions; a shorter sequence uses its first columns."""

    def __init__(self, projected: int, max_length: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(projected, max_length))

    def forward(self, length: int, dtype: torch.dtype) -> Tensor:
        """(P, length) in this dtype, a copy: ranks that share the matrix have it whole within this call alone."""
        return self.weight[:, :length].to(dtype, copy=True)


@dataclass(frozen=True)
class ProjectedAttention:
    """softmax(q(E k)ᵀ/√D) F v of one document, (B, H, L, D): with the first columns of E (keys) and F (values)."""

    keys: Tensor
    values: Tensor

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        k, v, length = inputs.k, inputs.v, inputs.k.shape[2]
        if inputs.key_mask is not None:
            k, v = (x.masked_fill(~inputs.key_mask[:, None, :, None], 0.0) for x in (k, v))
        projected = self.keys[:, :length] @ k, self.values[:, :length] @ v
        return attend_to_all(inputs.q, *projected, None, inputs.dropout)


class LinformerAttentionConfig(MechanismSection):
    projected: Positive = 256
    """Length k: keys and values are projected from max_length to this many."""

    bidirectional_only = "it projects the whole sequence"


@mechanism("linformer", LinformerAttentionConfig)
class LinformerAttention(Attention):
    """Linformer, softmax(q(E k)ᵀ/√D) F v, with keys and values projected over the sequence to P by E and F, shared by
    the heads.

    Padding is projected as zeros. A packed document is projected by itself, its positions counted from its first real
    token. Every projected key mixes all tokens, so there is no causal form.
    """

    def __init__(self, config: LinformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.keys = SequenceProjection(config.projected, spec.max_length)
        self.values = SequenceProjection(config.projected, spec.max_length)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        inputs = inputs.of_one_dtype()
        length, dtype = inputs.k.shape[2], inputs.k.dtype
        attend = ProjectedAttention(self.keys(length, dtype), self.values(length, dtype))
        return AttentionOutput(attend_each(inputs, attend), None, {})

    def flops(self, length: int) -> Passes:
        """P projected keys, and the projections of keys and of values, 6·D each a projected one."""
        return product(self.spec.heads * 8.0 * self.spec.head_dim * self.keys.weight.shape[0])
