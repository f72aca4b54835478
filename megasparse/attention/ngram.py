"""N-gram attention: a token attends to a window, and to the tokens that followed its last n tokens earlier."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from megasparse.attention.band import BandCache
from megasparse.attention.cache import Cache
from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    Buckets,
    MechanismSpec,
)
from megasparse.attention.flops import Flops
from megasparse.attention.local import cached_window
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.attention.sinks import cached_sinks, merge, sink_attention
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Count, Positive
from megasparse.errors import ConfigError
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.hashing import code_dtype
from megasparse.ops.random import derive, random_bits


@dataclass
class NGramCache(Cache):
    """Keys and values of all tokens, with the last keys that followed each bucket's n-grams; the tokens that the next
    n-gram needs, (B, n − 1); and the newest token's buckets, for the next key, (B, 1, R, 1).
    """

    band: BandCache
    recent: Tensor
    newest: Tensor


class SourceBias(nn.Module):
    """Bias of each head, added to the scores of keys that a round selects: (H, R), initially 0."""

    def __init__(self, heads: int, rounds: int):
        super().__init__()
        self.rounds = rounds
        self.bias = nn.Parameter(torch.zeros(heads * rounds))

    def forward(self, part: SequencePart) -> Tensor:
        return part.local_part(self.bias, 0).view(-1, self.rounds)


class NGramAttentionConfig(MechanismSection):
    lengths: list[Positive] = Field(default=[4], min_length=1)
    """n of each round: a token attends to the tokens that followed earlier occurrences of its last n tokens."""
    chunk: Annotated[int, Field(ge=2)] = 64
    """M: each round selects the last M − 1 of these tokens."""
    window: Positive = 64
    """Chunk size of the window: a token's own chunk of positions and the previous chunk, as in `local`."""
    sinks: Count = 0
    """First tokens of each document that all later ones attend to in addition to the window, in the same softmax."""

    causal_only = "it attends to the tokens that followed earlier ones"


@mechanism("ngram", NGramAttentionConfig)
class NGramAttention(Attention):
    """Softmax attention to a window and to the tokens that followed earlier occurrences of the last n tokens.

    Induction heads learn to attend to such tokens (Olsson et al. 2022); here a hash of n tokens selects them. The
    window and its sinks are the same as in local attention. Round n also selects the last M − 1 positions j <= i of the
    query's document whose preceding tokens match:

        h_n(the n tokens before j) = h_n(the last n tokens that position i has read).

    A decoder's position i has read the tokens before i, so the mechanism is strictly causal. Window and rounds are one
    softmax of the logits q·k/√D, plus a learned b_n per head in round n. The window and each round that selects a key
    add a term for it; a document's first token is in no round.
    """

    reads_tokens = True
    shares_pairs = True

    def __init__(self, config: NGramAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.buckets = 1 << max(1, spec.max_length - 1).bit_length()
        self.bias = SourceBias(spec.heads, len(config.lengths))
        scale = spec.head_dim**-0.5
        window = Window("chunk", min(config.window, spec.max_length))
        self.window_spec = BucketedAttentionSpec(window, True, scale, exclude_self=False, self_at_last=False)
        # If t < i are in one bucket, i attends to the successor t + 1 <= i: shift keys and values by one position.
        band = Window("band", config.chunk)
        self.moved = replace(
            self.window_spec, window=band, exclude_self=True, buckets=self.buckets, longest=spec.max_length
        )
        far = Window("band", config.chunk - 1)
        self.far = replace(self.moved, window=far, exclude_self=False, buckets=self.buckets + 1)

    def assign(self, context: AttentionContext, key_mask: Tensor | None, segments: Tensor | None) -> Tensor:
        """Return the buckets of queries, (B, R, L), the same for all heads."""
        if context.tokens is None:
            problem = "ngram hashes tokens, but AttentionContext.tokens is None"
            raise ConfigError("model.attention.pattern", problem, "Give the token before each position")
        tokens = F.pad(context.tokens[:, 1:], (1, 0), value=-1)  # nothing precedes the first position
        return self._codes(tokens, key_mask, segments)

    def _codes(self, tokens: Tensor, key_mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        return ngram_codes(tokens, self.config.lengths, self.buckets, key_mask, segments).transpose(0, 1)

    def buckets_of(self, inputs: AttentionInputs, context: AttentionContext) -> Buckets:
        codes = self.assign(context, inputs.key_mask, inputs.segments)
        queries, keys = (x.repeat(1, self.spec.heads, 1) for x in (codes, _following(codes, inputs, self.buckets)))
        return Buckets(queries, keys, self.buckets + 1)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        codes = context.recompute.keep(lambda: self.assign(context, inputs.key_mask, inputs.segments))
        part = context.part
        parts = [inputs.in_buckets(None, replace(self.window_spec, pair_shard=part.pair_shard))]
        if sinks := self.config.sinks:
            chunk = self.window_spec.window.chunk
            parts.append(sink_attention(sinks, inputs, part, scale=self.window_spec.scale, chunk=chunk))
        bias = F.pad(self.bias(part), (len(parts), 0))[:, None]
        parts += [self._round(inputs, round_codes, part.pair_shard) for round_codes in codes.unbind(1)]
        out, lse = merge(parts, bias)
        return AttentionOutput(out, lse=None if part.pair_shard is None else lse)

    def _round(self, inputs: AttentionInputs, codes: Tensor, shard: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of one round, 0 and −∞ without a match. codes: (B, L)."""
        of_all = codes[:, None, None]
        if inputs.key_mask is None:
            k, v = (x.roll(-1, dims=2) for x in (inputs.k, inputs.v))
            dropout = None if inputs.dropout is None else replace(inputs.dropout, shift=1)
            return inputs._replace(k=k, v=v, dropout=dropout).in_buckets(of_all, replace(self.moved, pair_shard=shard))
        # A real token may be followed by padding, so keys need separate buckets.
        keys = _following(codes[:, None], inputs, self.buckets)[:, None]
        return inputs.in_buckets((of_all, keys), replace(self.far, pair_shard=shard))

    def selection_gap(self, inputs: AttentionInputs, context: AttentionContext) -> float:
        return math.inf

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> NGramCache:
        lengths = self.config.lengths
        spec = self.spec.on_rank(part)
        band = BandCache.empty(batch, spec, len(lengths), self.buckets + 1, self.far.window.chunk, like, heads=1)
        recent = torch.full((batch, max(lengths) - 1), -1, dtype=torch.int64, device=like.device)
        return NGramCache(band, recent, recent.new_full((batch, 1, len(lengths), 1), self.buckets))

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: NGramCache, context: AttentionContext) -> None:
        codes = self.assign(context, None, None)
        cache.band.fill(inputs, codes[:, None], _following(codes, inputs, self.buckets)[:, None])
        self._remember(cache, context, codes[:, None, :, -1:].long())

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: NGramCache, position: int, context: AttentionContext
    ) -> Tensor:
        assert context.tokens is not None
        codes = self._codes(torch.cat([cache.recent, context.tokens], dim=1))[:, None, :, -1:].long()
        band = cache.band
        band.append(inputs, cache.newest, position)
        q = inputs.q
        k = band.tokens.k
        v = band.tokens.v
        parts = [cached_window(q, k, v, k.shape[2], position, self.window_spec)]
        if sinks := self.config.sinks:
            chunk = self.window_spec.window.chunk
            scale = self.window_spec.scale
            parts.append(cached_sinks(range(sinks), q, k, v, position, scale=scale, chunk=chunk))
        bias = F.pad(self.bias(context.part), (len(parts), 0))[:, None]
        rank = band.size.gather(-1, codes)  # rank of the new token, whose successor does not exist yet
        for number in range(codes.shape[2]):
            of_round = slice(number, number + 1)
            parts.append(band.rounds(of_round).attend(q, codes[:, :, of_round], rank[:, :, of_round], self.moved))
        self._remember(cache, context, codes)
        return merge(parts, bias)[0]

    def _remember(self, cache: NGramCache, context: AttentionContext, codes: Tensor) -> None:
        assert context.tokens is not None
        size = cache.recent.shape[1]
        cache.recent = torch.cat([cache.recent, context.tokens], dim=1)[:, -size:] if size else cache.recent
        cache.newest = codes

    def flops(self, length: int) -> Flops:
        work = self.spec.workload(length)
        rounds = len(self.config.lengths)
        chunk = self.window_spec.window.chunk
        keys = work.chunks(chunk) + work.beyond(chunk, self.config.sinks)
        return work.pairs(keys) + work.pairs(self.config.chunk - 1) * rounds


@torch.no_grad()
def ngram_codes(
    tokens: Tensor, lengths: list[int], buckets: int, key_mask: Tensor | None = None, segments: Tensor | None = None,
    behind: int = 1,
) -> Tensor:  # fmt: skip
    """Return the bucket of the last n tokens at each position, for each n of lengths, (N, B, L), 0 <= code < buckets.

    tokens: (B, L) int64, the newest token known at each position, −1 if there is none. key_mask, segments: of the
    positions. behind: positions from the newest token to the one that reads it, 1 in a decoder and 0 in an encoder.
    Tokens of other documents and padding are hashed as missing. A pure function of the n tokens, in integers: the same
    on every device and in every batch.
    """
    keys = [derive("n-gram", n) for n in lengths]
    codes = tokens.new_zeros(len(lengths), *tokens.shape)
    for back in reversed(range(max(lengths))):
        token = _earlier(tokens, back, -1)
        for mask, of_other in ((key_mask, False), (segments, -1)):
            if mask is not None:
                before = _earlier(mask, back + behind, of_other)
                token = token.masked_fill(~before if mask.dtype == torch.bool else before != mask, -1)
        inside = [i for i, n in enumerate(lengths) if n > back]
        rows = (codes[inside] << 32) + token + 1
        codes[inside] = random_bits([keys[i] for i in inside], rows, 1).squeeze(-1).long() & 0x7FFFFFFF
    return (codes % buckets).to(code_dtype(buckets))


def _following(codes: Tensor, inputs: AttentionInputs, buckets: int) -> Tensor:
    """Return the buckets of keys (B, R, L): the previous position's, or `buckets`, without queries, for a document's
    first key.
    """
    return F.pad(codes.int(), (1, -1)).masked_fill(~inputs.continues()[:, None], buckets)


def _earlier(x: Tensor, steps: int, fill: int | bool) -> Tensor:
    return F.pad(x, (steps, 0), value=fill)[:, : x.shape[1]]
