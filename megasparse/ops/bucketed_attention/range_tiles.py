"""Tiles of bands where queries and keys have buckets of their own: T sorted queries and the run of keys that they see.

In a round, queries stand in the order of the ends of their ranges of sorted keys (ranges.py). A tile's queries then see
one run of keys. It is at most as long as the band and what the ends moved by, and all runs of a round together are at
most L + W·⌈L / T⌉ keys, whatever the buckets. Runs differ in length: a block has tiles of about one length, the longest
first, and shorter ones see places after their run as hidden. Hidden pairs are those of chunks.py.

B batch, H heads, R rounds, L length, D head dim, W keys a band, G rows at a time, n tiles in a block, T queries a tile,
S keys a tile.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.chunks import EXACT, HIDDEN, SCORE_ELEMENTS, Gathered, Rows, Tiling
from megasparse.ops.bucketed_attention.ranges import key_range
from megasparse.ops.bucketed_attention.specification import BucketedAttentionSpec
from megasparse.ops.random import PairDropout


class RangeLayout(NamedTuple):
    """Every query's range of sorted keys, (B, H, R, L) int32, or (B, 1, R, L) where all heads have the same codes.
    order: the key at each sorted place. place: its inverse. low, high: a query sees the places [low, high).
    """

    order: Tensor
    place: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(
        cls, query_codes: Tensor, key_codes: Tensor, spec: BucketedAttentionSpec, key_mask: Tensor | None,
        segments: Tensor | None,
    ) -> "RangeLayout":  # fmt: skip
        """codes: (B, H, R, L) or (B, 1, R, L), any integer type."""
        parts = [torch.empty(query_codes.shape, dtype=torch.int32, device=query_codes.device) for _ in range(4)]
        for r in range(query_codes.shape[2]):
            codes = query_codes[:, :, r], key_codes[:, :, r]
            found = key_range(*codes, spec.window.chunk, spec.causal, key_mask, segments)
            for part, one in zip(parts, found, strict=True):
                part[:, :, r] = one
        return cls(*parts)

    def groups(
        self, q: Tensor, k: Tensor, v: Tensor, spec: BucketedAttentionSpec, dropout: PairDropout | None
    ) -> Iterator[Rows]:
        """Groups of whole rows, see `Rows.groups`."""
        pairs = q.shape[2] * (Tiling(spec).tile + spec.window.chunk)
        return Rows.groups(self, pairs, q, k, v, spec, dropout)

    def round(self, rows: Rows, number: int) -> "RangeRound":
        return RangeRound(rows, number)


class RangeRound:
    """One round of a group of rows. Tokens are numbered over the rows of the group."""

    def __init__(self, rows: Rows, number: int):
        self.rows, self.tiling, self.number = rows, rows.tiling, number
        order, low, high = (x[:, number] for x in (rows.layout.order, rows.layout.low, rows.layout.high))
        group, self.length = order.shape
        self.dtype = rows.dtype if self.length < EXACT else torch.float64
        tile, places, device = self.tiling.tile, self.tiling.spec.places(self.length), order.device
        own = slice(places.start, places.stop)
        query = places.start + high[:, own].argsort(dim=-1, stable=True)  # (G, N)
        tiles = -(-query.shape[1] // tile)
        place = torch.arange(tiles * tile, device=device)
        self.real = None if len(place) == query.shape[1] else (place < query.shape[1]).expand(group, -1)
        query = query.index_select(1, place.clamp_max_(query.shape[1] - 1))
        first, end = low.gather(1, query), high.gather(1, query)
        self.first, self.end = first.view(-1, tile).amin(1), end.view(-1, tile).amax(1)  # of each tile's run of keys
        self.order = order
        self.row = torch.arange(group, device=device).repeat_interleave(tiles)  # of each tile
        self.queries = query.view(-1, tile) + self.row[:, None] * self.length  # (tiles, T)
        if self.real is not None:
            self.real = self.real.reshape(-1, tile)
        asked = range(0 if self.tiling.spec.count_rounds else number, number + 1)
        rounds = [tuple(x[:, r].flatten().to(self.dtype) for x in rows.layout[1:]) for r in asked]
        self.earlier, (_, self.low, self.high) = rounds[:-1], rounds[-1]

    def blocks(self) -> Iterator["RangeBlock"]:
        runs, tiles = (self.end - self.first).sort(descending=True, stable=True)
        lengths, start = runs.tolist(), 0
        while start < len(lengths) and lengths[start] > 0:
            step = max(1, SCORE_ELEMENTS // (self.tiling.tile * lengths[start]))
            yield RangeBlock(self, tiles[start : start + step], lengths[start])
            start += step


class RangeBlock(Gathered):
    """Some tiles of a round, `run` keys each. It has what `chunks.Block` has."""

    def __init__(self, round_: RangeRound, tiles: Tensor, run: int):
        self.round, self.tiling = round_, round_.tiling
        self.query_tokens = round_.queries[tiles]  # (n, T)
        self.real = None if round_.real is None else round_.real[tiles]
        place = round_.first[tiles, None] + torch.arange(run, device=tiles.device)  # (n, S)
        row = round_.row[tiles, None] * round_.length
        own = torch.minimum(place, round_.end[tiles, None] - 1)  # a place after a tile's run repeats its last key
        self.key_tokens = row + round_.order.flatten()[row + own]
        self.place = place.to(round_.dtype)

    def queries(self, x: Tensor) -> Tensor:
        """Each tile's queries of x (G, L, ...): (n, T, ...)."""
        return self._take(x, self.query_tokens)

    def keys(self, x: Tensor) -> Tensor:
        """Each tile's keys of x (G, L, D): (n, S, D)."""
        return self._take(x, self.key_tokens)

    def add_to_keys(self, x: Tensor, weight: Tensor, values: Tensor) -> None:
        """Adds weightᵀ·values, of weight (n, T, S) and values (n, T, D), to the keys of x (G, L, D)."""
        if self.real is not None:
            weight = weight * self.real.unsqueeze(-1)
        x.flatten(0, 1).index_add_(
            0, self.key_tokens.flatten(), torch.bmm(weight.transpose(1, 2), values).flatten(0, 1)
        )

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return q·k where visible in this round and in none before it, far below LOWEST elsewhere: (n, T, S).

        q, k: what `queries` and `keys` give, scaled.
        """
        return self._hidden().to(q.dtype).baddbmm_(q, k.transpose(1, 2), beta=-HIDDEN)

    def factors(self, dropout: PairDropout) -> Tensor:
        """The factors of probabilities that dropout gives the pairs of `scores`, (n, T, S)."""
        length = self.round.length
        queries = dropout.queries.flatten()[self.query_tokens].unsqueeze(-1)
        keys = dropout.keys(length)[self.key_tokens % length]
        return dropout.factors(queries, keys.unsqueeze(1), self.round.rows.dtype)

    def _hidden(self) -> Tensor:
        """The number of reasons that hide a key from a query, (n, T, S)."""
        round_, place = self.round, self.place.unsqueeze(1)
        hidden, above, below = (place.new_empty(*self.query_tokens.shape, place.shape[2]) for _ in range(3))
        torch.lt(place, self._bound(round_.low), out=hidden)
        hidden += torch.ge(place, self._bound(round_.high), out=above)
        if self.tiling.spec.exclude_self:
            hidden += torch.eq(self.key_tokens.unsqueeze(1), self.query_tokens.unsqueeze(2), out=above)
        for there, low, high in round_.earlier:
            place = there[self.key_tokens].unsqueeze(1)
            hidden.addcmul_(torch.ge(place, self._bound(low), out=above), torch.lt(place, self._bound(high), out=below))
        return hidden

    def _bound(self, x: Tensor) -> Tensor:
        return x[self.query_tokens].unsqueeze(-1)

    def _real(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (N) and their values (N, ...), each query once: a row's last tile repeats its last query."""
        if self.real is None:
            return self.query_tokens.flatten(), part.flatten(0, 1)
        return self.query_tokens[self.real], part[self.real]
