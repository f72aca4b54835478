"""A layer of the stack: an attention branch and a feed-forward branch around residual streams. B batch, L length, E
d_model.

Streams and norms are fp32. A branch computes in the dtype of its weights, and is added to a stream in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, Memory, Targets
from megasparse.attention.heads import AttentionLayer, Padding
from megasparse.config.schema import ModelConfig
from megasparse.model.feed_forward import FeedForward
from megasparse.model.norm import Norm
from megasparse.ops.random import Draws, dropout

Streams = tuple[Tensor, ...]
"""The residual streams, (B, L, E) fp32 each: two in a reversible stack, one in an ordinary one."""


@dataclass
class Pass:
    """One forward pass: what its draws depend on, its padding, what its layers decided (one Memory each), and in
    training what the model is to tell.
    """

    draws: Draws
    padding: Padding
    memories: list[Memory]
    targets: Targets | None = None
    statistics: dict[str, list[Tensor]] = field(default_factory=dict)


class Branch(nn.Module):
    """What is added to a stream, and its norm: of what the branch reads (pre-norm), or with `style` bert of the sum
    (post-norm).
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.rate, self.post_norm = layer, config.dropout, config.style == "bert"
        self.norm = Norm(config)

    def read(self, stream: Tensor) -> Tensor:
        """What the branch reads of a stream, in the dtype of its weights."""
        return (stream if self.post_norm else self.norm(stream)).to(self.norm.weight.dtype)

    def add(self, stream: Tensor, out: Tensor) -> Tensor:
        """An ordinary block's stream after the branch."""
        return self.norm(stream + out) if self.post_norm else stream + out


class AttentionBranch(Branch):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.attention = AttentionLayer(config, layer)

    def forward(self, x: Tensor, run: Pass, cache: Any = None) -> tuple[Tensor, Tensor | None]:
        """x: (B, L, E). Returns what to add to the stream and the auxiliary loss."""
        context = AttentionContext(self.layer, run.draws, memory=run.memories[self.layer], targets=run.targets)
        output = self.attention(self.read(x), context, run.padding, cache=cache)
        for name, value in output.statistics.items():
            run.statistics.setdefault(f"attention/{name}", []).append(value)
        return _dropped(output.out, self.rate, run.draws, self.layer, "attention dropout"), output.auxiliary_loss

    def decode(self, x: Tensor, cache: Any, position: int, draws: Draws) -> Tensor:
        return self.attention.decode(self.read(x), cache, position, AttentionContext(self.layer, draws)).float()


class FeedForwardBranch(Branch):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.feed_forward = FeedForward(config, layer)

    def forward(self, x: Tensor, draws: Draws) -> Tensor:
        out = self.feed_forward(self.read(x), draws)
        return _dropped(out, self.rate, draws, self.layer, "feed-forward dropout")


class Block(nn.Module):
    """Reversible: Y1 = X1 + Attention(X2), Y2 = X2 + FeedForward(Y1) (Reformer Eq. 9). Ordinary: both added to the
    one stream, which with `style` bert is normalised after each.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention = AttentionBranch(config, layer)
        self.feed_forward = FeedForwardBranch(config, layer)

    def forward(self, run: Pass, cache: Any, *streams: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the auxiliary loss (or None) and the new streams. A given empty cache takes in the whole sequence.

        Streams are arguments of their own because the checkpointing wrapper looks for tensors no deeper.
        """
        auxiliary: list[Tensor | None] = []

        def attend(x: Tensor) -> Tensor:
            out, loss = self.attention(x, run, cache)
            auxiliary.append(loss)
            return out

        streams = self._residual(streams, attend, lambda x: self.feed_forward(x, run.draws))
        return auxiliary[0], *streams

    def decode(self, streams: Streams, cache: Any, position: int, draws: Draws) -> Streams:
        """One new token: streams of (B, 1, E)."""
        return self._residual(
            streams,
            lambda x: self.attention.decode(x, cache, position, draws),
            lambda x: self.feed_forward(x, draws),
        )

    def _residual(
        self, streams: Streams, attend: Callable[[Tensor], Tensor], feed: Callable[[Tensor], Tensor]
    ) -> Streams:
        if len(streams) == 2:
            first = streams[0] + attend(streams[1])
            return first, streams[1] + feed(first)
        (x,) = streams
        x = self.attention.add(x, attend(x))
        return (self.feed_forward.add(x, feed(x)),)


def _dropped(x: Tensor, rate: float, draws: Draws, layer: int, purpose: str) -> Tensor:
    """A branch's output in fp32, after dropout when training."""
    x = x.float()
    if not draws.training or rate == 0.0:
        return x
    return dropout(x, rate, draws.key(layer, purpose), draws.rows(x.shape[1], x.device))
