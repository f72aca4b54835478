"""Rows in sorted order as tiles: T queries and the S·T sorted keys around them, in blocks whose scores stay in cache.

A row is one batch element's head. A block gathers its own tokens from q, k and v, so no sorted copy of a row exists,
and windows of keys are overlapping views of what was gathered. Scores are in units of log2 e, as exp2 is several times
faster than exp. Visibility is arithmetic on floats, as comparisons to bool and masked_fill_ run one element at a time:
a pair that must not be seen has a multiple of 2^100 taken off its score, by the product that makes the score.

B batch, H heads, R rounds, L length, D head dim, M the window's chunk, G rows at a time, n tiles a row, W of them in a
block, T queries a tile, S·T keys a tile, P places: sorted indices with S − 1 tiles of empty ones around them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.layout import lay_out
from megasparse.ops.bucketed_attention.specification import BucketedAttentionSpec, Window
from megasparse.ops.random import PairDropout

SCORE_ELEMENTS = 1 << 18  # scores in a block: 1 MB of fp32
_LAYOUT_ELEMENTS = 1 << 21  # tokens sorted at a time
EXACT = 1 << 24  # fp32 knows every integer up to here
HIDDEN = 2.0**100  # far above any score, and its multiples are finite
LOWEST = -(2.0**90)  # below any score and far above hidden ones: the highest score where nothing is visible


@dataclass(frozen=True)
class Tiling:
    """Sizes of the tiles for a specification, and which keys of a tile their order alone hides."""

    spec: BucketedAttentionSpec

    @property
    def tile(self) -> int:
        """T. Narrow tiles meet fewer keys in vain, (S·T − M) a query; below 32 the products themselves slow down."""
        window = self.spec.window
        return window.chunk if window.kind == "chunk" else min(window.chunk, 32 if window.chunk <= 64 else 64)

    def tiles(self, length: int) -> range:
        """The tiles whose queries attend."""
        places = self.spec.places(length)
        return range(places.start // self.tile, -(-places.stop // self.tile))

    @property
    def back(self) -> int:
        """Tiles of keys before a tile's own."""
        window = self.spec.window
        return 1 if window.kind == "chunk" else -(-(window.chunk - 1) // self.tile)

    @property
    def ahead(self) -> int:
        return self.back if self.two_sided else 0

    @property
    def span(self) -> int:
        """S."""
        return self.back + 1 + self.ahead

    @property
    def two_sided(self) -> bool:
        return self.spec.window.two_sided(self.spec.causal)

    @property
    def lead(self) -> int:
        """Empty places before a row's first."""
        return self.back * self.tile

    @property
    def in_order(self) -> bool:
        """Whether all that a query may see is sorted before it: a bucket's tokens are in the order of positions."""
        return self.spec.causal and self.spec.window.same_bucket

    def hides(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """(T, S·T): 1 where the order of places alone hides a tile's key from its query, else 0."""
        query = torch.arange(self.tile, device=device)[:, None]
        key = torch.arange(-self.lead, (1 + self.ahead) * self.tile, device=device)
        if self.in_order:
            return (key >= query if self.spec.exclude_self else key > query).to(dtype)
        return (key == query).to(dtype) if self.spec.exclude_self else None


@dataclass
class Rows:
    """A group of G rows with their layout. `place`: which rows. q, k, v: (G, L, D). layout: its tensors (G, R, L).
    dropout: of the probabilities, its queries those of the group, (G, L).
    """

    place: slice
    q: Tensor
    k: Tensor
    v: Tensor
    layout: Any
    tiling: Tiling
    dtype: torch.dtype
    dropout: PairDropout | None = None

    @classmethod
    def groups(
        cls, layout: Any, pairs: int, q: Tensor, k: Tensor, v: Tensor, spec: BucketedAttentionSpec,
        dropout: PairDropout | None,
    ) -> Iterator["Rows"]:  # fmt: skip
        """Groups of whole rows that fit into a block, or single rows. layout: tensors (B, H, R, L), 1 for B or H where
        all have the same. pairs: of a row's tiles.
        """
        batch, heads = q.shape[:2]
        layouts = [x.expand(-1, heads, -1, -1) for x in layout]
        dtype = torch.promote_types(q.dtype, torch.float32)
        step = max(1, SCORE_ELEMENTS // pairs)
        for start in range(0, batch * heads, step):
            place = slice(start, min(start + step, batch * heads))
            q_rows, k_rows, v_rows, *parts = (take_rows(x, place) for x in (q, k, v, *layouts))
            own = None if dropout is None else replace(dropout, queries=take_rows(dropout.queries, place))
            yield cls(place, q_rows, k_rows, v_rows, type(layout)(*parts), Tiling(spec), dtype, own)

    def blocks(self) -> Iterator[Any]:
        """All tiles that attend and see a key, of all rounds, round after round."""
        for number in range(self.layout.order.shape[1]):
            yield from self.layout.round(self, number).blocks()


class Round:
    """One round of a group of rows in sorted order, with empty places around it."""

    def __init__(self, rows: Rows, number: int):
        self.rows, self.tiling, self.number = rows, rows.tiling, number
        group, _, self.length = rows.layout.order.shape
        self.tiles = -(-self.length // self.tiling.tile)
        lead, device = self.tiling.lead, rows.layout.order.device
        # An empty place repeats a token of its own row, so that what is not finite stays in its row.
        place = torch.arange(-lead, self.tiling.tile * (self.tiles + self.tiling.ahead), device=device)
        index = rows.layout.order[:, number].index_select(1, place.clamp_(0, self.length - 1)).long()  # (G, P)
        self.token = index + torch.arange(group, device=device)[:, None] * self.length
        largest = max(int(rows.layout.slot.amax()), self.length)
        dtype = rows.dtype if largest < EXACT else torch.float64
        first = 0 if self.tiling.spec.count_rounds else number
        slots = [rows.layout.slot[:, r].gather(1, index).to(dtype) for r in range(first, number + 1)]  # (G, P)
        self.earlier = [self._range(slot) for slot in slots[:-1]]
        self.own = self._range(slots[-1], with_empty=False)
        self.hides = self.tiling.hides(dtype, device)
        # A causal window that mixes buckets is not in the order of positions.
        mixes = self.tiling.spec.causal and not self.tiling.spec.window.same_bucket
        self.position = self._tiles(index.to(dtype)) if mixes else None

    def _range(self, slot: Tensor, with_empty: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Slots of each tile's keys (G, n, 1, S·T), and low and high of its queries (G, n, T, 1), which see the slots
        low < slot <= high. slot: (G, P). Not with_empty: empty places neither see nor are seen, and the queries of
        other shares do not see.
        """
        width, first, end = self.tiling.spec.window.width, self.tiling.lead, self.tiling.lead + self.length
        low, high = slot - width, slot + (width - 1 if self.tiling.two_sided else 0)
        if not with_empty:
            places = self.tiling.spec.places(self.length)
            low[:, : first + places.start] = torch.inf
            low[:, first + places.stop :] = torch.inf
            slot[:, :first] = -torch.inf
            slot[:, end:] = -torch.inf
        keys, _ = self._tiles(slot)
        return keys, self._tiles(low)[1], self._tiles(high)[1]

    def _tiles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each tile's keys (G, n, 1, S·T) and queries (G, n, T, 1) of x (G, P), as views."""
        tile, lead = self.tiling.tile, self.tiling.lead
        queries = x[:, lead : lead + self.tiles * tile].unflatten(1, (self.tiles, tile))
        return x.unfold(1, self.tiling.span * tile, tile).unsqueeze(2), queries.unsqueeze(3)

    def blocks(self) -> Iterator["Block"]:
        step = max(1, SCORE_ELEMENTS // (self.token.shape[0] * self.tiling.span * self.tiling.tile**2))
        tiles = self.tiling.tiles(self.length)
        for start in tiles[::step]:
            yield Block(self, start, min(start + step, tiles.stop))


class Gathered(ABC):
    """Tiles of a round and the tokens that they gather, numbered over the rows of their group."""

    round: Any
    query_tokens: Tensor
    key_tokens: Tensor

    @property
    def first_round(self) -> bool:
        return bool(self.round.number == 0)

    def put_queries(self, x: Tensor, part: Tensor) -> None:
        """Sets the queries of x (G, L, ...) to part, a tile of them in each of its first dimension."""
        x.flatten(0, 1).index_copy_(0, *self._real(part))

    def add_to_queries(self, x: Tensor, part: Tensor) -> None:
        x.flatten(0, 1).index_add_(0, *self._real(part))

    def _take(self, x: Tensor, tokens: Tensor) -> Tensor:
        taken = x.flatten(0, 1).index_select(0, tokens.flatten())
        return taken.to(self.round.rows.dtype).view(*tokens.shape, *x.shape[2:])

    @abstractmethod
    def _real(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (N) of the queries and their values (N, ...), each query once."""


class Block(Gathered):
    """W tiles of a round, the same ones of all its rows."""

    def __init__(self, round_: Round, start: int, stop: int):
        self.round, self.tiling, self.tiles, self.width = round_, round_.tiling, slice(start, stop), stop - start
        tile, lead = self.tiling.tile, self.tiling.lead
        self.query_tokens = round_.token[:, lead + start * tile : lead + stop * tile]  # (G, W·T)
        self.key_tokens = round_.token[:, start * tile : (stop + self.tiling.span - 1) * tile]  # (G, (W + S − 1)·T)
        self.real = min(stop * tile, round_.length) - start * tile  # the last tile's other places are empty

    def queries(self, x: Tensor) -> Tensor:
        """Each tile's queries of x (G, L, ...): (G·W, T, ...)."""
        return self._take(x, self.query_tokens).view(-1, self.tiling.tile, *x.shape[2:])

    def keys(self, x: Tensor) -> Tensor:
        """Each tile's keys of x (G, L, D): (G·W, S·T, D), overlapping views where there is a single row."""
        taken = self._take(x, self.key_tokens)
        return taken.unfold(1, self.tiling.span * self.tiling.tile, self.tiling.tile).transpose(2, 3).flatten(0, 1)

    def add_to_keys(self, x: Tensor, weight: Tensor, values: Tensor) -> None:
        """Adds weightᵀ·values, of weight (G·W, T, S·T) and values (G·W, T, D), to the keys of x (G, L, D)."""
        group, tile, span = len(self.key_tokens), self.tiling.tile, self.tiling.span
        total = values.new_zeros(group, self.width + span - 1, tile, values.shape[-1])
        for i, part in enumerate(weight.split(tile, dim=2)):  # a key is in S tiles
            here = total[:, i : i + self.width]
            if group == 1:
                here[0].baddbmm_(part.transpose(1, 2), values)
            else:
                here += torch.bmm(part.transpose(1, 2), values).view_as(here)
        x.flatten(0, 1).index_add_(0, self.key_tokens.flatten(), total.flatten(0, 2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return q·k where visible in this round and in none before it, far below LOWEST elsewhere: (G·W, T, S·T).

        q, k: what `queries` and `keys` give, scaled.
        """
        hidden = self._hidden().flatten(0, 1).to(q.dtype)
        return hidden.baddbmm_(q, k.transpose(1, 2), beta=-HIDDEN)

    def factors(self, dropout: PairDropout) -> Tensor:
        """The factors of probabilities that dropout gives the pairs of `scores`, (G·W, T, S·T)."""
        length, tile = self.round.length, self.tiling.tile
        queries = dropout.queries.flatten()[self.query_tokens].view(-1, tile, 1)
        keys = dropout.keys(length)[self.key_tokens % length].unfold(1, self.tiling.span * tile, tile)
        return dropout.factors(queries, keys.flatten(0, 1).unsqueeze(1), self.round.rows.dtype)

    def _hidden(self) -> Tensor:
        """The number of reasons that hide a key from a query, (G, W, T, S·T); an earlier round that shows it is one."""
        tiling, round_ = self.tiling, self.round
        slot, low, high = self._of(round_.own)
        hidden, above, below = (slot.new_empty(*low.shape[:3], slot.shape[3]) for _ in range(3))
        torch.le(slot, low, out=hidden)
        if not tiling.in_order:
            hidden += torch.gt(slot, high, out=above)
        if round_.hides is not None:
            hidden += round_.hides
        if round_.position is not None:
            j, i = self._of(round_.position)
            hidden += (torch.ge if tiling.spec.exclude_self else torch.gt)(j, i, out=above)
        for range_ in round_.earlier:
            slot, low, high = self._of(range_)
            hidden.addcmul_(torch.gt(slot, low, out=above), torch.le(slot, high, out=below))
        return hidden

    def _of(self, parts: tuple[Tensor, ...]) -> list[Tensor]:
        return [x[:, self.tiles] for x in parts]

    def _real(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (N) and their values (N, ...) without the empty places."""
        values = part.view(*self.query_tokens.shape, *part.shape[2:])
        return self.query_tokens[:, : self.real].flatten(), values[:, : self.real].flatten(0, 1)


class SortedLayout(NamedTuple):
    """Every round's order of the tokens and their slots, (B, H, R, L) int32; (B, 1, 1, L) without codes."""

    order: Tensor
    slot: Tensor

    @classmethod
    def of(
        cls, q: Tensor, codes: Tensor | None, window: Window, key_mask: Tensor | None, segments: Tensor | None
    ) -> "SortedLayout":
        if codes is None:
            codes = q.new_zeros((q.shape[0], 1, 1, q.shape[2]), dtype=torch.int16)
        heads, rounds, length = codes.shape[1:]
        order, slot = (torch.empty(codes.shape, dtype=torch.int32, device=q.device) for _ in range(2))
        step = max(1, _LAYOUT_ELEMENTS // (heads * rounds * length))
        head_step = max(1, _LAYOUT_ELEMENTS // (rounds * length))
        for start in range(0, len(codes), step):
            rows = slice(start, start + step)
            masks = [None if x is None else x[rows] for x in (key_mask, segments)]
            for head in range(0, heads, head_step):
                piece = (rows, slice(head, head + head_step))
                order[piece], slot[piece] = lay_out(codes[piece], window, *masks)
        return cls(order, slot)

    def groups(
        self, q: Tensor, k: Tensor, v: Tensor, spec: BucketedAttentionSpec, dropout: PairDropout | None
    ) -> Iterator[Rows]:
        """Groups of whole rows, see `Rows.groups`."""
        tiling = Tiling(spec)
        pairs = max(1, len(tiling.tiles(q.shape[2]))) * tiling.span * tiling.tile**2
        return Rows.groups(self, pairs, q, k, v, spec, dropout)

    def round(self, rows: Rows, number: int) -> Round:
        return Round(rows, number)


def take_rows(x: Tensor, place: slice) -> Tensor:
    """Rows of x (B, H, ...) as (G, ...): a view, or a copy of these rows alone."""
    if x.is_contiguous():
        return x.flatten(0, 1)[place]
    return torch.stack([x[divmod(row, x.shape[1])] for row in range(place.start, place.stop)])
