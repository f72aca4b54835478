"""Sparse Sinkhorn attention (Tay et al. 2020). B batch, H heads, n tokens of a document, N blocks of M, D head dim."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.documents import attend_each, padding_apart
from megasparse.attention.flops import Flops, product
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Positive


class SinkhornAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """M, tokens per block."""
    iterations: Positive = 8
    """Normalisations of rows and columns."""

    no_probabilities = True
    bidirectional_only = "it sorts blocks of the whole sequence"


@mechanism("sinkhorn", SinkhornAttentionConfig)
class SinkhornAttention(Attention):
    """Softmax attention to a token's own block and to the block that a learned sorting puts there.

    Block j moves to place i with weight S_ij, S = Sinkhorn(P), P_i = (Σ of block i's keys)·W: rows and columns are
    normalised in turn. Without the paper's Gumbel noise. Documents are sorted separately.
    """

    def __init__(self, config: SinkhornAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        blocks = -(-spec.max_length // config.chunk)
        self.places = nn.Parameter(torch.empty(spec.heads, spec.head_dim, blocks))

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        inputs = inputs.with_query_dtype()
        places = context.part.local_part(self.places, 0).to(inputs.q.dtype)
        size = self.config.chunk

        def attend(inputs: AttentionInputs) -> Tensor:
            length = inputs.q.shape[2]
            count = -(-length // size)
            padded = (F.pad(x, (0, 0, 0, count * size - length)).unflatten(2, (count, size)) for x in inputs[:3])
            q, k, v = padded  # (B, H, N, M, D)
            order = k.sum(3) @ places[..., :count]  # (B, H, N, N)
            for _ in range(self.config.iterations):
                order = order.log_softmax(-1)
                order = order.log_softmax(-2)
            order = order.exp()
            real = (torch.arange(count * size, device=q.device) < length).view(count, size).to(q.dtype)
            sorted_k, sorted_v = ((order @ x.flatten(3)).view_as(x) for x in (k, v))
            share = order @ real  # (B, H, N, M), of real tokens in the sorted block
            keys = torch.cat([k, sorted_k], dim=3)
            scores = q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, H, N, M, 2M)
            visible = torch.cat([real.expand_as(share), share], dim=-1).unsqueeze(3) > 0
            weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
            out = weights @ torch.cat([v, sorted_v], dim=3)
            return out.flatten(2, 3)[:, :, :length]

        return AttentionOutput(attend_each(padding_apart(inputs), attend))  # the order depends on the number of blocks

    def flops(self, length: int) -> Flops:
        """Two blocks per token; sorting, 4·D per block and token; the places of blocks, 2·D each per block."""
        blocks = -(-length // self.config.chunk)
        dim = self.spec.head_dim
        sorting = product(self.spec.heads * (4.0 * dim * blocks + 2.0 * dim * blocks / self.config.chunk))
        return self.spec.workload(length).pairs(2 * self.config.chunk) + sorting
