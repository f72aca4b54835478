"""Attention inside buckets, and decoding from each bucket's last keys, shared by all hashed mechanisms."""

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.cache import Cache, CachedTokens, KeyValueCache
from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    IndexedTokens,
    MechanismSpec,
)
from megasparse.attention.flops import Flops
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.attention.sinks import DocumentRanks, cached_sinks, merge, sink_attention
from megasparse.config.attention import MechanismSection
from megasparse.config.messages import show
from megasparse.config.schema import ModelConfig, heads_of_layer
from megasparse.config.section import Count
from megasparse.errors import ConfigError
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Codes, Window
from megasparse.ops.bucketed_attention.blocks import QueryBlock, query_attention
from megasparse.ops.bucketed_attention.spec import RankedTiles

SHIFTED = "with shifted_keys it attends to the tokens that followed earlier ones"
_LAST = -1e30
"""Below the log-sum-exp of any token with a visible key."""


class BandSection(MechanismSection):
    """Settings of hashed mechanisms."""

    local: bool = False
    """Add a local window to the buckets: each head also attends to the last `chunk` tokens (in an encoder on either
    side), in the same softmax. A key in both is included once. Except in `lsh`, with band only."""
    sinks: Count = 0
    """With band only: first tokens of each document that all later ones (in an encoder all) attend to, in the same
    softmax. They are excluded from buckets and window, so each is included once."""


@dataclass
class BandCache(Cache):
    """Keys and values of all tokens so far, and each bucket's last M keys in a ring buffer.

    codes: (B, H, R, capacity), the keys' buckets. rank: likewise, a key's index inside its bucket. last: (B, H, R, N,
    M) tokens; the key of rank k is at index k mod M. size: (B, H, R, N). H is 1 in these if all heads share codes.
    next_key, next_codes: with shifted keys, what the next position stores, (B, H, 1, D) and (B, H, R, 1).
    """

    tokens: KeyValueCache
    codes: Tensor
    rank: Tensor
    last: Tensor
    size: Tensor
    next_key: Tensor | None = None
    next_codes: Tensor | None = None

    @staticmethod
    def empty(
        batch: int, spec: MechanismSpec, rounds: int, buckets: int, chunk: int, like: Tensor, heads: int | None = None
    ) -> "BandCache":
        """Return a cache for `batch` sequences, on the device of `like`. heads: with codes; None for all."""
        shape = (batch, heads or spec.heads, rounds)
        capacity = spec.max_length
        sizes = ((capacity,), (capacity,), (buckets, chunk), (buckets,))
        numbers = (torch.zeros(*shape, *size, dtype=torch.int64, device=like.device) for size in sizes)
        return BandCache(KeyValueCache.empty(batch, spec, capacity, like), *numbers)

    def fill(self, inputs: AttentionInputs, query_codes: Tensor, key_codes: Tensor | None) -> None:
        """Prefill an empty cache with a prompt. See `Codes`."""
        codes = (query_codes if key_codes is None else key_codes).to(torch.int64)
        length = codes.shape[-1]
        chunk = self.last.shape[-1]
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
        # Scatter does not support masks: overwritten tokens write the newest token to its slot.
        token = torch.arange(length, device=codes.device).expand_as(codes)
        newest_slot = slot[..., -1:]
        newest = token[..., -1:]
        self.last.flatten(-2).scatter_(-1, torch.where(recent, slot, newest_slot), torch.where(recent, token, newest))

    def append(self, inputs: AttentionInputs, code: Tensor, position: int) -> None:
        """Append the new token, whose key is in the buckets code (B, H, R, 1)."""
        self.tokens.put(inputs.k, inputs.v, position)
        rank = self.size.gather(-1, code)  # (B, H, R, 1): earlier keys of the bucket
        chunk = self.last.shape[-1]
        self.codes[..., position] = code[..., 0]
        self.rank[..., position] = rank[..., 0]
        slot = code * chunk + rank % chunk
        self.last.flatten(-2).scatter_(-1, slot, torch.full_like(slot, position))
        self.size.scatter_add_(-1, code, torch.ones_like(code))

    def rounds(self, numbers: slice) -> "BandCache":
        """Return the cache of a slice of rounds, as views."""
        return BandCache(self.tokens, *(x[:, :, numbers] for x in (self.codes, self.rank, self.last, self.size)))

    def attend(self, q: Tensor, code: Tensor, rank: Tensor, spec: BucketedAttentionSpec) -> tuple[Tensor, Tensor]:
        """Compute `bucketed_attention` of one query, bit-identical to a full pass, without `self_at_last`.

        q: (B, H, 1, D). code, rank: (B, H or 1, R, 1) int64, its buckets and the last visible rank in each.
        """
        return query_attention(q, self.tokens.k, self.tokens.v, spec, self._blocks(q, code, rank, spec))

    def _blocks(self, q: Tensor, code: Tensor, rank: Tensor, spec: BucketedAttentionSpec) -> Iterator[QueryBlock]:
        """Yield blocks of queries with tiles of equal shape, round by round."""
        codes, ranks, last = (x.flatten(0, 1) for x in (self.codes, self.rank, self.last))
        row = torch.arange(q.shape[0] * q.shape[1], device=q.device)
        shared = row // (len(row) // len(codes))  # row of `codes` for each query
        code, rank = (x.flatten(0, 1).squeeze(-1).index_select(0, shared) for x in (code, rank))  # (B·H, R)
        tiles = RankedTiles.of(spec, self.tokens.k.shape[2])
        chunk = spec.window.chunk
        first = tiles.start(rank)
        kinds = tiles.kind(first)
        for number, of_round in enumerate(kinds.unbind(1)):
            for kind in of_round.unique().tolist():
                index = (of_round == kind).nonzero().squeeze(1)
                source, tile, back = shared[index], *tiles.shape(kind)
                at_rank = rank[index, number, None]
                bucket = code[index, number, None]
                column = first[index, number, None] - back + torch.arange(back + tile, device=q.device)  # ranks of keys
                hidden = (column >= at_rank + (not spec.exclude_self)) | (column <= at_rank - chunk)
                token = last[source[:, None], number, bucket, column % last.shape[-1]]
                for earlier in range(number) if spec.count_rounds else ():
                    same = codes[source[:, None], earlier, token] == code[index, earlier, None]
                    hidden |= same & (ranks[source[:, None], earlier, token] > rank[index, earlier, None] - chunk)
                yield QueryBlock(row[index], token, hidden, self.tokens.k.shape[2], tile, q, number == 0)


class BandAttention(Attention):
    """Hashed attention in a band of each bucket. Decodes from each bucket's last keys."""

    rule: dict[str, Any]
    """The fields scale, exclude_self and count_rounds of `BucketedAttentionSpec`."""

    def __init__(self, config: Any, spec: MechanismSpec):
        super().__init__(config, spec)
        self.window = Window("band", min(config.chunk, spec.max_length))
        self.buckets = -(-spec.max_length // config.chunk)
        self.shares_pairs = getattr(config, "window", "band") != "top_k"
        self.local: bool = getattr(config, "local", False)
        self.sinks: int = getattr(config, "sinks", 0)
        self.shifted_keys: bool = getattr(config, "shifted_keys", False)
        self.rotated = not self.shifted_keys

    def band_flops(self, keys: float, length: int, rounds: int = 1) -> Flops:
        """Return the FLOPs of pairs with this many keys per round, in the window and with sinks."""
        work = self.spec.workload(length)
        return work.pairs(keys) * (rounds + self.local) + work.pairs(self.sinks)

    @abstractmethod
    def band_codes(self, inputs: AttentionInputs, position: int, context: AttentionContext) -> Codes:
        """Return the buckets of a decoder's tokens from `position` on, before `shift`."""

    def shift(
        self, inputs: AttentionInputs, query_codes: Tensor, key_codes: Tensor | None
    ) -> tuple[AttentionInputs, Tensor, Tensor | None]:
        """With shifted keys, give each token the key and the buckets of the previous one: k_j becomes k_{j−1}, in the
        buckets of the query at j − 1. The first key of a document is 0, in bucket 0. Else return the arguments.
        """
        if not self.shifted_keys:
            return inputs, query_codes, key_codes
        first = ~inputs.continues()[:, None]  # (B or 1, 1, L)
        k = F.pad(inputs.k, (0, 0, 1, -1)).masked_fill(first.unsqueeze(-1), 0.0)
        codes = F.pad(query_codes, (1, -1)).masked_fill(first.unsqueeze(-2), 0)
        return inputs._replace(k=k), query_codes, codes

    def attend(
        self, inputs: AttentionInputs, query_codes: Tensor, key_codes: Tensor | None, part: SequencePart = WHOLE
    ) -> AttentionOutput:
        """Attend in the buckets, in the optional window, and to the sinks. See `Codes`."""
        codes = self._seen_codes(query_codes, key_codes)
        if not self.sinks and part.pair_shard is None:
            return AttentionOutput(inputs.in_buckets(codes, self._spec(inputs.causal))[0])
        parts = [self._in_buckets(inputs, *codes, part)]
        if self.sinks:
            parts.append(sink_attention(self.sinks, inputs, part, **self._sink_rule))
        out, lse = merge(parts)
        # A real token without a visible key attends to itself, with a negligible log-sum-exp, because other ranks may
        # have visible keys for it.
        no_visible_key = lse.isneginf()
        if inputs.key_mask is not None:
            no_visible_key = no_visible_key & inputs.key_mask[:, None]
        values = inputs.v.to(out.dtype)
        if (dropout := inputs.dropout) is not None:
            factors = dropout.factors(dropout.queries, dropout.keys(values.shape[2]), values.dtype)
            values = values * factors.unsqueeze(-1)
        if part.pair_shard is not None:
            no_visible_key = no_visible_key & part.owned_tokens(lse.shape[2], lse.device)
        out = torch.where(no_visible_key.unsqueeze(-1), values, out)
        lse = lse.masked_fill(no_visible_key, _LAST)
        return AttentionOutput(out, lse=None if part.pair_shard is None else lse)

    def _in_buckets(
        self, inputs: AttentionInputs, query_codes: Tensor, key_codes: Tensor | None, part: SequencePart
    ) -> tuple[Tensor, Tensor]:
        """Attend in the buckets, without the sinks' keys. A decoder's sinks attend only to sinks, so they are masked as
        padding; an encoder's remain queries.
        """
        without_sinks = inputs
        spec = self._spec(inputs.causal, self_at_last=False, pair_shard=part.pair_shard)
        sink = DocumentRanks.of(inputs).rank < self.sinks if self.sinks else None
        if sink is not None and inputs.causal:
            real = inputs.key_mask
            mask = (~sink if real is None else ~sink & real).expand(len(inputs.q), -1)
            without_sinks = inputs._replace(key_mask=mask)
        elif sink is not None:
            keys = query_codes if key_codes is None else key_codes
            key_codes = keys.int().masked_fill(sink[:, None, None], self.buckets)
            spec = replace(spec, buckets=self.buckets + 1)
        return without_sinks.in_buckets((query_codes, key_codes), spec)

    def _spec(self, causal: bool, **settings: Any) -> BucketedAttentionSpec:
        longest = self.spec.max_length
        return BucketedAttentionSpec(
            self.window, causal, buckets=self.buckets, longest=longest, **self.rule, **settings
        )

    @property
    def _sink_rule(self) -> dict[str, Any]:
        return {name: self.rule[name] for name in ("scale", "exclude_self")}

    def _seen_codes(self, query_codes: Tensor, key_codes: Tensor | None) -> Codes:
        if not self.local:
            return query_codes, key_codes
        window = (0, 0, 1, 0)  # a round before the others, with one bucket
        return F.pad(query_codes, window), None if key_codes is None else F.pad(key_codes, window)

    def index(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> IndexedTokens:
        if self.shared_qk:
            return IndexedTokens(inputs, context)
        queries, keys = self.band_codes(inputs, 0, context)
        codes = (queries if keys is None else keys).permute(0, 3, 1, 2).flatten(2)  # (B, n, H·R)
        dtype = torch.int16 if self.buckets < 1 << 15 else torch.int32
        return IndexedTokens(inputs, context, codes.to(dtype), queries)

    def choose(self, newest: IndexedTokens, index: Tensor | None, tokens: CachedTokens) -> tuple[Tensor, ...] | None:
        """Return the last M keys of each query's buckets with the window, and the sinks, each key once."""
        queries = newest.queries
        if queries is None or index is None:
            return None
        batch, heads, rounds, count = queries.shape
        codes = index.unflatten(2, (heads, rounds)).permute(0, 2, 3, 1)  # (B, H, R, L)
        chunk = min(self.window.chunk, codes.shape[-1])
        length = codes.shape[-1]
        visible, start, near, first_tokens = tokens.once(
            (self.sinks, self.local, self.window.chunk), lambda: self._always(tokens)
        )
        position = torch.arange(length, device=codes.device)
        if count == 1:
            match = torch.eq(codes, queries, out=codes.new_empty(codes.shape, dtype=torch.bool))
            if codes.device.type == "cpu":
                index = _newest(match.logical_and_(visible >= 0), chunk)
            else:
                index = torch.where(match, visible, -1).topk(chunk, dim=-1).values
            index = index.unsqueeze(3)  # (B, H, R, 1, M)
        else:  # sort all keys by (row, bucket, position); a query's keys precede its own position in that order
            first = torch.arange(batch * heads * rounds, device=codes.device).view(batch, heads, rounds, 1)
            first = first * (self.buckets + 1)
            codes = codes.masked_fill(visible < 0, self.buckets)
            key = ((first + codes) * length + position).flatten().sort()[0]
            last = (first + queries) * length + position[length - count :]  # (B, H, R, n)
            slot = torch.searchsorted(key, last, right=True).unsqueeze(-1) - 1 - torch.arange(chunk, device=key.device)
            key = key[slot.clamp_min(0)]
            match = (slot >= 0) & (key >= (last - position[length - count :]).unsqueeze(-1))
            index = torch.where(match, key % length, -1)
        index = index.transpose(2, 3).flatten(3)  # (B, H, n, R·M)
        if self.local and self.rule["count_rounds"]:
            index = index.masked_fill(index >= start, -1)
        if rounds > 1 and self.rule["count_rounds"]:
            index = index.sort(dim=-1).values
            index[..., 1:] = index[..., 1:].masked_fill(index[..., 1:] == index[..., :-1], -1)
        if self.local:
            index = torch.cat([index, near.expand(*index.shape[:2], -1, -1)], dim=-1)
        else:  # a query without a visible key attends to itself
            no_visible_key = (index < 0).all(-1) & (first_tokens < 0).all(-1)
            index[..., 0] = torch.where(no_visible_key, position[length - count :], index[..., 0])
        return (index, first_tokens) if self.sinks else (index,)

    def _always(self, tokens: CachedTokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the tokens that buckets may contain, −1 for others, (B or 1, 1, 1, L) int32; the first token in each
        query's window, (B or 1, 1, n, 1); and the tokens of the window and the sinks, (B or 1, 1, n, m) int32.
        """
        rank = tokens.rank[:, -tokens.number :, None]
        hidden = tokens.rank < self.sinks
        if tokens.real is not None:
            hidden = hidden | ~tokens.real
        visible = torch.arange(hidden.shape[1], dtype=torch.int32, device=rank.device).masked_fill(hidden, -1)
        sinks = torch.arange(self.sinks, device=rank.device)
        window = rank - torch.arange(self.window.chunk, device=rank.device)
        near, first = window.masked_fill(window < self.sinks, -1), sinks.masked_fill(sinks > rank, -1)
        start = tokens.at((rank - self.window.chunk + 1).clamp_min(0))
        near, first = (tokens.at(x)[:, None].to(torch.int32) for x in (near, first))
        return visible[:, None, None], start[:, None], near, first

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> BandCache:
        rounds = self.local + self.cached_rounds(rounds)
        buckets = self.buckets + (self.sinks > 0)
        return BandCache.empty(batch, self.spec.on_rank(part), rounds, buckets, self.window.chunk, like)

    def cached_rounds(self, rounds: int | None) -> int:
        """Return the number of hash rounds in a cache. rounds: replaces the configured number."""
        return 1

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: BandCache, context: AttentionContext) -> None:
        queries, keys = self.band_codes(inputs, 0, context)
        shifted, _, keys = self.shift(inputs, queries, keys)
        cache.fill(shifted, *self._cached_codes(0, queries, keys))
        if self.shifted_keys:
            cache.next_key = inputs.k[:, :, -1:].clone()
            cache.next_codes = queries[..., -1:].clone()

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: BandCache, position: int, context: AttentionContext
    ) -> Tensor:
        if self.leak is not None:
            problem = f"{type(self).__name__} cannot decode token by token: {self.leak}"
            raise ConfigError("model.attention.pattern", problem, "Train with the strictly causal setting")
        queries, keys = self.band_codes(inputs, position, context)
        shifted, _, keys = self.shift(inputs, queries, keys)
        if self.shifted_keys:
            if cache.next_key is not None:
                shifted = inputs._replace(k=cache.next_key)
                keys = cache.next_codes
            cache.next_key = inputs.k
            cache.next_codes = queries
        queries, keys = self._cached_codes(position, queries, keys)
        queries = queries.long()
        cache.append(shifted, queries if keys is None else keys.long(), position)
        spec = self._spec(True, self_at_last=False)
        parts = [cache.attend(inputs.q, queries, cache.size.gather(-1, queries) - 1, spec)]
        if self.sinks:
            k = cache.tokens.k
            v = cache.tokens.v
            parts.append(cached_sinks(range(self.sinks), inputs.q, k, v, position, **self._sink_rule))
        out, lse = merge(parts) if self.sinks else parts[0]
        return torch.where(lse.isneginf().unsqueeze(-1), inputs.v.to(out.dtype), out)

    def _cached_codes(self, position: int, query_codes: Tensor, key_codes: Tensor | None) -> Codes:
        """Return codes in which the sinks' keys are in a bucket without queries."""
        queries, keys = self._seen_codes(query_codes, key_codes)
        if position < self.sinks:
            keys = (queries if keys is None else keys).to(torch.int64, copy=True)
            keys[..., : self.sinks - position] = self.buckets
        return queries, keys


def _newest(match: Tensor, count: int) -> Tensor:
    """Return the last `count` positions of a mask (..., L) on a CPU, newest first, −1 in empty slots."""
    rows = np.arange(0, match.numel(), match.shape[-1])[:, None]
    chosen = np.append(-1, np.flatnonzero(match.numpy()))
    slot = chosen.searchsorted(rows + match.shape[-1]) - 1 - np.arange(count)
    newest = np.maximum(chosen[np.maximum(slot, 0)] - rows, -1)
    return torch.from_numpy(newest).view(*match.shape[:-1], count)


def check_band(key: str, window: str, local: bool, sinks: int) -> None:
    """Raise ConfigError if a window or sinks are set without a band. key: of the mechanism's section."""
    for name, value, none in (("local", local, False), ("sinks", sinks, 0)):
        if value and window != "band":
            problem = f'{json.dumps(value)} needs a band, but window = "{window}"'
            raise ConfigError(f"{key}.{name}", problem, f'Set it to {json.dumps(none)}, or window to "band"')


def check_shifted_keys(key: str, settings: Any, model: ModelConfig, **needed: Any) -> None:
    """Raise ConfigError if `settings.shifted_keys` lacks a band or a setting that it needs, or removes rotary positions
    from heads of another mechanism. key: of the mechanism's section.
    """
    if not settings.shifted_keys:
        return
    name = f"{key}.shifted_keys"
    for other, value in {**needed, "window": "band"}.items():
        if (given := getattr(settings, other)) != value:
            raise ConfigError(name, f"true is given, but {other} = {show(given)}", f"Set {other} to {show(value)}")
    kind = key.rpartition(".")[2]
    for layer in range(model.layers if model.positions.kind == "rotary" else 0):
        if kind in (split := heads_of_layer(model, layer)) and len(split) > 1:
            problem = f"true removes rotary positions from all heads of layer {layer}: {split}"
            raise ConfigError(name, problem, f"Set it to false, or give {kind} all heads of its layers")
