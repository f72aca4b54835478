"""Attention to keys that a taught sketch selects: the base of Smart Bird and ranked attention.

S sketches on this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
from megasparse.attention.far_attention import SAMPLES, drawn_positions, far_attention, far_pairs, sketch_divergence
from megasparse.attention.flops import Flops, product
from megasparse.attention.local import cached_window, prefix_sinks, prefix_window
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.attention.sinks import merge, sink_index, without_seen
from megasparse.config.attention import MechanismSection
from megasparse.config.schema import ModelConfig, heads_of_layer
from megasparse.config.section import Count, Positive
from megasparse.errors import ConfigError
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.gathered_attention import gathered_attention
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.sketch import KeyChoiceSpec, chosen_keys, exact_projection


class SketchSection(MechanismSection):
    """Settings of mechanisms with taught sketches."""

    sketch_heads: Positive = 1
    """Number of neighbouring heads that share a sketch and its selected keys, of one KV group, for example; in
    `smart_bird` only with sketch = "heads"."""
    sketch_signs: bool = False
    """Compare the signs of the d numbers, by the Hamming distance of d bits, a multiple of 8; in `smart_bird` only with
    sketch = "heads"."""
    chunk: Positive = 64
    """With local only: positions per chunk."""
    sinks: Count = 0
    """First tokens of each document that all later ones (in an encoder all) attend to, in the same softmax, each
    once."""

    @property
    def heads_together(self) -> int:
        return self.sketch_heads

    def check(self, key: str, model: ModelConfig) -> None:
        width: int = getattr(self, "sketch_dim")  # noqa: B009  (its default differs)
        if self.sketch_signs and width % 8:
            problem = f"{width} is not a multiple of 8, but sketch_signs = true packs bits into bytes"
            raise ConfigError(f"{key}.sketch_dim", problem, "Set it to 64, for example")
        for layer in range(len(model.attention.pattern)):
            if (heads := heads_of_layer(model, layer).get(key.rpartition(".")[2], 0)) % self.sketch_heads:
                problem = f"{self.sketch_heads} does not divide the {heads} heads of a layer"
                raise ConfigError(f"{key}.sketch_heads", problem, "Set it to a divisor")


@dataclass
class SketchCache(Cache):
    """Keys and values of the heads, and the concatenated keys of all sketches, (B, capacity, S·d) in float64."""

    heads: KeyValueCache
    sketch: Tensor


class TaughtSketch(Attention):
    """Softmax attention of each query to the K keys with the largest products of its sketch, to a window and to sinks.

    A sketch projects the queries and keys of `sketch_heads` neighbouring heads, after rotation, to d numbers. A
    separate loss trains it (`learn`). Earlier keys come first among equals; each key is included once.
    """

    has_auxiliary_loss = True

    def __init__(self, config: Any, spec: MechanismSpec):
        super().__init__(config, spec)
        window = Window("chunk", min(config.chunk, spec.max_length), ahead=not spec.causal)
        self.window_spec = BucketedAttentionSpec(window, spec.causal, spec.head_dim**-0.5, exclude_self=False)
        self.chunk = window.chunk if config.local else None
        self.width = spec.heads * spec.head_dim  # numbers that all sketches read per token
        self.groups = spec.heads // config.sketch_heads
        self.index_width = config.sketch_dim // (8 if config.sketch_signs else 1)
        wide = config.sketch_heads * spec.head_dim
        self.query: Any
        self.key: Any
        self.query, self.key = (HeadProjection(self.groups, wide, config.sketch_dim) for _ in range(2))

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        x = self._read(x, inputs, context)
        loss, statistics = self._auxiliary(x, inputs, context)
        index = context.recompute.keep(lambda: self._choose(self.sketches(x, inputs, context), inputs, context))
        return AttentionOutput(self._attend(inputs, index, context.repeats), loss, statistics)

    def attends_prefix(self, group: int, ranks: int) -> bool:
        return ranks == 1 and group % self.heads_together == 0

    def index_keys(self, k: Tensor, context: AttentionContext) -> Tensor:
        with torch.no_grad():
            return self.sketches(k, AttentionInputs(k, k, k, None, None, True), context)[1]

    def attend_prefix(
        self, q: Tensor, keys: PrefixKeys, position: int, document: int, context: AttentionContext
    ) -> Tensor:
        stop = position + q.shape[2]
        sinks = self.config.sinks
        chunk = self.chunk
        k, v, index = keys(document, stop)
        with torch.no_grad():
            sketch = self.sketches(q, AttentionInputs(q, q, q, None, None, True), context)[0]
            inputs = AttentionInputs(q, k, v, None, None, True)
            first = position - document  # keys are numbered from the document's first
            chosen = self._choose((sketch, index), inputs, context, first)
            seen = chosen < sinks
            if chunk is not None:
                queries = torch.arange(position, stop, device=q.device)[:, None]
                seen = seen | (chosen + document >= (queries // chunk - 1) * chunk)
            chosen = chosen.masked_fill(seen, -1)
        repeats = q.shape[1]
        parts = [gathered_attention(q, k[:, ::repeats], v[:, ::repeats], chosen, scale=self.window_spec.scale)]
        if chunk is not None:
            parts.append(prefix_window(q, keys, position, document, self.window_spec))
        if sinks:
            parts.append(prefix_sinks(q, keys, position, document, sinks, chunk))
        return merge(parts)[0]

    def _read(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, position: int = 0) -> Tensor:
        """Return the sketch's detached input. position: of the first token of x."""
        return x.detach()

    def _auxiliary(
        self, x: Tensor, inputs: AttentionInputs, context: AttentionContext
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        return self.learn(x, inputs, context) if context.rng.training else (None, {})

    def _attend(self, inputs: AttentionInputs, index: Tensor, repeats: int) -> Tensor:
        """Attend to the selected keys, the sinks and the window."""
        sinks = self.config.sinks
        if sinks or self.chunk:
            index = without_seen(index, inputs, sinks, self.chunk)
        if sinks:
            first = sink_index(sinks, inputs, chunk=self.chunk)
            index = torch.cat([index, first.expand(*index.shape[:2], -1, -1)], dim=-1)
        k, v = (x[:, ::repeats] for x in (inputs.k, inputs.v))
        chosen = gathered_attention(inputs.q, k, v, index, scale=self.window_spec.scale, dropout=inputs.dropout)
        return chosen[0] if self.chunk is None else merge([inputs.in_buckets(None, self.window_spec), chosen])[0]

    def learn(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the auxiliary loss of sketches that learn attention, and its statistics: the divergence of each from
        the mean attention of its heads, averaged over sketches. x: (B, L, E).
        """
        queries = self._samples(inputs.q.shape[2], context, inputs.q.device)
        size: Any = self.chunk
        in_window = (lambda q, k: (k // size <= q // size + 1) & (k // size + 1 >= q // size)) if size else None
        far = far_pairs(inputs, queries, self.config.sinks, in_window)
        q, k = self.sketches(x.detach(), inputs, context, exactly=False)
        shares = far_attention(inputs, queries, far, self.window_spec.scale)
        shares = shares.unflatten(1, (q.shape[1], -1)).mean(2)  # (B, S, samples, L)
        if self.groups == 1 and context.part.size > 1:
            shares = context.part.sum(shares) / context.part.size
        real = None if inputs.key_mask is None else inputs.key_mask[:, queries], inputs.key_mask
        loss, statistics = self._sketch_loss(q[:, :, queries], k, shares, far, real, context)
        return loss * (1.0 / self.spec.layers), statistics

    def sampled_queries(self, length: int, context: AttentionContext, device: torch.device) -> Tensor | None:
        return self._samples(length, context, device) if context.rng.training else None

    def _samples(self, length: int, context: AttentionContext, device: torch.device) -> Tensor:
        return drawn_positions(context.key("sketch sample"), length, SAMPLES, device)

    def _sketch_loss(
        self, q: Tensor, k: Tensor, shares: Tensor, far: Tensor, real: Sequence[Any], context: AttentionContext
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and statistics of sampled queries q (B, S, samples, d), keys k (B, S, L, d), and shares of
        attention (B, S, samples, L), 0 unless `far`. real: masks of queries and keys, or None.
        """
        sketches = zip(q.unbind(1), k.unbind(1), shares.unbind(1), strict=True)
        loss = torch.stack([sketch_divergence(*of_group, far, real[0]) for of_group in sketches]).mean()
        return loss, {"sketch_loss": loss.detach()}

    def teaching_rate(self, parameter: str, progress: float = 0.0) -> float | None:
        return 3e-3

    def sketches(
        self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, exactly: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of this rank's S sketches: (B, S, L, d) each. Exact keys are rounded to the dtype
        of x, as replaced models cache them.
        """
        q, k = self._project(x, inputs, context, exactly)
        if not self.config.sketch_signs:
            return q, k.to(x.dtype).to(k.dtype) if exactly else k
        if exactly:
            return signs(q), (k >= 0).unflatten(-1, (-1, 8)).to(k.dtype) @ _powers(k)
        q, k = (x.tanh() + (signs(x) - x.tanh()).detach() for x in (q / 2, k / 2))  # straight-through gradients
        return q, k

    def _project(
        self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, exactly: bool
    ) -> tuple[Tensor, Tensor]:
        q = self.query(inputs.q.detach(), context.part, exactly)
        return q, self.key(inputs.k.detach(), context.part, exactly)

    def unpacked(self, k: Tensor) -> Tensor:
        """Return the vectors of indexed keys, of packed bits ±1: (..., d)."""
        if not self.config.sketch_signs:
            return k
        return signs(k.unsqueeze(-1).div(_powers(k), rounding_mode="floor") % 2 - 0.5).flatten(-2)

    def flops(self, length: int) -> Flops:
        work = self.spec.workload(length)
        window = work.pairs(work.chunks(self.window_spec.window.chunk)) * self.config.local
        return work.pairs(self.config.keys + self.config.sinks) + window + self._sketch_flops(length, work.visible)

    def _sketch_flops(self, length: int, visible: float) -> Flops:
        """Count 2·d per key for the selection, two projections, and for a sample of the queries the scores of all
        heads, detached, and of the sketches.
        """
        wide = self.config.sketch_dim
        heads = self.spec.heads
        dim = self.spec.head_dim
        sampled = min(SAMPLES, length) / length
        scores = (Flops(2.0 * visible) + product(2.0 * visible * sampled)) * (wide * self.groups)
        projections = Flops(4.0 * self.width, 4.0 * self.width) * wide
        return projections + scores + Flops(2.0 * dim * heads * visible * sampled)

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> SketchCache:
        capacity = self.spec.max_length
        groups = self.groups if self.groups == 1 else self.groups // part.head_shards
        sketch = like.new_zeros(batch, capacity, groups * self.index_width, dtype=torch.float64)
        return SketchCache(KeyValueCache.empty(batch, self.spec.on_rank(part), capacity, like), sketch)

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: SketchCache, context: AttentionContext) -> None:
        self._store(cache, self.index(x, inputs, context), 0)

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: SketchCache, position: int, context: AttentionContext
    ) -> Tensor:
        newest = self.index(x, inputs, context, position)
        self._store(cache, newest, position)
        tokens = CachedTokens.of(position + 1, 1, None, x.device)
        *_, chosen = self.choose(newest, cache.sketch[:, : position + 1], tokens)
        q = inputs.q
        k = cache.heads.k
        v = cache.heads.v
        out, lse = gathered_attention(q, k, v, chosen, scale=self.window_spec.scale)
        if self.chunk is None:
            return out
        # Round the window and the other keys separately, as `_attend`: another rounding flips keys of later layers.
        return merge([cached_window(q, k, v, k.shape[2], position, self.window_spec), (out, lse)])[0]

    def _store(self, cache: SketchCache, newest: IndexedTokens, position: int) -> None:
        cache.heads.put(newest.inputs.k, newest.inputs.v, position)
        assert newest.entries is not None
        cache.sketch[:, position : position + newest.entries.shape[1]] = newest.entries

    def index(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, position: int = 0) -> IndexedTokens:
        x = self._read(x, inputs, context, position)
        queries, keys = self.sketches(x, inputs, context)
        return IndexedTokens(inputs, context, keys.transpose(1, 2).flatten(2), queries)

    def choose(self, newest: IndexedTokens, index: Tensor | None, tokens: CachedTokens) -> tuple[Tensor, ...]:
        assert index is not None and newest.queries is not None
        keys = index.unflatten(2, (newest.queries.shape[1], -1)).transpose(1, 2)  # (B, S, L, d)
        masked = newest.inputs._replace(key_mask=tokens.real)
        chosen = self._choose((newest.queries, keys), masked, newest.context, index.shape[1] - tokens.number)
        near, first, start = tokens.window_and_sinks(self.chunk, self.config.sinks)
        rank = chosen
        if tokens.real is not None:
            position = chosen.clamp_min(0).long().flatten(1)
            rank = tokens.rank.expand(len(chosen), -1).gather(1, position).view(chosen.shape)
        chosen = chosen.masked_fill((rank < self.config.sinks) | (rank >= start), -1)
        chosen = torch.cat([chosen, first.expand(*chosen.shape[:2], -1, -1)], dim=-1)
        return (chosen,) if self.chunk is None else (near, chosen)

    @torch.no_grad()
    def _choose(
        self, sketches: tuple[Tensor, Tensor], inputs: AttentionInputs, context: AttentionContext, first_query: int = 0
    ) -> Tensor:
        """Return the keys of queries from position `first_query` on, (B, S, Lq, K), given sketched queries and all
        indexed keys.
        """
        count = sketches[0].shape[1]
        q = sketches[0].flatten(0, 1)  # (B·S, Lq, d)
        k = self.unpacked(sketches[1]).flatten(0, 1)  # (B·S, L, d)
        spec = KeyChoiceSpec(self.config.keys, inputs.causal, "top_k")
        chosen = chosen_keys(q, k, spec, None, None, *repeated_masks(inputs, count), first_query)
        return chosen.unflatten(0, (-1, count)).squeeze(2)  # (B, S, Lq, K)


def repeated_masks(inputs: AttentionInputs, count: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the key mask and the documents of each of `count` sketches, (B·count, L), or None."""
    masks = inputs.key_mask, inputs.segments
    mask, segments = (None if x is None else x.repeat_interleave(count, dim=0) for x in masks)
    return mask, segments


def signs(x: Tensor) -> Tensor:
    """Return 1 for numbers >= 0 and -1 for others."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def _powers(like: Tensor) -> Tensor:
    """Return the values of a number's 8 bits. Every dtype represents integers up to 256."""
    return 2.0 ** torch.arange(8, dtype=like.dtype, device=like.device)


class HeadProjection(nn.Module):
    """Linear map to d numbers of the concatenated queries or keys of G neighbouring heads, per group of heads."""

    def __init__(self, groups: int, width_in: int, width_out: int):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * width_out, width_in))

    def forward(self, x: Tensor, part: SequencePart, exactly: bool = False) -> Tensor:
        """Project this rank's heads x (B, H, L, D) to (B, S, L, d)."""
        weights = part.local_part(self.weight, 0).unflatten(0, (self.groups // part.head_shards, -1))  # (S, d, G·D)
        grouped = x.unflatten(1, (len(weights), -1)).transpose(2, 3).flatten(3)  # (B, S, L, G·D)
        if exactly:
            return exact_projection(grouped, weights)
        grouped = at_least_fp32(grouped)
        return grouped @ weights.to(grouped.dtype).mT
