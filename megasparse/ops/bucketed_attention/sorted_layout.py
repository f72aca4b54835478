"""The layout of bucketed attention in which queries and keys share codes and one order; names as in `layouts`."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.layouts import (
    EXACT,
    SCORE_ELEMENTS,
    RowGroup,
    TileBlock,
    row_pieces,
    sort_keys,
    tile_size,
)
from megasparse.ops.bucketed_attention.spec import BucketedAttentionSpec, Window


class SortedLayout(NamedTuple):
    """Each round's order of the tokens, and their slots: (B, H, R, L) int32; (B, 1, 1, L) without codes.

    Visibility in a round is one integer comparison: j is visible to i if 0 <= slot_i − slot_j < width, or in a
    two-sided window |slot_i − slot_j| < width:

        band   slot = sorted index + M·(rank of the bucket), width M: the last M tokens in i's bucket, including i;
               two-sided: also the next M − 1
        chunk  slot = ⌊sorted index / M⌋ + 2·(rank of the bucket), width 2: i's chunk of M sorted tokens and the
               previous chunk; two-sided: also the next chunk

    The gap separates buckets, or without the same-bucket mask only segments and padding, which is sorted last.
    """

    order: Tensor
    slot: Tensor

    @classmethod
    def of(
        cls, q: Tensor, codes: Tensor | None, window: Window, key_mask: Tensor | None, segments: Tensor | None
    ) -> "SortedLayout":
        """Sort the tokens of q (B, H, L, D) by codes (B, H, R, L), or (B, 1, R, L); None: one bucket and round."""
        if codes is None:
            codes = q.new_zeros((q.shape[0], 1, 1, q.shape[2]), dtype=torch.int16)
        order, slot = (q.new_empty(codes.shape, dtype=torch.int32) for _ in range(2))
        for piece, masks in row_pieces(codes, key_mask, segments):
            order[piece], slot[piece] = _slots(codes[piece], window, *masks)
        return cls(order, slot)

    def pairs(self, spec: BucketedAttentionSpec, length: int) -> int:
        """Return the number of query-key pairs in a row's tiles."""
        tile, back, ahead = _reach(spec)
        return max(1, len(_attending(spec, length))) * (back + 1 + ahead) * tile**2

    def blocks(self, rows: RowGroup) -> "Iterator[TileBlock]":
        """Yield all tiles that attend, round by round. rows: the group with this layout."""
        group, rounds, length = self.order.shape
        tiles = _attending(rows.spec, length)
        for number in range(rounds):
            round_ = SortedRound(rows, number)
            step = max(1, SCORE_ELEMENTS // (group * round_.span * round_.tile**2))
            for start in tiles[::step]:
                yield SortedBlock(round_, start, min(start + step, tiles.stop))


def _slots(codes: Tensor, window: Window, key_mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the order, int64, and the slots by token, int32: (B, H, R, L) each."""
    group, order = torch.sort(sort_keys(codes, key_mask, segments), dim=-1, stable=True)
    group = group if window.same_bucket else group >> 32
    rank = torch.zeros_like(order)
    rank[..., 1:] = (group[..., 1:] != group[..., :-1]).cumsum(dim=-1)
    index = torch.arange(codes.shape[-1], device=codes.device)
    sorted_slot = index + window.chunk * rank if window.kind == "band" else index // window.chunk + 2 * rank
    return order, torch.empty_like(order).scatter_(-1, order, sorted_slot).to(torch.int32)


def _reach(spec: BucketedAttentionSpec) -> tuple[int, int, int]:
    """Return T, and the number of key tiles before and after a query tile."""
    window = spec.window
    tile = tile_size(spec.window)
    back = 1 if window.kind == "chunk" else -(-(window.chunk - 1) // tile)
    return tile, back, back if window.two_sided(spec.causal) else 0


def _attending(spec: BucketedAttentionSpec, length: int) -> range:
    """Return the tiles whose queries attend."""
    places = spec.places(length)
    tile = tile_size(spec.window)
    return range(places.start // tile, -(-places.stop // tile))


class SortedRound:
    """One round of a group of rows in sorted order, with empty slots around it.

    token: (G, P). window, earlier: of this round, and of earlier rounds that hide its pairs, see `_ranges`: low < slot
    <= high is visible. order_hides: (T, K), 1 for keys that the sorted order hides from a query of the tile; or None.
    position: of each tile's keys and queries if a causal window mixes buckets; else None.
    """

    def __init__(self, rows: RowGroup, number: int):
        spec = rows.spec
        device = rows.layout.order.device
        self.spec = spec
        self.rows_dtype = rows.dtype
        self.first = number == 0
        self.tile, back, ahead = _reach(spec)
        self.span = back + 1 + ahead  # S
        self.lead = back * self.tile  # empty slots before a row's first
        group, _, self.length = rows.layout.order.shape
        self.tiles = -(-self.length // self.tile)
        # An empty slot repeats a token of the same row, so that non-finite numbers stay in their row.
        sorted_index = torch.arange(-self.lead, self.tile * (self.tiles + ahead), device=device)
        index = rows.layout.order[:, number].index_select(1, sorted_index.clamp_(0, self.length - 1)).long()  # (G, P)
        self.token = index + torch.arange(group, device=device)[:, None] * self.length
        slot: Tensor = rows.layout.slot
        dtype = rows.dtype if max(int(slot.amax()), self.length) < EXACT else torch.float64
        slots = [slot[:, r].gather(1, index).to(dtype) for r in range(0 if spec.count_rounds else number, number + 1)]
        width = spec.window.width
        after = width - 1 if spec.window.two_sided(spec.causal) else 0
        self.earlier = [self._ranges(x, x - width, x + after) for x in slots[:-1]]
        # In this round empty slots are hidden as queries and keys, and queries of other shares do not attend.
        slot_of_round = slots[-1]
        low = slots[-1] - width
        high = slots[-1] + after
        places = spec.places(self.length)
        low[:, : self.lead + places.start] = low[:, self.lead + places.stop :] = torch.inf
        slot_of_round[:, : self.lead] = slot_of_round[:, self.lead + self.length :] = -torch.inf
        self.window = self._ranges(slot_of_round, low, high)
        # A bucket's tokens are sorted by position, so the visible keys of a causal query precede it.
        self.in_order = spec.causal and spec.window.same_bucket
        query = torch.arange(self.tile, device=device)[:, None]
        key = torch.arange(-self.lead, (1 + ahead) * self.tile, device=device)
        self.order_hides: Tensor | None = None
        if self.in_order:
            self.order_hides = (key >= query if spec.exclude_self else key > query).to(dtype)
        elif spec.exclude_self:
            self.order_hides = (key == query).to(dtype)
        mixes = spec.causal and not spec.window.same_bucket
        position = index.to(dtype)
        self.position = self._ranges(position, position, position)[:2] if mixes else None

    def _ranges(self, keys: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each tile's keys (G, tiles, 1, K), and low and high of its queries (G, tiles, T, 1), as views."""
        of_queries = slice(self.lead, self.lead + self.tiles * self.tile)
        low, high = (x[:, of_queries].unflatten(1, (self.tiles, self.tile)).unsqueeze(3) for x in (low, high))
        return keys.unfold(1, self.span * self.tile, self.tile).unsqueeze(2), low, high


class SortedBlock(TileBlock):
    """Neighbouring tiles of a round, at the same indices in all rows."""

    def __init__(self, round_: SortedRound, start: int, stop: int):
        self.round = round_
        self.first_round = round_.first
        self.length = round_.length
        self.dtype = round_.rows_dtype
        self.tile = round_.tile
        self.span = round_.span
        self.tiles = slice(start, stop)
        self.width = stop - start
        lead = round_.lead
        self.query_tokens = round_.token[:, lead + start * self.tile : lead + stop * self.tile]  # (G, n/G·T)
        self.key_tokens = round_.token[:, start * self.tile : (stop + self.span - 1) * self.tile]
        self.places = min(stop * self.tile, self.length) - start * self.tile  # the last tile's other slots are empty

    def query_tiles(self, x: Tensor) -> Tensor:
        return x.view(-1, self.tile, *x.shape[2:])

    def key_tiles(self, x: Tensor) -> Tensor:
        tiles = x.unfold(1, self.span * self.tile, self.tile)  # overlapping views for a single row
        return (tiles.transpose(2, 3) if x.dim() == 3 else tiles).flatten(0, 1)

    def real_queries(self, values: Tensor) -> tuple[Tensor, Tensor]:
        by_row = values.view(*self.query_tokens.shape, *values.shape[2:])
        return self.query_tokens[:, : self.places].flatten(), by_row[:, : self.places].flatten(0, 1)

    def add_to_keys(self, x: Tensor, weight: Tensor, values: Tensor) -> None:
        group = len(self.key_tokens)
        total = values.new_zeros(group, self.width + self.span - 1, self.tile, values.shape[-1])
        for i, part in enumerate(weight.split(self.tile, dim=2)):  # a key is in S tiles
            target = total[:, i : i + self.width]
            if group == 1:
                target[0].baddbmm_(part.transpose(1, 2), values)
            else:
                target += torch.bmm(part.transpose(1, 2), values).view_as(target)
        x.flatten(0, 1).index_add_(0, self.key_tokens.flatten(), total.flatten(0, 2))

    def hidden(self) -> Tensor:
        round_ = self.round
        slot, low, high = (x[:, self.tiles] for x in round_.window)
        hidden, above, below = (slot.new_empty(*low.shape[:3], slot.shape[3]) for _ in range(3))
        torch.le(slot, low, out=hidden)
        if not round_.in_order:
            hidden += torch.gt(slot, high, out=above)
        if round_.order_hides is not None:
            hidden += round_.order_hides
        if round_.position is not None:
            key, query = (x[:, self.tiles] for x in round_.position)
            hidden += (torch.ge if round_.spec.exclude_self else torch.gt)(key, query, out=above)
        for ranges in round_.earlier:
            slot, low, high = (x[:, self.tiles] for x in ranges)
            hidden.addcmul_(torch.gt(slot, low, out=above), torch.le(slot, high, out=below))
        return hidden.flatten(0, 1)
