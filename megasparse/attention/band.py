"""Attention inside buckets, and its decoding from each bucket's last keys: what every hashed mechanism shares.

B batch, H heads, R rounds, L length, D head dim, N buckets, M chunk.
"""

import json
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    CachedTokens,
    MechanismSpec,
)
from megasparse.attention.full import Cache, KeyValueCache
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.attention.sinks import DocumentRanks, merge, sink_attention
from megasparse.errors import ConfigError
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention

Codes = tuple[Tensor, Tensor | None]
"""Buckets of queries and of keys, (B, H, R, L) each, any integer type; None for keys: the queries' are theirs too."""
_MATCHES = 1 << 22
"""Codes of queries and keys that are compared at a time."""
_LAST = -1e30
"""A log-sum-exp below all that a token can have that sees another."""


def with_window(codes: Tensor) -> Tensor:
    """Codes (B, H, R, L) with a first round more, in which all tokens share a bucket: its band is a window on the last
    M tokens. As rounds are merged in one softmax, a key in the window and in a bucket counts once.
    """
    return torch.cat([torch.zeros_like(codes[:, :, :1]), codes], dim=2)


@dataclass
class BandCache(Cache):
    """Keys and values of all tokens so far, and each bucket's last M keys, oldest overwritten first.

    codes: (B, H, R, capacity), the keys' buckets. rank: (B, H, R, capacity), a key's number inside its bucket. last:
    (B, H, R, N, M) tokens; the key of rank k stands at k mod M. size: (B, H, R, N). Where all heads have the same
    codes, H is 1 in these four.
    """

    tokens: KeyValueCache
    codes: Tensor
    rank: Tensor
    last: Tensor
    size: Tensor

    @staticmethod
    def empty(
        batch: int, spec: MechanismSpec, rounds: int, buckets: int, chunk: int, like: Tensor, heads: int | None = None
    ) -> "BandCache":
        """For `batch` sequences, with device and dtype of `like`. heads: those with codes, by default all."""
        shape, capacity = (batch, heads or spec.heads, rounds), spec.max_length
        sizes = ((capacity,), (capacity,), (buckets, chunk), (buckets,))
        numbers = (torch.zeros(*shape, *size, dtype=torch.int64, device=like.device) for size in sizes)
        return BandCache(KeyValueCache.empty(batch, spec, capacity, like), *numbers)

    def fill(self, inputs: AttentionInputs, query_codes: Tensor, key_codes: Tensor | None) -> None:
        """Takes a whole prompt into an empty cache. See `Codes`."""
        codes = (query_codes if key_codes is None else key_codes).to(torch.int64)
        length, chunk = codes.shape[-1], self.last.shape[-1]
        self.tokens.put(inputs.k, inputs.v)
        self.size.scatter_add_(-1, codes, torch.ones_like(codes))
        order = codes.argsort(dim=-1, stable=True)
        first = self.size.cumsum(-1) - self.size  # sorted index of each bucket's first token
        rank = torch.arange(length, device=codes.device) - first.gather(-1, codes.gather(-1, order))
        self.codes[..., :length] = codes
        self.rank[..., :length].scatter_(-1, order, rank)
        rank = self.rank[..., :length]
        slot = codes * chunk + rank % chunk
        recent = self.size.gather(-1, codes) - rank <= chunk
        # Tokens that a later one of the bucket pushed out are sent where the newest token of the row goes, before it
        # does.
        token = torch.arange(length, device=codes.device).expand_as(codes)
        newest_slot, newest = slot[..., -1:], token[..., -1:]
        self.last.flatten(-2).scatter_(-1, torch.where(recent, slot, newest_slot), torch.where(recent, token, newest))

    def decode(
        self,
        inputs: AttentionInputs,
        query_code: Tensor,
        key_code: Tensor | None,
        position: int,
        *,
        scale: float,
        exclude_self: bool,
        count_rounds: bool,
        sinks: int = 0,
    ) -> Tensor:
        """`bucketed_attention` of the one new token at `position`, which is taken into the cache: (B, H, 1, D).
        query_code, key_code: (B, H, R, 1). sinks: so many first tokens are seen beside the buckets, whose buckets no
        query has.
        """
        code = query_code.to(torch.int64)
        self.append(inputs, code if key_code is None else key_code.to(torch.int64), position)
        tokens, valid = self.window(code)
        first = torch.arange(min(sinks, position + 1), device=code.device)
        log_count = torch.zeros(())
        if count_rounds:
            log_count = F.pad(self._log_count(tokens, code).flatten(2), (0, len(first)))
        tokens = torch.cat([tokens.flatten(2), first.expand(*tokens.shape[:2], -1)], dim=-1).unsqueeze(2)
        valid = F.pad(valid.flatten(2), (0, len(first)), value=True).unsqueeze(2)
        if exclude_self:
            valid = valid & (tokens != position)
        tokens, valid = (x.expand(-1, inputs.q.shape[1], -1, -1) for x in (tokens, valid))
        score = self.score(inputs.q, tokens, scale).squeeze(2)  # (B, H, R·M + n)
        score = score - log_count.to(score.dtype)
        score = score.masked_fill(~valid.squeeze(2), -torch.inf)
        blind = ~valid.any(-1)
        weight = torch.softmax(score.masked_fill(blind, 0.0), dim=-1).unsqueeze(2)
        out = (weight @ self.values(tokens).to(weight.dtype)).to(inputs.v.dtype)
        return torch.where(blind[..., None], inputs.v, out)

    def append(self, inputs: AttentionInputs, code: Tensor, position: int) -> None:
        """Takes in the new token, whose key has the buckets code (B, H, R, 1)."""
        self.tokens.put(inputs.k, inputs.v, position)
        rank, chunk = self.size.gather(-1, code), self.last.shape[-1]  # (B, H, R, 1): earlier keys of the bucket
        self.codes[..., position], self.rank[..., position] = code[..., 0], rank[..., 0]
        slot = code * chunk + rank % chunk
        self.last.flatten(-2).scatter_(-1, slot, torch.full_like(slot, position))
        self.size.scatter_add_(-1, code, torch.ones_like(code))

    def window(self, code: Tensor) -> tuple[Tensor, Tensor]:
        """The last M keys of buckets code (B, H, R, 1), newest first, and which places are filled: (B, H, R, M)."""
        chunk = self.last.shape[-1]
        bucket = self.last.gather(-2, code.unsqueeze(-1).expand(*code.shape, chunk)).squeeze(-2)
        size = self.size.gather(-1, code)
        back = torch.arange(1, chunk + 1, device=code.device).expand_as(bucket)
        return bucket.gather(-1, (size - back) % chunk), back <= size

    def score(self, q: Tensor, tokens: Tensor, scale: float) -> Tensor:
        """Return scale·q·k of the keys `tokens` in each round, (B, H, R, M), fp32 at least."""
        k = _gather(self.tokens.k, tokens).to(torch.promote_types(q.dtype, torch.float32))
        return scale * (k @ q.to(k.dtype).transpose(-1, -2)).view(tokens.shape)

    def values(self, tokens: Tensor) -> Tensor:
        """The values of the tokens `tokens` (B, H, R, M): (B, H, R·M, D)."""
        return _gather(self.tokens.v, tokens)

    def _log_count(self, tokens: Tensor, code: Tensor) -> Tensor:
        """Return log N, N rounds of which show a key, of the keys `tokens` in each round: (B, H, R, M) float64."""
        flat = tokens.flatten(2)[:, :, None].expand(-1, -1, tokens.shape[2], -1)  # every seen key in every round
        same = self.codes.gather(-1, flat) == code
        near = self.size.gather(-1, code) - self.rank.gather(-1, flat) <= self.last.shape[-1]
        return (same & near).sum(2).view(tokens.shape).clamp_min(1).double().log()


class BandAttention(Attention):
    """Hashed attention in a band of each bucket, which decodes from each bucket's last keys."""

    window: Window
    buckets: int
    shares_pairs = True
    rule: dict[str, Any]
    """Scale, exclude_self and count_rounds, as `BucketedAttentionSpec` has them."""
    local: bool = False
    """True if each head sees a window too, see `with_window`."""
    sinks: int = 0
    """First tokens that every later one sees, in the same softmax. They stand in no bucket, and in no window."""

    @abstractmethod
    def band_codes(self, inputs: AttentionInputs, position: int, context: AttentionContext) -> Codes:
        """Buckets of a decoder's tokens from `position` on."""

    def attend(
        self, inputs: AttentionInputs, query_codes: Tensor, key_codes: Tensor | None, part: SequencePart = WHOLE
    ) -> AttentionOutput:
        """Attend in the buckets, in the window that the mechanism has beside them, and to the sinks. See `Codes`."""
        codes = self._seen_codes(query_codes, key_codes)
        if not self.sinks and part.share is None:
            spec = BucketedAttentionSpec(self.window, inputs.causal, buckets=self.buckets, **self.rule)
            q, k, v, key_mask, segments, _, dropout = inputs
            out, _ = bucketed_attention(q, k, v, codes[0], spec, key_mask, segments, codes[1], dropout=dropout)
            return AttentionOutput(out, None, {})
        parts = [self._in_buckets(inputs, *codes, part)]
        if self.sinks:
            sink_rule = {name: self.rule[name] for name in ("scale", "exclude_self")}
            parts.append(sink_attention(self.sinks, inputs, part, **sink_rule))
        out, lse = merge(parts)
        # A real token that sees nothing sees itself. Where ranks share out the pairs, it may see others' pairs yet:
        # itself then counts as nothing beside them.
        blind = lse.isneginf()
        if inputs.key_mask is not None:
            blind = blind & inputs.key_mask[:, None]
        values = inputs.v.to(out.dtype)
        if (dropout := inputs.dropout) is not None:
            factors = dropout.factors(dropout.queries, dropout.keys(values.shape[2]), values.dtype)
            values = values * factors.unsqueeze(-1)
        if part.share is not None:
            blind = blind & part.answered(lse.shape[2], lse.device)
        out = torch.where(blind.unsqueeze(-1), values, out)
        return AttentionOutput(out, None, {}, None if part.share is None else lse.masked_fill(blind, _LAST))

    def _in_buckets(
        self, inputs: AttentionInputs, query_codes: Tensor, key_codes: Tensor | None, part: SequencePart
    ) -> tuple[Tensor, Tensor]:
        """The buckets without the sinks' keys. A decoder's sinks see nothing but sinks, so they are padding to the
        buckets; in an encoder they are queries in the buckets.
        """
        without_sinks, buckets = inputs, self.buckets
        sink = DocumentRanks.of(inputs).rank < self.sinks if self.sinks else None
        if sink is not None and inputs.causal:
            real = inputs.key_mask
            mask = (~sink if real is None else ~sink & real).expand(len(inputs.q), -1)
            without_sinks = inputs._replace(key_mask=mask)
        elif sink is not None:
            keys = query_codes if key_codes is None else key_codes
            key_codes, buckets = keys.int().masked_fill(sink[:, None, None], self.buckets), self.buckets + 1
        spec = BucketedAttentionSpec(
            self.window, inputs.causal, buckets=buckets, self_at_last=False, share=part.share, **self.rule
        )
        return without_sinks.in_buckets(query_codes, spec, key_codes)

    def _seen_codes(self, query_codes: Tensor, key_codes: Tensor | None) -> Codes:
        if not self.local:
            return query_codes, key_codes
        return with_window(query_codes), None if key_codes is None else with_window(key_codes)

    def index(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> tuple[Tensor | None, Any]:
        if self.shared_qk:
            return None, None
        queries, keys = self.band_codes(inputs, 0, context)
        codes = (queries if keys is None else keys).permute(0, 3, 1, 2).flatten(2)
        return codes.to(torch.int16 if self.buckets < 1 << 15 else torch.int32), queries

    def choose(self, queries: Any, index: Tensor | None, tokens: CachedTokens) -> Tensor | None:
        """The last M keys of each query's buckets, of the window, and the sinks, each key once."""
        if queries is None or index is None:
            return None
        batch, heads, rounds, count = queries.shape
        codes = index.unflatten(2, (heads, rounds)).permute(0, 2, 3, 1)  # (B, H, R, L)
        chunk, length = min(self.window.chunk, codes.shape[-1]), codes.shape[-1]
        position = torch.arange(length, dtype=torch.int32, device=codes.device)
        hidden = tokens.rank < self.sinks
        if tokens.real is not None:
            hidden = hidden | ~tokens.real
        step, picks = max(1, _MATCHES // (batch * heads * rounds * length)), []
        for first in range(0, count, step):
            last = position[length - count + first :][:step, None]
            match = codes.unsqueeze(-2) == queries[..., first : first + step, None].to(codes.dtype)
            match &= (position <= last) & ~hidden[:, None, None, None]  # (B, H, R, T, L)
            picks.append(torch.where(match, position, -1).topk(chunk, dim=-1).values)
        index = torch.cat(picks, dim=3).transpose(2, 3).flatten(3).long()  # (B, H, n, R·M)
        rank = tokens.rank[:, -count:, None]
        beside = torch.arange(self.sinks, device=rank.device)
        beside = beside.masked_fill(beside > rank, -1)
        if self.local:
            window = rank - torch.arange(self.window.chunk, device=rank.device)
            beside = torch.cat([beside, window.masked_fill(window < self.sinks, -1)], dim=-1)
        index = torch.cat([index, tokens.at(beside)[:, None].expand(*index.shape[:2], -1, -1)], dim=-1)
        if self.rule["count_rounds"] and (self.local or rounds > 1):
            index = index.sort(dim=-1).values
            index[..., 1:] = index[..., 1:].masked_fill(index[..., 1:] == index[..., :-1], -1)
        blind = (index < 0).all(-1)  # a query that sees no key attends to itself
        index[..., 0] = torch.where(blind, position[length - count :], index[..., 0])
        return index

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> BandCache:
        rounds, buckets = self.local + self.cached_rounds(rounds), self.buckets + (self.sinks > 0)
        return BandCache.empty(batch, self.spec.on_rank(part), rounds, buckets, self.window.chunk, like)

    def cached_rounds(self, rounds: int | None) -> int:
        """Hash rounds of a cache. rounds: in place of the configured ones, or None."""
        return 1

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: BandCache, context: AttentionContext) -> None:
        cache.fill(inputs, *self._cached_codes(inputs, 0, context))

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: BandCache, position: int, context: AttentionContext
    ) -> Tensor:
        if self.leak is not None:
            problem = f"{type(self).__name__} cannot decode token by token: {self.leak}"
            raise ConfigError("model.attention.pattern", problem, "Train with the strictly causal setting")
        codes = self._cached_codes(inputs, position, context)
        return cache.decode(inputs, *codes, position, **self.rule, sinks=self.sinks)

    def _cached_codes(self, inputs: AttentionInputs, position: int, context: AttentionContext) -> Codes:
        """The keys of sinks have a bucket that no query has."""
        queries, keys = self._seen_codes(*self.band_codes(inputs, position, context))
        if position < self.sinks:
            keys = (queries if keys is None else keys).to(torch.int64, copy=True)
            keys[..., : self.sinks - position] = self.buckets
        return queries, keys


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """Rows of x (B, H, L, D) at tokens (B, H, R, M): (B, H, R·M, D)."""
    index = tokens.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, index)


def check_band(key: str, window: str, local: bool, sinks: int) -> None:
    """Raise ConfigError for a window or sinks beside what is no band. key: that of the mechanism's section."""
    for name, value, none in (("local", local, False), ("sinks", sinks, 0)):
        if value and window != "band":
            problem = f'{json.dumps(value)} stands beside a band, but window = "{window}"'
            raise ConfigError(f"{key}.{name}", problem, f'Set it to {json.dumps(none)}, or window to "band"')
