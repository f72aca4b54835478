"""A layer of the stack: attention, in an encoder–decoder cross-attention, and feed-forward branches around residual
streams. B batch, L length, S source length, E d_model.

Streams and norms are fp32. A branch computes in the dtype of its weights, and is added to a stream in fp32.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, RecomputeCache, Targets
from megasparse.attention.cross import CrossAttention, Source, SourceKeys
from megasparse.attention.heads import AttentionLayer, Padding
from megasparse.config.schema import ModelConfig
from megasparse.model.feed_forward import FeedForward
from megasparse.model.norm import Norm
from megasparse.ops.random import RngContext, dropout

Streams = tuple[Tensor, ...]
"""The residual streams, (B, L, E) fp32 each: two in a reversible stack, one in an ordinary one."""

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
    statistics: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Statistics by name, and by the layers that have them."""
    gradient: Tensor | None = None
    """In a reversible backward: the gradient of what the branch that is being recomputed adds to its stream."""
    recompute: defaultdict[tuple[str, int], RecomputeCache] = field(default_factory=lambda: defaultdict(RecomputeCache))

    def replay(self) -> "Pass":
        """A pass of its own: what is recomputed adds nothing to the statistics, and takes decisions from the
        caches.
        """
        for cache in self.recompute.values():
            cache.replay()
        return replace(self, statistics={})


class Branch(nn.Module):
    """A part of a layer that adds to a stream, and its norm: of what it reads (pre-norm), or with `style` bert of the
    sum (post-norm).
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.rate, self.post_norm = layer, config.dropout, config.style == "bert"
        self.norm = Norm(config)

    def read(self, stream: Tensor) -> Tensor:
        """The branch's input from a stream, in the dtype of its weights."""
        dtype = self.norm.weight.dtype
        return stream.to(dtype) if self.post_norm else self.norm(stream, dtype)

    def add(self, streams: Streams, out: Tensor) -> Streams:
        """The streams after the branch, which reads the last one: of two it adds to the other one, and they change
        places.
        """
        if len(streams) == 2:
            return streams[1], streams[0] + out
        (x,) = streams
        return (self.norm(x + out) if self.post_norm else x + out,)


class AttentionBranch(Branch):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.attention = AttentionLayer(config, layer)

    def forward(self, x: Tensor, run: Pass, cache: Any = None) -> tuple[Tensor, Tensor | None]:
        """Run the residual branch. x: (B, L, E). Returns what to add to the stream and the auxiliary loss."""
        context = AttentionContext(
            self.layer, run.rng, recompute=run.recompute["attention", self.layer], targets=run.targets
        )
        output = self.attention(self.read(x), context, run.padding, cache=cache)
        for name, value in output.statistics.items():
            run.statistics.setdefault(f"attention/{name}", {})[self.layer] = value
        return _dropped(output.out, self.rate, run.rng, self.layer, "attention dropout"), output.auxiliary_loss

    def decode(self, x: Tensor, cache: Any, position: int, rng: RngContext) -> Tensor:
        return self.attention.decode(self.read(x), cache, position, AttentionContext(self.layer, rng)).float()


class CrossAttentionBranch(Branch):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.attention = CrossAttention(config)

    def forward(self, x: Tensor, run: Pass, source: Source | SourceKeys) -> Tensor:
        context = AttentionContext(self.layer, run.rng, recompute=run.recompute["cross-attention", self.layer])
        out = self.attention(self.read(x), source, context)
        return _dropped(out, self.rate, run.rng, self.layer, "cross-attention dropout")

    def new_cache(self, source: Source, rng: RngContext) -> SourceKeys:
        return self.attention.read(source, AttentionContext(self.layer, rng))

    def decode(self, x: Tensor, cache: SourceKeys, position: int, rng: RngContext) -> Tensor:
        return self.attention(self.read(x), cache, AttentionContext(self.layer, rng), position).float()


class FeedForwardBranch(Branch):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.feed_forward = FeedForward(config, layer)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        drop = partial(_dropped, rate=self.rate, rng=run.rng, layer=self.layer, purpose="feed-forward dropout")
        known = None
        if run.gradient is not None:  # dropout is linear: it does the same to a gradient
            known = drop(run.gradient, dtype=self.norm.weight.dtype)
        return drop(self.feed_forward(self.read(x), run.rng, known))


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
        streams, auxiliary = _residual(streams, self.branches(run, cache, source))
        return auxiliary, *streams

    def branches(self, run: Pass, cache: Any, source: Tensor | None) -> list[tuple[Branch, Compute]]:
        """The branches of a whole sequence, in their order."""
        cross, feed = self.cross_attention, self.feed_forward
        found: list[tuple[Branch, Compute]] = [(self.attention, lambda x: self.attention(x, run, cache))]
        if cross is not None:
            seen = Source(source, run.source_mask) if source is not None else cache["cross"]
            found.append((cross, lambda x: (cross(x, run, seen), None)))
        found.append((feed, lambda x: (feed(x, run), None)))
        return found

    def decode(self, streams: Streams, cache: Any, position: int, rng: RngContext) -> Streams:
        """One new token: streams of (B, 1, E)."""
        own, cross, feed = self.attention, self.cross_attention, self.feed_forward
        branches: list[tuple[Branch, Compute]] = [(own, lambda x: (own.decode(x, cache, position, rng), None))]
        if cross is not None:
            branches.append((cross, lambda x: (cross.decode(x, cache["cross"], position, rng), None)))
        branches.append((feed, lambda x: (feed(x, Pass(rng, Padding())), None)))
        return _residual(streams, branches)[0]


def _residual(streams: Streams, branches: list[tuple[Branch, Compute]]) -> tuple[Streams, Tensor | None]:
    """The streams after all branches, and the auxiliary loss of the one that has any."""
    auxiliary = None
    for branch, compute in branches:
        out, loss = compute(streams[-1])
        streams = branch.add(streams, out)
        auxiliary = auxiliary if loss is None else loss
    return streams, auxiliary


def _dropped(
    x: Tensor, rate: float, rng: RngContext, layer: int, purpose: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A branch's output in fp32, after dropout when training."""
    if not rng.training or rate == 0.0:
        return x.to(dtype)
    return dropout(x, rate, rng.key(layer, purpose), rng.rows(x.shape[1], x.device), dtype)
