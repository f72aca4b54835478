"""Synthesizer attention (Tay et al. 2021). B batch, H heads, L length, D head dim, n longest sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.documents import attend_each
from megasparse.attention.flops import Flops, product
from megasparse.config.attention import MechanismSection, mechanism


class SynthesizerAttentionConfig(MechanismSection):
    no_probabilities = True
    bidirectional_only = "it predicts the weights of all positions"


@mechanism("synthesizer", SynthesizerAttentionConfig)
class SynthesizerAttention(Attention):
    """The dense Synthesizer, softmax(relu(q_i)·W)v: a token predicts the weight of each position, and no key is read.
    W (D, n) is learned per head; its first hidden layer is the query projection.
    """

    shared_qk = True  # without a key projection

    def __init__(self, config: SynthesizerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.positions = nn.Parameter(torch.empty(spec.heads, spec.head_dim, spec.max_length))

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        inputs = inputs.with_query_dtype()
        weights = context.part.local_part(self.positions, 0).to(inputs.q.dtype)

        def attend(inputs: AttentionInputs) -> Tensor:
            scores = F.relu(inputs.q) @ weights[..., : inputs.q.shape[2]]  # (B, H, L, L)
            if inputs.key_mask is not None:
                scores = scores.masked_fill(~inputs.key_mask[:, None, None, :], torch.finfo(scores.dtype).min)
            return scores.softmax(-1) @ inputs.without_padding(inputs.v)

        return AttentionOutput(attend_each(inputs, attend))

    def flops(self, length: int) -> Flops:
        return product(self.spec.heads * 4.0 * self.spec.head_dim * length)
