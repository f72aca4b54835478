"""Rows in sorted order as chunks, whose windows of queries and keys are slices at one stride and never copied.

Rows (one batch element's head) are sorted round by round into chunks of M tokens. A chunk's queries meet the keys of
their own chunk and of the one before, and in a two-sided window of the one after, which covers the band and the chunk
window alike. Row after row lies in one array, each row led by an empty chunk.

B batch, H heads, R rounds, L length, D head dim, M chunk, G rows at a time, n chunks a row, W windows in a block,
S chunks of keys a window: 2, or 3 where it is two-sided.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.layout import Window, lay_out

_ROW_ELEMENTS = 1 << 23  # numbers in one sorted copy of q, k or v
_SCORE_ELEMENTS = 1 << 18  # scores in a block: 1 MB of fp32, so that it stays in cache
_NOWHERE = -(1 << 30)  # the slot of an empty place


@dataclass(frozen=True)
class Rule:
    """Everything about visibility that is not a tensor."""

    window: Window
    causal: bool
    scale: float
    exclude_self: bool
    count_rounds: bool

    @property
    def two_sided(self) -> bool:
        return self.window.two_sided(self.causal)

    @property
    def span(self) -> int:
        """S, the chunks of keys that a chunk of queries meets."""
        return 3 if self.two_sided else 2


@dataclass
class Rows:
    """A group of G rows with their layout. `place`: which rows. q, k, v: (G, L, D). order, slot: (G, R, L)."""

    place: slice
    q: Tensor
    k: Tensor
    v: Tensor
    order: Tensor
    slot: Tensor
    rule: Rule

    @property
    def rounds(self) -> int:
        return self.order.shape[1]

    def sort(self, round_: int) -> "Sorted":
        """The empty chunk that leads each row, the row's tokens in this round's order, and empty places up to a whole
        chunk.
        """
        count, _, length = self.order.shape
        chunk = self.rule.window.chunk
        padded = (-(-length // chunk) + 1) * chunk
        index = torch.zeros(count, padded, dtype=torch.int64, device=self.order.device)
        index[:, chunk : chunk + length] = self.order[:, round_]
        return Sorted(self, round_, index, chunk, length)


class Sorted:
    """One round of a group of rows as chunks: C = 1 + G·(n + 1) of them, the first one empty, and for two-sided windows
    one more empty one.

    Window w is the queries of chunk w + 1 and the keys of the S chunks from w on.
    """

    def __init__(self, rows: Rows, round_: int, index: Tensor, chunk: int, length: int):
        self.rows, self.rule, self.chunk, self.length = rows, rows.rule, chunk, length
        self.index = index  # (G, (n+1)·M)
        first_row = torch.arange(index.shape[0], device=index.device)[:, None] * length
        self.flat = (index + first_row).flatten()
        self.windows = index.numel() // chunk
        slots = rows.slot.gather(2, index[:, None].expand(-1, rows.rounds, -1))  # (G, R, (n+1)·M)
        slots[..., :chunk] = _NOWHERE
        slots[..., chunk + length :] = _NOWHERE
        self.round = round_
        self.slots = [self._lead(slots[:, r], _NOWHERE) for r in range(rows.rounds)]
        needs_position = self.rule.window.kind == "chunk" and (self.rule.causal or self.rule.exclude_self)
        self.position = self._lead(index, 0) if needs_position else None

    def _lead(self, x: Tensor, fill: int) -> Tensor:
        chunks = x.new_full((self.windows + self.rule.span - 1, self.chunk), fill)  # (C, M)
        chunks[1 : 1 + self.windows] = x.reshape(-1, self.chunk)
        return chunks

    def take(self, x: Tensor) -> Tensor:
        """x (G, L, ...) in sorted order with zeros at empty places: (C, M, ...)."""
        tail = x.shape[2:]
        count = self.flat.numel()
        chunks = torch.empty((self.rule.span - 1) * self.chunk + count, *tail, dtype=x.dtype, device=x.device)
        chunks[: self.chunk] = 0
        chunks[self.chunk + count :] = 0
        torch.index_select(x.flatten(0, 1), 0, self.flat, out=chunks[self.chunk : self.chunk + count])
        body = chunks[self.chunk : self.chunk + count].view(x.shape[0], -1, *tail)
        body[:, : self.chunk] = 0
        body[:, self.chunk + self.length :] = 0
        return chunks.view(-1, self.chunk, *tail)

    def put_back(self, chunks: Tensor, out: Tensor, add: bool) -> None:
        """The inverse of `take`: chunks (C, M, ...) into, or added to, out (G, L, ...)."""
        body = chunks[1 : 1 + self.windows].view(out.shape[0], -1, *out.shape[2:])
        body = body[:, self.chunk : self.chunk + self.length]
        flat = self.flat.view(out.shape[0], -1)[:, self.chunk : self.chunk + self.length].flatten()
        target = out.flatten(0, 1)
        values = body.flatten(0, 1)
        # Each token stands once in a round's order, so neither is a race.
        if add:
            target.index_add_(0, flat, values)
        else:
            target.index_copy_(0, flat, values)

    def blocks(self) -> Iterator[slice]:
        step = max(1, _SCORE_ELEMENTS // (self.rule.span * self.chunk * self.chunk))
        for start in range(0, self.windows, step):
            yield slice(start, min(start + step, self.windows))

    def queries(self, chunks: Tensor, block: slice) -> Tensor:
        return chunks[block.start + 1 : block.stop + 1]  # (W, M, ...)

    def keys(self, chunks: Tensor, block: slice) -> Tensor:
        """(W, S·M, ...): overlapping views, nothing is copied."""
        part = chunks[block.start : block.stop + self.rule.span - 1]
        size = (block.stop - block.start, self.rule.span * self.chunk, *chunks.shape[2:])
        return part.as_strided(size, (part.stride(0), *part.stride()[1:]))

    def scores(self, q: Tensor, k: Tensor, block: slice) -> Tensor:
        """scale·q·k − log N where visible, −∞ elsewhere: (W, M, S·M)."""
        score = torch.bmm(self.queries(q, block), self.keys(k, block).transpose(1, 2))
        if self.rule.scale != 1.0:
            score *= self.rule.scale
        seen = self._in_window(self.round, block)
        if len(self.slots) > 1 and self.rule.count_rounds:
            count = torch.ones_like(score)
            for other in range(len(self.slots)):
                if other != self.round:
                    count += self._in_window(other, block)
            score -= count.log_()
        return score.masked_fill_(~seen, -torch.inf)

    def _in_window(self, round_: int, block: slice) -> Tensor:
        slots = self.slots[round_]
        distance = self.queries(slots, block)[:, :, None] - self.keys(slots, block)[:, None, :]
        # In a band only the token itself is at distance 0.
        without_self = self.rule.exclude_self and self.rule.window.kind == "band"
        seen = distance < self.rule.window.width
        if self.rule.two_sided:
            seen &= distance > -self.rule.window.width
            if without_self:
                seen &= distance != 0
        else:
            seen &= distance >= (1 if without_self else 0)
        if self.position is not None and round_ == self.round:
            i, j = self.queries(self.position, block)[:, :, None], self.keys(self.position, block)[:, None, :]
            if self.rule.causal:
                seen &= (j < i) if self.rule.exclude_self else (j <= i)
            else:
                seen &= j != i
        return seen


def row_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    key_mask: Tensor | None,
    segments: Tensor | None,
    rule: Rule,
) -> Iterator[Rows]:
    batch, heads, length, head_dim = q.shape
    if codes is None:
        codes = torch.zeros(batch, 1, 1, length, dtype=torch.int16, device=q.device)
    order, slot = lay_out(codes, rule.window, key_mask, segments)
    order, slot = (x.expand(-1, heads, -1, -1).flatten(0, 1) for x in (order, slot))
    dtype = torch.promote_types(q.dtype, torch.float32)
    size = max(1, _ROW_ELEMENTS // (length * head_dim))
    for start in range(0, batch * heads, size):
        place = slice(start, min(start + size, batch * heads))
        q_rows, k_rows, v_rows = (x.flatten(0, 1)[place].to(dtype) for x in (q, k, v))
        yield Rows(place, q_rows, k_rows, v_rows, order[place], slot[place], rule)
