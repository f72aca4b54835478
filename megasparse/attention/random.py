"""Attention inside buckets drawn at random, whatever the tokens are: the floor of every hash (LHA's "Rand.").

B batch, H heads, L length, D head dim.
"""

import torch
from torch import Tensor

from megasparse.attention.band import BandCache, band_attention
from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.config.attention import RandomAttentionConfig
from megasparse.ops.bucketed_attention import Window
from megasparse.ops.random import random_bits


class RandomAttention(Attention):
    """softmax(qkᵀ/√D)v inside a band of one's own bucket, max_length/chunk buckets that queries and keys share.

    A bucket depends on head and position only, never on a token or its sequence, so no pattern can be learned but that
    of positions; while training each step draws anew, in evaluation they stay.
    """

    def __init__(self, config: RandomAttentionConfig, place: MechanismSpec):
        super().__init__()
        self.place = place
        self.window = Window("band", min(config.chunk, place.max_length))
        self.buckets = -(-place.max_length // config.chunk)
        self.rule = {"scale": place.head_dim**-0.5, "exclude_self": False, "count_rounds": False}

    def assign(self, heads: AttentionInputs, first: int, context: AttentionContext) -> Tensor:
        """The bucket of every position from `first` on: (B, H, 1, L). Padding has no position."""
        batch, count, length = heads.q.shape[:3]
        head = torch.arange(context.head_offset, context.head_offset + count, device=heads.q.device)
        position = torch.arange(first, first + length, device=heads.q.device).expand(batch, -1)
        if heads.key_mask is not None:
            position = (heads.key_mask.cumsum(-1) - 1).clamp_min(0)
        rows = head[:, None] * (1 << 32) + position[:, None]  # (B, H, L)
        bits = random_bits(context.rng.key(context.layer, "random bucket"), rows, 1)
        return torch.remainder(bits, self.buckets).transpose(-1, -2)

    def forward(self, x: Tensor, heads: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        codes = self.assign(heads, 0, context)
        return AttentionOutput(band_attention(heads, codes, None, self.window, **self.rule)[0], None, {})

    def new_cache(self, batch: int, like: Tensor, rounds: int | None) -> BandCache:
        return BandCache.empty(batch, self.place, 1, self.buckets, self.window, like)

    def fill_cache(self, x: Tensor, heads: AttentionInputs, cache: BandCache, context: AttentionContext) -> None:
        cache.fill(heads, self.assign(heads, 0, context), None)

    def decode(
        self, x: Tensor, heads: AttentionInputs, cache: BandCache, position: int, context: AttentionContext
    ) -> Tensor:
        return cache.decode(heads, self.assign(heads, position, context), None, position, **self.rule)
