"""Local attention: a token sees its own chunk of positions and the chunk before, strictly causal. B batch, H heads, L
length, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import Attention, AttentionContext, AttentionOutput, Heads
from megasparse.attention.full import KeyValueCache
from megasparse.config.schema import LocalAttentionConfig
from megasparse.ops.bucketed_attention import Window, bucketed_attention


class LocalAttention(Attention):
    """softmax(qkᵀ/√D)v inside ⌊i/C⌋ − 1 <= ⌊j/C⌋ <= ⌊i/C⌋, as in the published enwik8-64K configuration of Reformer.

    The one-bucket, one-round case of bucketed attention. Chunk borders are fixed by position, so they leak nothing.
    """

    def __init__(self, config: LocalAttentionConfig, max_length: int):
        super().__init__()
        self.window = Window("chunk", min(config.chunk, max_length))

    def forward(self, x: Tensor, heads: Heads, context: AttentionContext) -> AttentionOutput:
        out, _ = bucketed_attention(
            heads.q,
            heads.k,
            heads.v,
            None,
            self.window,
            causal=heads.causal,
            scale=heads.q.shape[-1] ** -0.5,
            exclude_self=False,
            key_mask=heads.key_mask,
            segments=heads.segments,
        )
        return AttentionOutput(out, None, {})

    def new_cache(self, batch: int, heads: int, head_dim: int, like: Tensor, rounds: int | None) -> KeyValueCache:
        # The chunk at hand and the one before it share two places by turns.
        return KeyValueCache.empty(batch, heads, 2 * self.window.chunk, head_dim, like)

    def fill_cache(self, heads: Heads, cache: KeyValueCache, context: AttentionContext) -> None:
        length = heads.k.shape[2]
        recent = torch.arange(max(0, length - cache.k.shape[2]), length, device=heads.k.device)
        cache.k[:, :, recent % cache.k.shape[2]] = heads.k[:, :, recent]
        cache.v[:, :, recent % cache.k.shape[2]] = heads.v[:, :, recent]

    def decode(self, heads: Heads, cache: KeyValueCache, position: int, context: AttentionContext) -> Tensor:
        capacity = cache.k.shape[2]
        cache.k[:, :, position % capacity] = heads.k[:, :, 0]
        cache.v[:, :, position % capacity] = heads.v[:, :, 0]
        first = max(0, position // self.window.chunk - 1) * self.window.chunk
        seen = torch.arange(first, position + 1, device=heads.q.device) % capacity
        return F.scaled_dot_product_attention(heads.q, cache.k[:, :, seen], cache.v[:, :, seen])
