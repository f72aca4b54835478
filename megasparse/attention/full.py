"""Full softmax attention, the baseline: torch's scaled_dot_product_attention. B batch, H heads, L length, D head
dim.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.config.attention import FullAttentionConfig


@dataclass
class KeyValueCache:
    """Keys and values (B, H, capacity, D) of the tokens so far; places from the current position on are not yet
    used.
    """

    k: Tensor
    v: Tensor

    @staticmethod
    def empty(batch: int, place: MechanismSpec, capacity: int, like: Tensor) -> "KeyValueCache":
        return KeyValueCache(*(like.new_zeros(batch, place.heads, capacity, place.head_dim) for _ in range(2)))

    def put(self, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Takes in the tokens from position `first` on: (B, H, n, D) each."""
        self.k[:, :, first : first + k.shape[2]] = k
        self.v[:, :, first : first + v.shape[2]] = v

    def select(self, rows: Tensor) -> None:
        self.k, self.v = self.k[rows], self.v[rows]


class FullAttention(Attention):
    """softmax(qkᵀ/√D)v; with shared QK softmax(q·k̂ᵀ)v, k̂ = q/|q|, a token seeing itself only when it sees nothing
    else.
    """

    def __init__(self, config: FullAttentionConfig, place: MechanismSpec):
        super().__init__()
        self.shared_qk = config.shared_qk
        self.place = place

    def forward(self, x: Tensor, heads: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        heads = heads.of_one_dtype()
        if self.shared_qk:
            return AttentionOutput(self._shared(heads), None, {})
        mask = _mask(heads, exclude_self=False)
        out = F.scaled_dot_product_attention(
            heads.q, heads.k, heads.v, attn_mask=mask, is_causal=heads.causal and mask is None
        )
        return AttentionOutput(_without_padding(out, heads.key_mask), None, {})

    def _shared(self, heads: AttentionInputs) -> Tensor:
        q, k, v = heads.q, heads.k, heads.v
        if heads.causal and heads.key_mask is None and heads.segments is None:
            # Seeing strictly earlier tokens is ordinary causal attention of queries 1… to keys 0…
            rest = F.scaled_dot_product_attention(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1], is_causal=True, scale=1.0)
            return torch.cat([v[:, :, :1], rest], dim=2)
        mask = _mask(heads, exclude_self=True)
        assert mask is not None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return _without_padding(out, heads.key_mask)

    def new_cache(self, batch: int, like: Tensor, rounds: int | None) -> KeyValueCache:
        return KeyValueCache.empty(batch, self.place, self.place.max_length, like)

    def fill_cache(self, x: Tensor, heads: AttentionInputs, cache: KeyValueCache, context: AttentionContext) -> None:
        cache.put(heads.k, heads.v)

    def decode(
        self, x: Tensor, heads: AttentionInputs, cache: KeyValueCache, position: int, context: AttentionContext
    ) -> Tensor:
        cache.put(heads.k, heads.v, position)
        if self.shared_qk and position == 0:
            return heads.v
        stop = position if self.shared_qk else position + 1
        scale = 1.0 if self.shared_qk else None
        k, v = (cached[:, :, :stop].to(heads.q.dtype) for cached in (cache.k, cache.v))
        return F.scaled_dot_product_attention(heads.q, k, v, scale=scale)


def _mask(heads: AttentionInputs, exclude_self: bool) -> Tensor | None:
    """(B, 1, L, L) bool of visible pairs, or None where the causal flag says it all. A row with nothing to see sees
    itself.
    """
    if heads.key_mask is None and heads.segments is None and not exclude_self:
        return None
    length = heads.q.shape[2]
    position = torch.arange(length, device=heads.q.device)
    seen = torch.ones(1, length, length, dtype=torch.bool, device=heads.q.device)
    if heads.causal:
        seen = seen & (position[None, :] <= position[:, None])
    if heads.key_mask is not None:
        seen = seen & heads.key_mask[:, None, :]
    if heads.segments is not None:
        seen = seen & (heads.segments[:, :, None] == heads.segments[:, None, :])
    own = torch.eye(length, dtype=torch.bool, device=heads.q.device)
    if exclude_self:
        seen = seen & ~own
    return (seen | (own & ~seen.any(-1, keepdim=True)))[:, None]


def _without_padding(out: Tensor, key_mask: Tensor | None) -> Tensor:
    return out if key_mask is None else out.masked_fill(~key_mask[:, None, :, None], 0.0)
