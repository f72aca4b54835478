"""Layers that the backward recomputes from their stored inputs, in decoders tile by tile over queries.

A token then costs a layer its keys and values, in the backward also their gradients in fp32; all else exists for one
tile at a time. The forward runs the tiles in order, so that a tile's prefix is complete; the backward projects all keys
and values first, then runs the tiles from the last to the first, so that the gradients of a tile's keys are complete.

With sequence parallelism a rank stores the keys and values of all tokens for its share of the key heads, and a tile's
queries are exchanged for the queries of these heads in the tiles of all ranks. All keys are projected first, also in
the forward, and their gradients are complete after the last tile.

Sketches choose the keys of a tile's queries by an index of all keys, and learn after the last tile from a sample of the
queries. Attention that needs all queries at once (buckets, drawn keys, encoders, padding), sketches on several ranks,
and indivisible key heads are recomputed for the whole sequence. B batch, L length, T tokens
of a tile, E d_model, H heads, G key heads, D head dim.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasparse.attention.contract import AttentionContext, AttentionInputs
from megasparse.attention.heads import merge_heads
from megasparse.attention.sequence_part import SequencePart
from megasparse.model.branch import Pass, cut
from megasparse.ops.operator import Function, autocast_off, remember_autocast
from megasparse.ops.tiled import GradientSums

Block = Any
"""`model.block.Block`, which imports this file."""
Leaf = Callable[..., Tensor]
"""Function of a key head: (name, dim, start, count) -> part of its keys or values."""
_NAMES = "key", "value"


class StoredInput:
    """Input (B, L, E) of a layer, in tiles, in CPU memory if `offload`."""

    def __init__(self, tiles: Iterable[Tensor], offload: bool):
        self.tiles = []
        for tile in tiles:
            self.device = tile.device
            if offload and tile.is_cuda:
                tile = torch.empty(tile.shape, dtype=tile.dtype, pin_memory=True).copy_(tile, non_blocking=True)
            self.tiles.append(tile.to("cpu") if offload else tile)

    def tile(self, number: int) -> Tensor:
        return self.tiles[number].to(self.device, non_blocking=True)

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.tile, range(len(self.tiles)))


class Recomputed(Function):
    """Consecutive blocks that store only the input of the first. `apply` returns the last output and the auxiliary
    loss, None without one. weights: trained weights of the blocks.
    """

    @staticmethod
    def forward(
        ctx: Any, blocks: Sequence[Block], run: Pass, source: Tensor | None, x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        remember_autocast(ctx, x)
        ctx.blocks, ctx.run = blocks, run
        if any(ctx.needs_input_grad):
            ctx.input = StoredInput(cut(x, blocks[0].tiles), blocks[0].offload)
            ctx.save_for_backward(source)
        total: Tensor | None = None
        for block in blocks:
            x, auxiliary = _forward(block, run, source, x)
            if auxiliary is not None:
                total = auxiliary if total is None else total + auxiliary
        return x, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d, d_auxiliary = grads
        assert d is not None
        (source,) = ctx.saved_tensors
        blocks, run, inputs = ctx.blocks, ctx.run.undecided(), [ctx.input]
        for block in blocks[:-1]:
            if block.runs_in_tiles(run):
                tiles: Iterable[Tensor] = TiledBlock(block, run, d).forward(inputs[-1])
            else:
                tiles = cut(_forward(block, run, source, torch.cat(list(inputs[-1]), dim=1))[0], block.tiles)
            inputs.append(StoredInput(tiles, block.offload))
        if not run.donated:
            d = d.clone()
        of_weights: list[Tensor] = []
        d_source: Tensor | None = None
        for block in reversed(blocks):
            sums = GradientSums(dict(block.named_parameters()))
            if block.runs_in_tiles(run):
                TiledBlock(block, run, d).backward(inputs.pop(), d, sums, d_auxiliary)
            else:
                d, of_source = _backward(
                    block, run, source, torch.cat(list(inputs.pop()), dim=1), (d, d_auxiliary), sums
                )
                if of_source is not None:
                    d_source = of_source if d_source is None else d_source.add_(of_source)
            of_weights = [*sums.gradients().values(), *of_weights]
        return None, None, d_source, d, *of_weights


def _forward(block: Block, run: Pass, source: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
    if block.runs_in_tiles(run):
        tiles, new = cut(x, block.tiles), torch.empty_like(x)
        tiled = TiledBlock(block, run, x)
        for result, tile in zip(cut(new, block.tiles), tiled.forward(tiles), strict=True):
            result.copy_(tile)
        return new, tiled.learn()
    auxiliary, out = block.whole(run, None, source, x)
    assert out is not None
    return out, auxiliary


def _backward(
    block: Block, run: Pass, source: Tensor | None, x: Tensor, grads: tuple[Tensor, Tensor | None], sums: GradientSums
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a whole sequence x and of the source."""
    leaves = [y.detach().requires_grad_() for y in (x, source) if y is not None]
    with torch.enable_grad():
        auxiliary, out = block.whole(run, None, leaves[1] if source is not None else None, leaves[0])
    pairs = [(y, d) for y, d in zip((out, auxiliary), grads, strict=True) if y is not None and d is not None]
    outputs, d_outputs = zip(*[(y, d) for y, d in pairs if y.requires_grad], strict=True)
    dx, *d_source = _take(sums, outputs, d_outputs, leaves)
    return dx, d_source[0] if d_source else None


def _take(sums: GradientSums, outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of `inputs`, and add the gradients of all weights to the sums."""
    for name in sums.weights:
        sums.itself(name)
    return sums.take(outputs, grads, inputs)


class TiledBlock:
    """One pass of a decoder's block, tile by tile. keys: keys and values (B, 1, L, D) of each key head of this rank.
    like: a stream (B, L/S, E).
    """

    def __init__(self, block: Block, run: Pass, like: Tensor):
        self.attention, self.feed_forward, self.run = block.attention, block.feed_forward, run
        self.layer, self.part = block.attention.attention, run.padding.part
        self.tokens = like.shape[1]
        share = self.layer.group * self.part.size
        self.heads = [
            (
                kind,
                AttentionContext(self.attention.layer, run.rng.at(0), part=SequencePart(head_groups=n, head_group=i)),
            )
            for kind, n in ((kind, heads // share) for kind, heads in self.layer.split.items())
            for i in range(n)
        ]
        self.mechanisms = [self.layer.mechanism(kind) for kind, _ in self.heads]
        shape = (len(like), 1, self.tokens * self.part.size, self.layer.head_dim)
        dtype = self.attention.norm.weight.dtype
        self.keys = [{name: like.new_empty(shape, dtype=dtype) for name in _NAMES} for _ in self.heads]
        self.indices: list[Tensor | None] = [None] * len(self.heads)
        """`index_keys` of all keys, (B, S, L, w) per key head; None if a mechanism needs none."""
        self.drawn = [
            mechanism.sampled_queries(shape[2], context, like.device)
            for mechanism, (_, context) in zip(self.mechanisms, self.heads, strict=True)
        ]
        self.samples: list[Tensor | None] = [None] * len(self.heads)
        """Queries (B, H/G, n, D) at the positions `drawn`, from which the choice of keys learns."""

    def forward(self, tiles: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the tiles of the output stream, without gradients, for tiles of the input."""
        first, one_rank = 0, self.part.size == 1
        if not one_rank:
            self._store_all(tiles)
        leaves = [partial(_narrow, of_head) for of_head in self.keys]
        for tile in tiles:
            read = self.attention.read(tile)
            if one_rank:
                self._store(read, first)
            (q,) = self._to_heads(self.layer.queries(read, self.run.rng.first + first))
            self._sample(q, first)
            attended = torch.cat(self._attend(q.chunk(len(leaves), dim=1), leaves, first), dim=1)
            yield self._add(tile, self._to_tokens(attended), first)
            first += tile.shape[1]
            del read, q, attended

    def backward(self, stored: StoredInput, d: Tensor, sums: GradientSums, d_auxiliary: Tensor | None) -> None:
        """Overwrite the gradient d (B, L/S, E) of the output with the gradient of the input, and add to the sums."""
        first = self._store_all(stored)
        of_keys = [GradientSums({name: x.requires_grad_() for name, x in of_head.items()}) for of_head in self.keys]
        d_tiles = cut(d, len(stored.tiles))
        for number, d_tile in reversed(list(enumerate(d_tiles))):
            first -= d_tile.shape[1]
            self._backward(stored.tile(number), d_tile, first, of_keys, sums)
        if d_auxiliary is not None:
            self.learn(lambda loss: _take(sums, [loss], [d_auxiliary], []))
        if self.part.size == 1:
            return
        for tile, d_tile in zip(stored, d_tiles, strict=True):
            x = tile.detach().requires_grad_()
            with torch.enable_grad():
                projected = self.layer.keys_and_values(self.attention.read(x), self.run.rng.first + first)
            d_tile.add_(_take(sums, projected, self._gradients(of_keys, first, x.shape[1]), [x])[0])
            first += x.shape[1]

    def _backward(self, x: Tensor, d: Tensor, first: int, of_keys: list[GradientSums], sums: GradientSums) -> None:
        x, position, one_rank = x.detach().requires_grad_(), self.run.rng.first + first, self.part.size == 1
        with torch.enable_grad():
            read = self.attention.read(x)
            projected = [self.layer.queries(read, position)]
            if one_rank:
                projected += self.layer.keys_and_values(read, position)
            (q,) = self._to_heads(projected[0].detach())
            self._sample(q, first)
            shares = [share.requires_grad_() for share in q.chunk(len(of_keys), dim=1)]
            heads = self._attend(shares, [head.leaf for head in of_keys], first)
            attended = self._to_tokens(torch.cat([y.detach() for y in heads], dim=1)).requires_grad_()
            out = self._add(x, attended, first)
        dx, d_attended = _take(sums, [out], [d], [x, attended])
        (d_attended,) = self._to_heads(d_attended)
        del out, attended
        d_q = torch.empty_like(q)
        for d_heads, d_share, share, head in zip(
            d_attended.chunk(len(heads), dim=1), d_q.chunk(len(heads), dim=1), shares, of_keys, strict=True
        ):
            d_share.copy_(head.take([heads.pop(0)], [d_heads], [share])[0])
        d_keys = self._gradients(of_keys, first, x.shape[1]) if one_rank else []
        (d_read,) = _take(sums, projected, [self._to_tokens(d_q), *d_keys], [x])
        d.copy_(dx + d_read)

    def learn(self, differentiate: Callable[[Tensor], object] | None = None) -> Tensor | None:
        """Return the sum of the auxiliary losses after the last tile. differentiate: receives each term with its graph,
        in the backward.
        """
        total: Tensor | None = None
        statistics: dict[str, Tensor] = {}
        for (kind, context), mechanism, of_head, drawn, samples in zip(
            self.heads, self.mechanisms, self.keys, self.drawn, self.samples, strict=True
        ):
            if drawn is None or samples is None:
                continue
            k = of_head["key"].detach().expand(-1, samples.shape[1], -1, -1)
            q = torch.zeros_like(k, memory_format=torch.contiguous_format).index_copy_(2, drawn, samples)
            inputs = AttentionInputs(q, k, k, None, self.run.padding.segments, True)
            with torch.set_grad_enabled(differentiate is not None), autocast_off(q):
                loss, values = mechanism.learn(q, inputs, context)
                loss = loss / context.part.head_groups
            if differentiate is not None:
                differentiate(loss)
            total = loss.detach() if total is None else total + loss.detach()
            for name, value in values.items():
                name = f"{kind}/{name}"
                statistics[name] = statistics.get(name, 0.0) + value / context.part.head_groups
        self.run.note(self.attention.layer, statistics)
        return total

    def _sample(self, q: Tensor, first: int) -> None:
        """Keep the drawn queries among those (B, H, T, D) from position `first` on."""
        for number, (share, drawn) in enumerate(zip(q.detach().chunk(len(self.heads), dim=1), self.drawn, strict=True)):
            if drawn is not None:
                slot = (drawn - first).clamp(0, q.shape[2] - 1)
                inside = (slot == drawn - first)[:, None]
                before = self.samples[number]
                new = share[:, :, slot]
                self.samples[number] = new if before is None else torch.where(inside, new, before)

    def _store_all(self, tiles: Iterable[Tensor]) -> int:
        """Project the keys and values of all tiles. Returns this rank's number of tokens."""
        first = 0
        for tile in tiles:
            self._store(self.attention.read(tile), first)
            first += tile.shape[1]
        return first

    def _store(self, read: Tensor, first: int) -> None:
        """Project the keys and values of a tile from position `first` on."""
        projected = self._to_heads(*self.layer.keys_and_values(read, self.run.rng.first + first))
        for name, x in zip(_NAMES, projected, strict=True):
            for of_head, y in zip(self.keys, x.split(1, dim=1), strict=True):
                for start, piece in zip(self._starts(first), y.chunk(self.part.size, dim=2), strict=True):
                    of_head[name].narrow(2, start, piece.shape[2]).copy_(piece)
        k = projected[0]
        for number, (mechanism, (_, context), of_head) in enumerate(
            zip(self.mechanisms, self.heads, k.split(1, dim=1), strict=True)
        ):
            index = mechanism.index_keys(of_head.expand(-1, self.layer.group, -1, -1), context)
            if index is None:
                continue
            stored = self.indices[number]
            if stored is None:
                stored = index.new_empty(*index.shape[:2], self.tokens, index.shape[3])
                self.indices[number] = stored
            stored.narrow(2, first, index.shape[2]).copy_(index)

    def _gradients(self, of_keys: list[GradientSums], first: int, count: int) -> list[Tensor]:
        """Return the gradients (B, G, T, D) of this rank's keys and values from position `first` on."""
        return [
            self._to_tokens(
                torch.cat([
                    torch.cat([head.total(name).narrow(2, start, count) for start in self._starts(first)], dim=2)
                    for head in of_keys
                ], dim=1)
            ) for name in _NAMES
        ]  # fmt: skip

    def _starts(self, first: int) -> list[int]:
        """Return the positions in the sequence of a tile's first token, on each rank."""
        return [rank * self.tokens + first for rank in range(self.part.size)]

    def _to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange a tile (B, H or G, T, D) for this rank's heads in the tiles of all ranks, (B, …/S, S·T, D)."""
        if self.part.size == 1:
            return tensors
        kinds = zip(*map(self._by_kind, tensors), strict=True)
        return tuple(torch.cat(x, dim=1) for x in zip(*(self.part.to_heads(*x) for x in kinds), strict=True))

    def _to_tokens(self, x: Tensor) -> Tensor:
        """Return the inverse of `_to_heads`."""
        if self.part.size == 1:
            return x
        return torch.cat([self.part.start_to_tokens(of_kind)() for of_kind in self._by_kind(x)], dim=1)

    def _by_kind(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split heads by mechanism, so that each rank gets an equal share of each."""
        return x.split([x.shape[1] * heads // self.layer.heads for heads in self.layer.split.values()], dim=1)

    def _attend(self, shares: Sequence[Tensor], leaves: Sequence[Leaf], first: int) -> list[Tensor]:
        """Attend from the queries (B, H/G, S·T, D) of each key head, at positions from `first` on in the tokens of each
        rank, to their prefix.
        """
        outs = []
        count = shares[0].shape[2] // self.part.size
        spans = [(start, start + count) for start in self._starts(first)]
        documents = list(_documents(self.run.padding.segments, spans))
        for q, leaf, mechanism, index, (_, context) in zip(
            shares, leaves, self.mechanisms, self.indices, self.heads, strict=True
        ):
            lines = []
            for rows, parts in documents:

                def keys(
                    start: int, stop: int, rows: slice = rows, q: Tensor = q, leaf: Leaf = leaf, index: Any = index
                ) -> list[Tensor]:
                    part = [leaf(name, 2, start, stop - start)[rows].expand(-1, q.shape[1], -1, -1) for name in _NAMES]
                    return part if index is None else [*part, index[rows, :, start:stop]]

                queries = q[rows].split([stop - start for _, start, stop in parts], dim=2)
                with autocast_off(q):
                    of_parts = [
                        mechanism.attend_prefix(x, keys, start, document, context)
                        for x, (document, start, _) in zip(queries, parts, strict=True)
                    ]
                lines.append(torch.cat(of_parts, dim=2) if len(of_parts) > 1 else of_parts[0])
            outs.append(torch.cat(lines) if len(lines) > 1 else lines[0])
        return outs

    def _add(self, x: Tensor, attended: Tensor, first: int) -> Tensor:
        """Return the output stream of a tile x (B, T, E), given its attention (B, H, T, D)."""
        rng = self.run.rng.at(self.run.rng.first + first)
        rows, branch = rng.rows(x.shape[1], x.device), self.feed_forward
        x = self.attention.add(x, self.layer.output(merge_heads(attended)), rng, rows)
        weights = dict(branch.feed_forward.named_parameters(recurse=False))
        return branch.add(x, branch.feed_forward.of_tile(branch.read(x), rows, rng, weights), rng, rows)


def _narrow(tensors: dict[str, Tensor], name: str, *part: int) -> Tensor:
    return tensors[name].narrow(*part)


def _documents(
    segments: Tensor | None, spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[slice, list[tuple[int, int, int]]]]:
    """Yield, for rows of the batch, the first token of each document with tokens in a span, and these tokens' span."""
    if segments is None or segments.is_meta:
        yield slice(None), [(0, *span) for span in spans]
        return
    for row in range(len(segments)):
        parts: list[tuple[int, int, int]] = []
        for first, stop in spans:
            numbers, counts = segments[row, first:stop].unique_consecutive(return_counts=True)
            starts = torch.searchsorted(segments[row], numbers).tolist()
            ends = (first + counts.cumsum(0)).tolist()
            parts += zip(starts, [first, *ends], ends, strict=False)
        yield slice(row, row + 1), parts
