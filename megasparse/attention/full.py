"""Full softmax attention with torch's scaled_dot_product_attention."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megasparse.attention.cache import KeyValueCache
from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    MechanismSpec,
    PrefixKeys,
)
from megasparse.attention.flops import Flops
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.cluster_attention import ClusterAttentionSpec, cluster_attention
from megasparse.ops.operator import implementation
from megasparse.ops.positions import sinusoids
from megasparse.ops.random import PairDropout
from megasparse.ops.sketch import Sight

_MASK = 1 << 24
"""Pairs in one tile of the mask. Up to 4,096 tokens use a single tile."""


class KeyValueAttention(Attention):
    """Mechanism that decodes from the keys and values of all tokens."""

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> KeyValueCache:
        return KeyValueCache.empty(batch, self.spec.on_rank(part), self.spec.max_length, like)

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: KeyValueCache, context: AttentionContext) -> None:
        cache.put(inputs.k, inputs.v)


class FullAttentionConfig(MechanismSection):
    shared_qk: bool = False
    """Keys are the normalised queries (Reformer, section 2): logits q·q/|q|. A token attends to itself only if no other
    key is visible."""
    ordinary: bool = False
    """With shared_qk: softmax(q·qᵀ/√D)v, in which a token attends to itself. A model trained with LSH fails with it
    (Reformer, Table 2)."""
    sinusoidal_positions: bool = False
    """Add sinusoidal positions to the queries and keys of every such layer, as in LHA's appendix A.1."""

    def check(self, key: str, model: ModelConfig) -> None:
        if self.ordinary and not self.shared_qk:
            problem = "true, but shared_qk is false, which is ordinary attention already"
            raise ConfigError(f"{key}.ordinary", problem, "Set it to false, or shared_qk to true")


@mechanism("full", FullAttentionConfig)
class FullAttention(KeyValueAttention):
    """Full attention, softmax(qkᵀ/√D)v. With shared QK: softmax(q·k̂ᵀ)v, k̂ = q/|q|, and a token attends to itself only
    if no other key is visible; or, if ordinary, softmax(qqᵀ/√D)v.
    """

    def __init__(self, config: FullAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.shared_qk = config.shared_qk
        self.ordinary = config.ordinary or not config.shared_qk
        self.changes_keys = config.sinusoidal_positions

    def prepare(self, q: Tensor, k: Tensor, first: int) -> tuple[Tensor, Tensor]:
        if not self.changes_keys:
            return q, k
        positions = sinusoids(first, q.shape[2], q.shape[3], q.device).to(q.dtype)
        return q + positions, k + positions

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        inputs = self._with_keys(inputs).with_query_dtype()
        scale = inputs.q.shape[3] ** -0.5 if self.ordinary else 1.0
        if inputs.dropout is not None:  # a window of all tokens, because SDPA's dropout uses the global generator
            window = Window("band", inputs.q.shape[2])
            spec = BucketedAttentionSpec(window, inputs.causal, scale, exclude_self=not self.ordinary)
            out = inputs.in_buckets(None, spec)[0]
        elif not self.ordinary and inputs.causal and inputs.key_mask is None and inputs.segments is None:
            # Attention to strictly earlier tokens is causal attention of queries 1… to keys 0…
            q, k, v = inputs[:3]
            rest = F.scaled_dot_product_attention(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1], is_causal=True, scale=1.0)
            out = torch.cat([v[:, :, :1], rest], dim=2)
        elif not self.ordinary:
            out = _masked(inputs, 1.0, exclude_self=True)
        elif inputs.key_mask is not None or inputs.segments is not None:
            out = _masked(inputs, scale, exclude_self=False)
        else:
            out = F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=inputs.causal)
        return AttentionOutput(out)

    def attends_prefix(self, group: int, ranks: int) -> bool:
        return not (self.shared_qk or self.changes_keys)

    def attend_prefix(
        self, q: Tensor, keys: PrefixKeys, position: int, document: int, context: AttentionContext
    ) -> Tensor:
        k, v = keys(document, position + q.shape[2])
        # A plan's meta tensors cannot be given a bias; their memory does not depend on the alignment.
        aligned = q.is_meta or q.shape[2] == k.shape[2]
        if aligned:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        from torch.nn.attention.bias import causal_lower_right  # loads torch.compile, which takes seconds

        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))

    def _with_keys(self, inputs: AttentionInputs) -> AttentionInputs:
        return inputs._replace(k=inputs.q) if self.shared_qk and self.ordinary else inputs

    def flops(self, length: int) -> Flops:
        work = self.spec.workload(length)
        return work.pairs(work.visible)

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: KeyValueCache, context: AttentionContext) -> None:
        super().fill_cache(x, self._with_keys(inputs), cache, context)

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: KeyValueCache, position: int, context: AttentionContext
    ) -> Tensor:
        cache.put(self._with_keys(inputs).k, inputs.v, position)
        if position == 0 and not self.ordinary:
            return inputs.v
        stop = position + 1 if self.ordinary else position
        scale = None if self.ordinary else 1.0
        k, v = (cached[:, :, :stop].to(inputs.q.dtype) for cached in (cache.k, cache.v))
        return F.scaled_dot_product_attention(inputs.q, k, v, scale=scale)


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, dropout: PairDropout | None) -> Tensor:
    """Compute softmax(qkᵀ/√D)v with dropout of the probabilities. Queries without a real key get 0.

    q: (B, H, Lq, D). k, v: (B, H, Lk, D). key_mask: (B, Lk) bool.
    """
    if dropout is not None:
        queries, keys = (torch.arange(x.shape[2], device=x.device)[None, None, None] for x in (q, k))
        spec = ClusterAttentionSpec(causal=False, scale=q.shape[-1] ** -0.5, count_clusters=False)
        return cluster_attention(q, k, v, (queries, keys), spec, key_mask, dropout=dropout)[0]
    if key_mask is None:
        return F.scaled_dot_product_attention(q, k, v)
    no_visible_key = ~key_mask.any(-1)[:, None, None, None]  # a softmax of nothing would be NaN
    mask = key_mask[:, None, None] | no_visible_key
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).masked_fill(no_visible_key, 0.0)


def _masked(inputs: AttentionInputs, scale: float, exclude_self: bool) -> Tensor:
    """Attend with a mask that is never L × L: Triton kernels use one window over the whole sequence, others build the
    mask for a tile of queries at a time, and again in the backward.
    """
    q, k, v = inputs[:3]
    length = q.shape[2]
    if implementation(q) == "triton":
        spec = BucketedAttentionSpec(Window("chunk", length), inputs.causal, scale, exclude_self, count_rounds=False)
        return inputs.in_buckets(None, spec)[0]
    step = max(1, _MASK // length)

    def part(first: int) -> Tensor:
        queries = q[:, :, first : first + step]
        mask = _mask(inputs, first, min(first + step, length), exclude_self)
        return F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)

    if step >= length:
        out = part(0)
    else:
        firsts = range(0, length, step)
        parts = [checkpoint(part, first, use_reentrant=False, preserve_rng_state=False) for first in firsts]
        out = torch.cat(parts, dim=2)  # (B, H, L, D)
    return inputs.without_padding(out)


def _mask(inputs: AttentionInputs, first: int, end: int, exclude_self: bool) -> Tensor:
    """Return the visible pairs of queries first…end − 1, (B, 1, end − first, L) bool, each query's own if there are
    none.
    """
    position = torch.arange(inputs.q.shape[2], device=inputs.q.device)
    diagonal = position[first:end, None] == position
    visible = Sight(inputs.causal, inputs.key_mask, inputs.segments).pairs(position[first:end], position)
    if exclude_self:
        visible = visible & ~diagonal
    return (visible | (diagonal & ~visible.any(-1, keepdim=True)))[:, None]
