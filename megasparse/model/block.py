"""A layer of the stack: attention, in an encoder–decoder cross-attention, and feed-forward branches around residual
streams. B batch, L length, S source length, E d_model.

Streams are fp32 or bf16 (`model.residual_dtype`), norms fp32. A branch computes in the dtype of its weights, and is
added to a stream in fp32.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, RecomputeCache, Targets
from megasparse.attention.cross import CrossAttention, Source, SourceKeys
from megasparse.attention.heads import AttentionLayer, Padding
from megasparse.attention.norm import Norm
from megasparse.config.schema import ModelConfig
from megasparse.model.feed_forward import FeedForward
from megasparse.model.head_groups import attend_in_groups, rewrite_in_groups
from megasparse.model.in_place import Place, handed_over, in_tiles, inside, recomputed
from megasparse.ops.fixed_point import to_fixed_point
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.random import RngContext, add_dropout, add_dropout_, dropout

Streams = tuple[Tensor, ...]
"""The residual streams, (B, L, E) each, of one dtype: two in a reversible stack, one in an ordinary one."""


def mean_stream(streams: Streams) -> Tensor:
    """What readers of a stack see: the mean of its streams, (B, L, E), in fp32 at least."""
    return torch.stack([at_least_fp32(x) for x in streams]).mean(0)


Compute = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""A branch: from the stream that it reads, what it adds to a stream (B, L, E), and its auxiliary loss or None."""


@dataclass
class Pass:
    """One forward pass: what its draws depend on, its padding, the targets in training, which tokens of the source
    are real, and what its branches decided (a RecomputeCache each, by purpose and layer).
    """

    rng: RngContext
    padding: Padding
    targets: Targets | None = None
    source_mask: Tensor | None = None
    tokens: Tensor | None = None
    """What AttentionContext.tokens says."""
    statistics: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Statistics by name, and by the layers that have them."""
    recompute: defaultdict[tuple[str, int], RecomputeCache] = field(default_factory=lambda: defaultdict(RecomputeCache))

    def replay(self) -> "Pass":
        """A pass of its own: a recomputation adds no statistics, and takes decisions from the caches."""
        for cache in self.recompute.values():
            cache.replay()
        return replace(self, statistics={})

    def anew(self) -> "Pass":
        """A pass of its own, which has decided nothing."""
        return replace(self, statistics={}, recompute=defaultdict(RecomputeCache))


class Branch(nn.Module):
    """A part of a layer, added to a stream after dropout, and its norm: before it (pre-norm), or after (style bert)."""

    purpose: str
    """What the draws of its dropout are for."""
    gathered_at_once: bool = False
    """Whether its call uses all of its weights, those of its parts too: ZeRO 3 is to gather them for it."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.rate, self.post_norm = layer, config.dropout, config.style == "bert"
        self.bits, self.tiles = config.residual_bits, config.feed_forward_tiles
        self.norm = Norm(config)

    def read(self, stream: Tensor) -> Tensor:
        """The branch's input from a stream, in the dtype of its weights."""
        dtype = self.norm.weight.dtype
        return stream.to(dtype) if self.post_norm else self.norm(stream, dtype)

    def read_by(self, weights: Mapping[str, Tensor], stream: Tensor) -> Tensor:
        """`read` with the branch's weights by name."""
        dtype = self.norm.weight.dtype
        return stream.to(dtype) if self.post_norm else self.norm.by(inside("norm", weights), stream, dtype)

    def rewrite(self, compute: Compute, place: Place, run: Pass) -> Tensor | None:
        """The branch in place: in the forward it writes a stream and returns its auxiliary loss; in the backward it
        takes its output off again, adds to a gradient, and gives its weights theirs.
        """
        if place.d_written is None:
            out, auxiliary = compute(place.read)
        else:
            out, auxiliary = recomputed(compute, place, self.gradient(place.d_written, run.rng)), None
        self.write(place.written, out, run.rng, place.sign, run.rng.rows(out.shape[1], out.device))
        return auxiliary

    def rewrite_by_call(self, place: Place, run: Pass) -> Tensor | None:
        """`rewrite` of a branch whose call does it, with all of its weights at once."""
        if place.d_read is None:
            auxiliary: Tensor | None = self(place.read, run, place=place)
            return auxiliary
        with torch.enable_grad():
            zero = torch.zeros((), dtype=place.read.dtype, device=place.read.device, requires_grad=True)
            done = self(zero, run, place=place)
        if done.requires_grad:
            done.backward()
        return None

    def write(self, stream: Tensor, out: Tensor, rng: RngContext, sign: int, rows: Tensor) -> None:
        """`plus` in place, of a tile."""
        if self.bits is not None:
            stream.copy_(self.plus(stream, out, rng, sign, rows))
        elif self._drops(rng):
            add_dropout_(stream, out, self.rate, rng.key(self.layer, self.purpose), rows, sign)
        else:
            stream.add_(out, alpha=sign)

    def add(self, streams: Streams, out: Tensor, rng: RngContext) -> Streams:
        """The streams after the branch, whose output is out: (B, L, E). Of two it reads the last; they swap."""
        if len(streams) == 2:
            return streams[1], self.plus(streams[0], out, rng)
        x = self.plus(streams[0], out, rng)
        return (self.norm(x) if self.post_norm else x,)

    def plus(self, stream: Tensor, out: Tensor, rng: RngContext, sign: int = 1, rows: Tensor | None = None) -> Tensor:
        """Return stream + sign·dropout(out), summed in fp32 or wider, in the stream's dtype; in fixed point to the bit
        what it was before, where the sign is the other one. rows: of a tile, see `RngContext.rows`.
        """
        if self._drops(rng):
            rows = rng.rows(out.shape[1], out.device) if rows is None else rows
            key = rng.key(self.layer, self.purpose)
            if self.bits is None:
                return add_dropout(stream, out, self.rate, key, rows, sign)
            out = dropout(out, self.rate, key, rows, stream.dtype)
        out = at_least_fp32(out)
        if self.bits is not None:
            out = to_fixed_point(out, self.bits)
        return (stream + out if sign == 1 else stream - out).to(stream.dtype)

    def gradient(self, grad: Tensor, rng: RngContext, rows: Tensor | None = None) -> Tensor:
        """The gradient of the branch's output. grad: that of what it adds. Dropout, being linear, is its own."""
        dtype = self.norm.weight.dtype
        if not self._drops(rng):
            return grad.to(dtype)
        key = rng.key(self.layer, self.purpose)
        return dropout(grad, self.rate, key, rng.rows(grad.shape[1], grad.device) if rows is None else rows, dtype)

    def _drops(self, rng: RngContext) -> bool:
        return rng.training and self.rate > 0.0


def _output_rate(config: ModelConfig) -> float:
    own = config.attention.output_dropout
    return config.dropout if own is None else own


class AttentionBranch(Branch):
    purpose = "attention dropout"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.rate = _output_rate(config)
        self.attention = AttentionLayer(config, layer)
        self.gathered_at_once = self.attention.groups > 1

    def forward(
        self, x: Tensor, run: Pass, cache: Any = None, place: Place | None = None, position: int | None = None
    ) -> Any:
        """Run the residual branch. x: (B, L, E). Returns its output and the auxiliary loss. place: see
        `Branch.rewrite_by_call`, in groups of heads. position: of the one new token to decode.
        """
        if position is not None:
            context = AttentionContext(self.layer, run.rng, tokens=run.tokens)
            return self.attention.decode(self.read(x), cache, position, context, run.padding), None
        if place is not None:
            found, statistics = rewrite_in_groups(self, place, run)
            self.note(run, statistics)
            return found if place.d_read is None else handed_over(found, x)
        if self.attention.groups > 1 and cache is None:
            return attend_in_groups(self, x, run)
        decisions = run.recompute["attention", self.layer]
        context = AttentionContext(self.layer, run.rng, recompute=decisions, targets=run.targets, tokens=run.tokens)
        output = self.attention(self.read(x), context, run.padding, cache=cache)
        self.note(run, output.statistics)
        return output.out, output.auxiliary_loss

    def rewrite(self, compute: Compute, place: Place, run: Pass) -> Tensor | None:
        return super().rewrite(compute, place, run) if self.attention.groups == 1 else self.rewrite_by_call(place, run)

    def note(self, run: Pass, statistics: Mapping[str, Tensor]) -> None:
        """Adds this layer's statistics to a pass."""
        for name, value in statistics.items():
            run.statistics.setdefault(f"attention/{name}", {})[self.layer] = value

    def group_weights(self) -> dict[str, nn.Parameter]:
        """The weights that attention in groups reads, by name."""
        norm_after = self.post_norm  # which the sum of stream and branch goes through
        return {n: w for n, w in self.named_parameters() if not (norm_after and n.startswith("norm."))}


class CrossAttentionBranch(Branch):
    purpose = "cross-attention dropout"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.rate = _output_rate(config)
        self.attention = CrossAttention(config)

    def forward(self, x: Tensor, run: Pass, source: Source | SourceKeys, position: int | None = None) -> Tensor:
        """Run the residual branch. x: (B, L, E). position: of the one new token to decode."""
        decisions = run.recompute["cross-attention", self.layer]
        context = AttentionContext(self.layer, run.rng, recompute=decisions, part=run.padding.part)
        return self.attention(self.read(x), source, context, position or 0)

    def new_cache(self, source: Source, rng: RngContext) -> SourceKeys:
        return self.attention.read(source, AttentionContext(self.layer, rng))


class FeedForwardBranch(Branch):
    purpose = "feed-forward dropout"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.feed_forward = FeedForward(config, layer)
        self.gathered_at_once = config.blocks == "reversible"

    def forward(self, x: Tensor, run: Pass, place: Place | None = None) -> Tensor | None:
        """Run the residual branch on a stream x, or, tile by tile, in place; see `Branch.rewrite_by_call`."""
        if place is None:
            return self.feed_forward(self.read(x), run.rng)

        def tile(x: Tensor, rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
            return self.feed_forward.of_tile(self.read_by(weights, x), rows, run.rng, inside("feed_forward", weights))

        sums = in_tiles(self, tile, place, run.rng)
        return None if sums is None else handed_over(sums, x)

    def rewrite(self, compute: Compute, place: Place, run: Pass) -> Tensor | None:
        return self.rewrite_by_call(place, run)


class Block(nn.Module):
    """Reversible: Y1 = X1 + Attention(X2), Y2 = X2 + FeedForward(Y1) (Reformer Eq. 9); in an encoder–decoder's decoder
    Y1 = X1 + Attention(X2), Y2 = X2 + CrossAttention(Y1, source), Z1 = Y1 + FeedForward(Y2), of which Y2 is the next
    layer's first stream. Ordinary: all added to the one stream, which with `style` bert is normalised after each.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention = AttentionBranch(config, layer)
        self.cross_attention = CrossAttentionBranch(config, layer) if config.source else None
        self.feed_forward = FeedForwardBranch(config, layer)

    def forward(self, run: Pass, cache: Any, source: Tensor | None, *streams: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the auxiliary loss (or None) and the new streams. source: (B, S, E), or None where there is none or
        the cache has it. A given empty cache takes in the whole sequence.

        Source and streams are arguments of their own because the checkpointing wrapper looks for tensors no deeper.
        """
        streams, auxiliary = _residual(streams, self.branches(run, cache, source), run.rng)
        return auxiliary, *streams

    def branches(
        self, run: Pass, cache: Any, source: Tensor | None, position: int | None = None
    ) -> list[tuple[Branch, Compute]]:
        """The branches of a whole sequence, or of the one new token at `position`, in their order."""
        own, cross, feed = self.attention, self.cross_attention, self.feed_forward
        found: list[tuple[Branch, Compute]] = [(own, lambda x: own(x, run, cache, position=position))]
        if cross is not None:
            seen = Source(source, run.source_mask) if source is not None else cache["cross"]
            found.append((cross, lambda x: (cross(x, run, seen, position), None)))
        found.append((feed, lambda x: (feed(x, run), None)))
        return found

    def decode(self, streams: Streams, cache: Any, position: int, run: Pass) -> Streams:
        """One new token: streams of (B, 1, E)."""
        return _residual(streams, self.branches(run, cache, None, position), run.rng)[0]


def _residual(
    streams: Streams, branches: list[tuple[Branch, Compute]], rng: RngContext
) -> tuple[Streams, Tensor | None]:
    """The streams after all branches, and the auxiliary loss of the one that has any."""
    auxiliary = None
    for branch, compute in branches:
        out, loss = compute(streams[-1])
        streams = branch.add(streams, out, rng)
        auxiliary = auxiliary if loss is None else loss
    return streams, auxiliary
