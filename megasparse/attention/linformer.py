"""Linformer attention (Wang et al. 2020). B batch, H heads, L length, D head dim, P projected length."""

import torch
from torch import Tensor, nn

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.costs import Passes, product
from megasparse.attention.documents import begins_with_real_tokens, documents
from megasparse.attention.each_document import alone, join
from megasparse.attention.full import attend_to_all
from megasparse.config.attention import LinformerAttentionConfig


class SequenceProjection(nn.Module):
    """A learned matrix (P, max_length) over positions; a shorter sequence uses its first columns."""

    def __init__(self, projected: int, max_length: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(projected, max_length))

    def forward(self, pieces: list[Tensor]) -> list[Tensor]:
        """(b, H, n, D) each -> (b, H, P, D) each. All in one call: ranks then call the module equally often."""
        return [self.weight[:, : x.shape[2]].to(x.dtype) @ x for x in pieces]


class LinformerAttention(Attention):
    """Linformer, softmax(q(E k)ᵀ/√D) F v, with keys and values projected over the sequence to P by E and F, shared by
    the heads.

    Padding is projected as zeros. A packed document is projected by itself, its positions counted from its first real
    token. Every projected key mixes all tokens, so there is no causal form.
    """

    def __init__(self, config: LinformerAttentionConfig, spec: MechanismSpec):
        super().__init__(spec)
        self.keys = SequenceProjection(config.projected, spec.max_length)
        self.values = SequenceProjection(config.projected, spec.max_length)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        inputs = inputs.of_one_dtype()
        if begins_with_real_tokens(inputs.key_mask, inputs.segments):
            return AttentionOutput(self._whole(inputs), None, {})
        each = list(documents(inputs.key_mask, inputs.segments))
        pieces = [alone(inputs, document) for document in each]
        keys, values = self.keys([piece.k for piece in pieces]), self.values([piece.v for piece in pieces])
        split = zip(pieces, keys, values, strict=True)
        parts = [attend_to_all(piece.q, k, v, None, piece.dropout) for piece, k, v in split]
        return AttentionOutput(join(parts, each, inputs.q), None, {})

    def flops(self, length: int) -> Passes:
        """P projected keys, and the projections of keys and of values, 6·D each a projected one."""
        return product(self.spec.heads * 8.0 * self.spec.head_dim * self.keys.weight.shape[0])

    def _whole(self, inputs: AttentionInputs) -> Tensor:
        q, k, v = inputs.q, inputs.k, inputs.v
        if inputs.key_mask is None:
            return attend_to_all(q, self.keys([k])[0], self.values([v])[0], None, inputs.dropout)
        padding = ~inputs.key_mask[:, None, :, None]
        k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
        out = attend_to_all(q, self.keys([k])[0], self.values([v])[0], None, inputs.dropout)
        return out.masked_fill(padding, 0.0)
