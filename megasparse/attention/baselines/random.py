"""Attention inside random, content-independent buckets: the baseline of every hash (LHA's "Rand.")."""

import torch
from torch import Tensor

from megasparse.attention.band import BandAttention
from megasparse.attention.contract import (
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    IndexedTokens,
    MechanismSpec,
)
from megasparse.attention.flops import Flops
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Positive
from megasparse.ops.random import random_bits


class RandomAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """Tokens per bucket; max_length/chunk buckets, rounded up, drawn at random independently of the tokens."""


@mechanism("random", RandomAttentionConfig)
class RandomAttention(BandAttention):
    """Random attention, softmax(qkᵀ/√D)v inside a band of the token's bucket, which depends only on head and position.
    Buckets are redrawn at each training step and fixed in evaluation.
    """

    def __init__(self, config: RandomAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.rule = {"scale": spec.head_dim**-0.5, "exclude_self": False, "count_rounds": False}

    def assign(self, inputs: AttentionInputs, first: int, context: AttentionContext) -> Tensor:
        """Return the bucket of every position from `first` on, without padding: (B, H, 1, L)."""
        batch, count, length = inputs.q.shape[:3]
        head = torch.tensor(context.heads(count), device=inputs.q.device)
        position = torch.arange(first, first + length, device=inputs.q.device).expand(batch, -1)
        if inputs.key_mask is not None:
            position = (inputs.key_mask.cumsum(-1) - 1).clamp_min(0)
        rows = head[:, None] * (1 << 32) + position[:, None]  # (B, H, L)
        bits = random_bits(context.key("random bucket"), rows, 1)
        return torch.remainder(bits, self.buckets).transpose(-1, -2)

    def index(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> IndexedTokens:
        return IndexedTokens(inputs, context)  # buckets depend only on positions

    def band_codes(self, inputs: AttentionInputs, position: int, context: AttentionContext) -> tuple[Tensor, None]:
        return self.assign(inputs, position, context), None

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        return self.attend(inputs, self.assign(inputs, 0, context), None, context.part)

    def flops(self, length: int) -> Flops:
        return self.band_flops(self.spec.workload(length).band(self.window.chunk, shared_codes=True), length)
