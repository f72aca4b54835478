"""Full softmax attention, the baseline: torch's scaled_dot_product_attention. B batch, H heads, L length, D head
dim.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.costs import Passes, Work
from megasparse.config.attention import FullAttentionConfig
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention
from megasparse.ops.cluster_attention import ClusterAttentionSpec, cluster_attention
from megasparse.ops.random import PairDropout


@dataclass
class KeyValueCache:
    """Keys and values (B, H, capacity, D) of the tokens so far; places from the current position on are not yet
    used.
    """

    k: Tensor
    v: Tensor

    @staticmethod
    def empty(batch: int, spec: MechanismSpec, capacity: int, like: Tensor) -> "KeyValueCache":
        return KeyValueCache(*(like.new_zeros(batch, spec.heads, capacity, spec.head_dim) for _ in range(2)))

    def put(self, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Takes in the tokens from position `first` on: (B, H, n, D) each."""
        self.k[:, :, first : first + k.shape[2]] = k
        self.v[:, :, first : first + v.shape[2]] = v

    def select(self, rows: Tensor) -> None:
        self.k, self.v = self.k[rows], self.v[rows]


class FullAttention(Attention):
    """Full attention, softmax(qkᵀ/√D)v; with shared QK softmax(q·k̂ᵀ)v, k̂ = q/|q|, a token seeing itself only when it
    sees nothing else.
    """

    all_pairs = True

    def __init__(self, config: FullAttentionConfig, spec: MechanismSpec):
        super().__init__(spec)
        self.shared_qk, self.adds_positions = config.shared_qk, config.sinusoidal_positions

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        inputs = inputs.of_one_dtype()
        if inputs.dropout is not None:
            return AttentionOutput(self._dropped(inputs), None, {})
        if self.shared_qk:
            return AttentionOutput(self._shared(inputs), None, {})
        mask = _mask(inputs, exclude_self=False)
        out = F.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, attn_mask=mask, is_causal=inputs.causal and mask is None
        )
        return AttentionOutput(_without_padding(out, inputs.key_mask), None, {})

    def _dropped(self, inputs: AttentionInputs) -> Tensor:
        """By blocks, a window of all tokens: torch's own dropout draws from a global generator."""
        q, k, v, key_mask, segments, causal, dropout = inputs
        scale = 1.0 if self.shared_qk else q.shape[-1] ** -0.5
        spec = BucketedAttentionSpec(Window("band", q.shape[2]), causal, scale, exclude_self=self.shared_qk)
        return bucketed_attention(q, k, v, None, spec, key_mask, segments, dropout=dropout)[0]

    def _shared(self, inputs: AttentionInputs) -> Tensor:
        q, k, v = inputs.q, inputs.k, inputs.v
        if inputs.causal and inputs.key_mask is None and inputs.segments is None:
            # Seeing strictly earlier tokens is ordinary causal attention of queries 1… to keys 0…
            rest = F.scaled_dot_product_attention(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1], is_causal=True, scale=1.0)
            return torch.cat([v[:, :, :1], rest], dim=2)
        mask = _mask(inputs, exclude_self=True)
        assert mask is not None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return _without_padding(out, inputs.key_mask)

    def flops(self, length: int) -> Passes:
        work = self.workload(length)
        return work.pairs(work.visible)

    def operators(self, length: int, size: int) -> dict[str, Work]:
        return self.one_kernel(length, size)

    def new_cache(self, batch: int, like: Tensor, rounds: int | None) -> KeyValueCache:
        return KeyValueCache.empty(batch, self.spec, self.spec.max_length, like)

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: KeyValueCache, context: AttentionContext) -> None:
        cache.put(inputs.k, inputs.v)

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: KeyValueCache, position: int, context: AttentionContext
    ) -> Tensor:
        cache.put(inputs.k, inputs.v, position)
        if self.shared_qk and position == 0:
            return inputs.v
        stop = position if self.shared_qk else position + 1
        scale = 1.0 if self.shared_qk else None
        k, v = (cached[:, :, :stop].to(inputs.q.dtype) for cached in (cache.k, cache.v))
        return F.scaled_dot_product_attention(inputs.q, k, v, scale=scale)


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, dropout: PairDropout | None) -> Tensor:
    """Compute softmax(qkᵀ/√D)v, dropout of the probabilities included; what sees no real key gets 0.

    q: (B, H, Lq, D). k, v: (B, H, Lk, D). key_mask: (B, Lk) bool, true for real keys.
    """
    if dropout is not None:
        queries, keys = (torch.arange(x.shape[2], device=x.device)[None, None, None] for x in (q, k))
        spec = ClusterAttentionSpec(causal=False, scale=q.shape[-1] ** -0.5, count_clusters=False)
        return cluster_attention(q, k, v, queries, keys, spec, key_mask, dropout=dropout)[0]
    if key_mask is None:
        return F.scaled_dot_product_attention(q, k, v)
    blind = ~key_mask.any(-1)[:, None, None, None]  # a softmax of nothing would be NaN
    mask = key_mask[:, None, None] | blind
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).masked_fill(blind, 0.0)


def _mask(inputs: AttentionInputs, exclude_self: bool) -> Tensor | None:
    """(B, 1, L, L) bool of visible pairs, or None where the causal flag says it all. A row with nothing to see sees
    itself.
    """
    if inputs.key_mask is None and inputs.segments is None and not exclude_self:
        return None
    length = inputs.q.shape[2]
    position = torch.arange(length, device=inputs.q.device)
    seen = torch.ones(1, length, length, dtype=torch.bool, device=inputs.q.device)
    if inputs.causal:
        seen = seen & (position[None, :] <= position[:, None])
    if inputs.key_mask is not None:
        seen = seen & inputs.key_mask[:, None, :]
    if inputs.segments is not None:
        seen = seen & (inputs.segments[:, :, None] == inputs.segments[:, None, :])
    own = torch.eye(length, dtype=torch.bool, device=inputs.q.device)
    if exclude_self:
        seen = seen & ~own
    return (seen | (own & ~seen.any(-1, keepdim=True)))[:, None]


def _without_padding(out: Tensor, key_mask: Tensor | None) -> Tensor:
    return out if key_mask is None else out.masked_fill(~key_mask[:, None, :, None], 0.0)
