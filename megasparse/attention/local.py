"""Local attention: a token attends to its own chunk of C positions and the previous chunk, strictly causally; in an
encoder also to the next chunk.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.cache import Cache, CachedTokens, KeyValueCache
from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    IndexedTokens,
    MechanismSpec,
    PrefixKeys,
)
from megasparse.attention.flops import Flops
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.attention.sinks import cached_sinks, merge, sink_attention
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.schema import ModelConfig
from megasparse.config.section import Count, Positive
from megasparse.errors import ConfigError
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.bucketed_attention.blocks import QueryBlock, query_attention
from megasparse.ops.local_attention import LocalAttentionSpec, RelativeVectors, distances, relative_local_attention
from megasparse.ops.operator import at_least_fp32, wide_dtype
from megasparse.ops.positions import sinusoids


class RelativePositions(nn.Module):
    """Relative positions of Transformer-XL (Dai et al. 2019, section 3.3): r_{i−j} = R_{i−j}·W_r with sinusoids R, and
    biases u and w, separate for each head.
    """

    def __init__(self, spec: MechanismSpec):
        super().__init__()
        self.width = spec.d_model
        self.projection = nn.Parameter(torch.empty(spec.heads, spec.d_model, spec.head_dim))
        self.content_bias = nn.Parameter(torch.empty(spec.heads, spec.head_dim))
        self.distance_bias = nn.Parameter(torch.empty(spec.heads, spec.head_dim))

    def forward(self, chunk: int, causal: bool, part: SequencePart = WHOLE) -> RelativeVectors:
        """Return the vectors of this rank's heads, r in fp32 or wider."""
        steps = distances(chunk, causal)
        r = sinusoids(steps[-1], len(steps), self.width, self.projection.device).flip(0)
        r = r.to(wide_dtype(self.projection)) @ at_least_fp32(part.local_part(self.projection, 0))
        return RelativeVectors(r, part.local_part(self.content_bias, 0), part.local_part(self.distance_bias, 0))


@dataclass
class LocalCache(Cache):
    """The last 2C tokens in a ring buffer (position p at p mod 2C), then the sinks; and `RelativePositions`' result."""

    tokens: KeyValueCache
    relative: RelativeVectors | None


class LocalAttentionConfig(MechanismSection):
    chunk: Positive = 128
    """Chunk size: a token attends to its own chunk of positions and the previous one; in an encoder also the next."""
    relative: bool = False
    """Use relative positions as in Transformer-XL instead of `model.positions`."""
    sinks: Count = 0
    """First tokens of each document that all later ones (in an encoder all) attend to, in the same softmax, each
    once."""

    def check(self, key: str, model: ModelConfig) -> None:
        if self.relative and model.positions.kind == "rotary":
            problem = 'true adds relative positions to queries and keys that model.positions.kind = "rotary" rotates'
            raise ConfigError(f"{key}.relative", problem, "Set it to false, or choose another model.positions.kind")
        if self.relative and self.sinks:
            problem = f"{self.sinks} sinks may be farther away than the largest distance of relative = true"
            raise ConfigError(f"{key}.sinks", problem, "Set it to 0, or relative to false")


@mechanism("local", LocalAttentionConfig)
class LocalAttention(Attention):
    """Softmax attention of each query to its chunk of C positions and the previous chunk, in encoders also the next.

    The published enwik8-64K configuration of Reformer uses it. The logits are q_i·k_j/√D, with relative positions
    ((q_i + u)·k_j + (q_i + w)·r_{i−j})/√D. Sinks join the same softmax.
    """

    def __init__(self, config: LocalAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.chunk = min(config.chunk, spec.max_length)
        self.sinks = config.sinks
        self.relative = RelativePositions(spec) if config.relative else None
        self.shares_pairs = self.relative is None

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        causal = inputs.causal
        scale = self.spec.head_dim**-0.5
        if self.relative is not None:
            q, k, v, key_mask, segments, _, dropout = inputs
            vectors = self.relative(self.chunk, causal, context.part)
            spec = LocalAttentionSpec(self.chunk, causal, scale)
            out = relative_local_attention(q, k, v, vectors, spec, key_mask, segments, dropout=dropout)
            return AttentionOutput(out)
        part = context.part
        out, lse = inputs.in_buckets(None, self._rule(causal, part.pair_shard))
        if self.sinks:
            sinks = sink_attention(self.sinks, inputs, part, scale=scale, chunk=self.chunk)
            out, lse = merge([(out, lse), sinks])
        return AttentionOutput(out, lse=None if part.pair_shard is None else lse)

    def attends_prefix(self, group: int, ranks: int) -> bool:
        return self.relative is None

    def attend_prefix(
        self, q: Tensor, keys: PrefixKeys, position: int, document: int, context: AttentionContext
    ) -> Tensor:
        parts = [prefix_window(q, keys, position, document, self._rule(True))]
        if self.sinks:
            parts.append(prefix_sinks(q, keys, position, document, self.sinks, self.chunk))
        return merge(parts)[0] if self.sinks else parts[0][0]

    def _rule(self, causal: bool, pair_shard: tuple[int, int] | None = None) -> BucketedAttentionSpec:
        window = Window("chunk", self.chunk, ahead=not causal)
        scale = self.spec.head_dim**-0.5
        rule = {"exclude_self": False, "self_at_last": False}
        return BucketedAttentionSpec(window, causal, scale, **rule, pair_shard=pair_shard)

    def selection_gap(self, inputs: AttentionInputs, context: AttentionContext) -> float:
        return math.inf if self.relative is None else 0.0

    def flops(self, length: int) -> Flops:
        """Relative positions add separate scores, 6·D per key."""
        work = self.spec.workload(length)
        keys = work.chunks(self.chunk) + work.beyond(self.chunk, self.sinks)
        return work.pairs(keys) * (1.5 if self.relative else 1.0)

    def choose(self, newest: IndexedTokens, index: Tensor | None, tokens: CachedTokens) -> tuple[Tensor, ...] | None:
        whole = self.relative is not None or (tokens.number > 1 and tokens.real is None)
        return None if whole else tokens.window_and_sinks(self.chunk, self.sinks)[: 1 + (self.sinks > 0)]

    def skipped(self, position: int) -> slice:
        first = -(-self.sinks // self.chunk) * self.chunk
        return slice(first, max(first, (position // self.chunk - 1) * self.chunk))

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> LocalCache:
        # Ring buffer of two chunks: the current one and the previous one.
        tokens = KeyValueCache.empty(batch, self.spec.on_rank(part), 2 * self.chunk + self.sinks, like)
        return LocalCache(tokens, None if self.relative is None else self.relative(self.chunk, True, part))

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: LocalCache, context: AttentionContext) -> None:
        length = inputs.k.shape[2]
        capacity = 2 * self.chunk
        recent = torch.arange(max(0, length - capacity), length, device=inputs.k.device)
        first = torch.arange(min(self.sinks, length), device=inputs.k.device)
        token = torch.cat([recent, first])
        slot = torch.cat([recent % capacity, capacity + first])
        cache.tokens.k[:, :, slot] = inputs.k[:, :, token].to(cache.tokens.k.dtype)
        cache.tokens.v[:, :, slot] = inputs.v[:, :, token].to(cache.tokens.v.dtype)

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: LocalCache, position: int, context: AttentionContext
    ) -> Tensor:
        capacity = 2 * self.chunk
        cache.tokens.put(inputs.k, inputs.v, position % capacity)
        if position < self.sinks:
            cache.tokens.put(inputs.k, inputs.v, capacity + position)
        k = cache.tokens.k
        v = cache.tokens.v
        if cache.relative is not None:
            keys = torch.arange(max(0, position // self.chunk - 1) * self.chunk, position + 1, device=k.device)
            k, v = (at_least_fp32(x[:, :, keys % capacity]) for x in (k, v))
            r, u, w = cache.relative
            r = r[:, capacity - 1 - (position - keys)].to(k.dtype)
            wide = inputs.q.to(k.dtype)
            score = (wide + u[:, None]) @ k.transpose(-1, -2) + (wide + w[:, None]) @ r.transpose(-1, -2)
            weight = torch.softmax(score * self.spec.head_dim**-0.5, dim=-1)  # (B, H, 1, keys)
            return (weight @ v).to(inputs.q.dtype)
        out, lse = cached_window(inputs.q, k, v, capacity, position, self._rule(causal=True))
        if self.sinks:
            scale = self.spec.head_dim**-0.5
            (k, v) = (x[:, :, capacity:] for x in (k, v))
            sinks = cached_sinks(range(self.sinks), inputs.q, k, v, position, scale=scale, chunk=self.chunk)
            out, _ = merge([(out, lse), sinks])
        return out


def prefix_window(
    q: Tensor, keys: PrefixKeys, position: int, document: int, spec: BucketedAttentionSpec
) -> tuple[Tensor, Tensor]:
    """Attend to the chunk windows of a tile of queries, see `Attention.attend_prefix`, for `merge`."""
    chunk = spec.window.chunk
    start = max(0, position // chunk - 1) * chunk
    stop = position + q.shape[2]
    k, v, *_ = keys(start, stop)
    segments = None  # a mask would move the borders of chunks
    if document > start:
        segments = (torch.arange(start, stop, device=q.device) >= document).long().expand(len(q), -1)
    padded = F.pad(q, (0, 0, position - start, 0))
    out, lse = AttentionInputs(padded, k, v, None, segments, True).in_buckets(None, spec)
    return out[:, :, position - start :], lse[:, :, position - start :]


def prefix_sinks(
    q: Tensor, keys: PrefixKeys, position: int, document: int, sinks: int, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Attend to the sinks of a tile of queries that are not in its chunk windows, see `prefix_window`."""
    first = range(document, min(document + sinks, position + q.shape[2]))
    k, v, *_ = keys(first.start, first.stop)
    return cached_sinks(first, q, k, v, position, scale=q.shape[3] ** -0.5, chunk=chunk)


def cached_window(
    q: Tensor, k: Tensor, v: Tensor, capacity: int, position: int, spec: BucketedAttentionSpec
) -> tuple[Tensor, Tensor]:
    """Compute `bucketed_attention` in the chunk window of the query (B, H, 1, D) at `position`, bit-identical to a full
    pass. k, v: (B, H, P, D), position p at index p mod `capacity`.
    """
    chunk = spec.window.chunk
    row = torch.arange(q.shape[0] * q.shape[1], device=q.device)
    column = position // chunk * chunk - chunk + torch.arange(2 * chunk, device=q.device)  # positions of keys
    hidden, tokens = (x.expand(len(row), -1) for x in ((column < 0) | (column > position), column % capacity))
    return query_attention(q, k, v, spec, [QueryBlock(row, tokens, hidden, k.shape[2], chunk, q)])
