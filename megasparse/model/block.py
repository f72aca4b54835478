"""Layer of the stack: attention, cross-attention (in an encoder–decoder) and feed-forward branches on residual streams;
and reversible layers, whose backward reconstructs inputs from outputs: activation memory is independent of depth.

B batch, L length, S source length, E d_model, F d_ff.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext
from megasparse.attention.cross import CrossAttention, EncoderOutput, SourceKeys
from megasparse.attention.heads import LayerCache, MultiHeadAttention
from megasparse.config.schema import GATED, ModelConfig
from megasparse.errors import ConfigError
from megasparse.model.branch import (
    BackwardTiles,
    Branch,
    Compute,
    Gathered,
    Pass,
    Residual,
    Streams,
    StreamTiles,
    inside,
    owned,
)
from megasparse.model.head_groups import HeadGroups, InGroups, group_weights
from megasparse.model.recompute import Recomputed
from megasparse.ops.operator import Function, linear, remember_autocast
from megasparse.ops.random import RngContext, dropout, relu_dropout
from megasparse.ops.tiled import GradientSums, tiled

_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": _tanh, "swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": _tanh,
}  # fmt: skip


class AttentionBranch(Branch):
    purpose = "attention dropout"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.attention = MultiHeadAttention(config, layer, seed=None)
        self.gathered_at_once = self.attention.groups > 1

    def update(self, x: Tensor, run: Pass, cache: LayerCache | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output for a stream x (B, L, E), and the auxiliary loss. cache: empty, to prefill, or None."""
        if self.attention.groups > 1 and cache is None:
            out, loss = InGroups.apply(self, self.attention, run, x, *group_weights(self).values())
            return out, loss
        decisions = run.recompute["attention", self.layer]
        context = AttentionContext(self.layer, run.rng, recompute=decisions, targets=run.targets, tokens=run.tokens)
        output = self.attention(self.read(x), context, run.padding, cache=cache)
        run.note(self.layer, output.statistics)
        return output.out, output.auxiliary_loss

    def decode(self, x: Tensor, run: Pass, cache: LayerCache, position: int) -> Tensor:
        """Return the output for the new token at `position`, x (B, 1, E)."""
        context = AttentionContext(self.layer, run.rng, tokens=run.tokens)
        return self.attention.decode(self.read(x), cache, position, context, run.padding)

    def rewrite_tiles(self, read: Tensor, written: Tensor, run: Pass) -> Tensor | None:
        tiles = StreamTiles(self, read, written, run.rng)
        auxiliary, statistics = HeadGroups(self, self.attention, run, tiles.x).forward(tiles.write)
        run.note(self.layer, statistics)
        return auxiliary

    def restore_tiles(self, residual: Residual, run: Pass) -> GradientSums:
        tiles = BackwardTiles(self, residual, run.rng)
        groups = HeadGroups(self, self.attention, run, tiles.x)
        return groups.backward(tiles.write, tiles.grad, tiles.dx, residual.d_auxiliary)


class CrossAttentionBranch(Branch):
    purpose = "cross-attention dropout"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.attention = CrossAttention(config)

    def update(self, x: Tensor, run: Pass, source: EncoderOutput | SourceKeys) -> tuple[Tensor, None]:
        return self.attention(self.read(x), source, AttentionContext(self.layer, run.rng, part=run.padding.part)), None

    def new_cache(self, source: EncoderOutput, rng: RngContext) -> SourceKeys:
        return self.attention.read(source, AttentionContext(self.layer, rng))


class FeedForwardBranch(Branch):
    purpose = "feed-forward dropout"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.feed_forward = FeedForward(config, layer)
        self.gathered_at_once = config.blocks == "reversible"

    def update(self, x: Tensor, run: Pass) -> tuple[Tensor, None]:
        return self.feed_forward(self.read(x), run.rng), None

    def rewrite_tiles(self, read: Tensor, written: Tensor, run: Pass) -> None:
        tiles = StreamTiles(self, read, written, run.rng)
        weights = dict(self.named_parameters())
        for number, x in enumerate(tiles.x):
            tiles.write(number, self._of_tile(x, tiles.rows[number], run.rng, weights))

    def restore_tiles(self, residual: Residual, run: Pass) -> GradientSums:
        tiles = BackwardTiles(self, residual, run.rng)
        weights = dict(self.named_parameters())
        sums = GradientSums(weights)
        for number, tile in enumerate(tiles.x):
            x = tile.detach().requires_grad_()
            with torch.enable_grad():
                out = self._of_tile(x, tiles.rows[number], run.rng, {name: sums.leaf(name) for name in weights})
            (dx,) = sums.take([out], [tiles.grad(number)], [x])
            tiles.dx[number].add_(dx)
            tiles.write(number, out.detach())
        return sums

    def _of_tile(self, x: Tensor, rows: Tensor, rng: RngContext, weights: Mapping[str, Tensor]) -> Tensor:
        return self.feed_forward.of_tile(self.read(x, weights), rows, rng, inside("feed_forward", weights))


class FeedForward(nn.Module):
    """Feed-forward layer W2·dropout(f(W1·x + b1)) + b2, or gated W2·dropout(f(W3·x + b3)·(W1·x + b1)) + b2, with the
    activation f of `model.feed_forward`; without dropout if `style` is bert. Computed for one of T tiles at a time
    (Reformer Eq. 10).
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.tiles = layer, config.feed_forward_tiles
        bert = config.style == "bert"
        kind = config.feed_forward or ("gelu" if bert else "relu")
        self.activation = ACTIVATIONS[kind]
        self.rate = 0.0 if bert else config.dropout
        # Parameters of this module itself, so that ZeRO 3 gathers them once for all tiles.
        self.up = nn.Parameter(torch.empty(config.d_ff, config.d_model))
        self.up_bias = nn.Parameter(torch.zeros(config.d_ff)) if config.feed_forward_biases else None
        self.down = nn.Parameter(torch.empty(config.d_model, config.d_ff))
        self.down_bias = nn.Parameter(torch.zeros(config.d_model)) if config.feed_forward_biases else None
        gated = kind in GATED
        self.gate = nn.Parameter(torch.empty(config.d_ff, config.d_model)) if gated else None
        self.gate_bias = nn.Parameter(torch.zeros(config.d_ff)) if gated and config.feed_forward_biases else None

    def forward(self, x: Tensor, rng: RngContext) -> Tensor:
        """Run the feed-forward. x: (B, L, E)."""
        weights = dict(self.named_parameters(recurse=False))

        def tile(x: Tensor, rows: Tensor, *values: Tensor) -> Tensor:
            return self.of_tile(x, rows, rng, dict(zip(weights, values, strict=True)))

        return tiled(tile, (x, rng.rows(x.shape[1], x.device)), list(weights.values()), self.tiles)

    def of_tile(self, x: Tensor, rows: Tensor, rng: RngContext, w: Mapping[str, Tensor]) -> Tensor:
        """Run it on a tile (B, T, E) with weights w. rows: (B, T), see `RngContext.rows`."""
        rate = self.rate if rng.training else 0.0
        key = rng.key(self.layer, "feed-forward hidden dropout")
        hidden = linear(x, w["up"], w.get("up_bias"))  # (B, T, F)
        if "gate" in w:
            hidden = dropout(self.activation(linear(x, w["gate"], w.get("gate_bias"))) * hidden, rate, key, rows)
        elif self.activation is F.relu:
            hidden = relu_dropout(hidden, rate, key, rows)
        else:
            hidden = dropout(self.activation(hidden), rate, key, rows)
        return linear(hidden, w["down"], w.get("down_bias"))


class Block(Gathered):
    """One layer. Reversible (Reformer Eq. 9): Y1 = X1 + Attention(X2), Y2 = X2 + FeedForward(Y1). With cross-attention:
    Y1 as before, Y2 = X2 + CrossAttention(Y1, source), Z1 = Y1 + FeedForward(Y2); the next layer reads (Y2, Z1).
    Ordinary: each branch adds its output to one stream; `style` bert normalises the stream after each branch.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention = AttentionBranch(config, layer)
        self.cross_attention = CrossAttentionBranch(config, layer) if config.source else None
        self.feed_forward = FeedForwardBranch(config, layer)
        self.tiles, self.offload = config.feed_forward_tiles, config.activations == "checkpoint_cpu"
        self.gathered_at_once = config.activations.startswith("checkpoint")
        self.recomputed: list[Block] = []
        """This block and the next ones, recomputed together by `forward`; set by the stack."""

    def update(
        self, run: Pass, cache: LayerCache | None, source: Tensor | None, *streams: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return `whole` of all blocks that are recomputed together."""
        if not self.recomputed or cache is not None:
            return self.whole(run, cache, source, *streams)
        weights = [w for block in self.recomputed for w in block.parameters() if w.requires_grad]
        trained = weights if torch.is_grad_enabled() else []
        out, auxiliary = Recomputed.apply(self.recomputed, run, source, streams[0], *trained)
        return auxiliary, out

    def runs_in_tiles(self, run: Pass) -> bool:
        """Return True if a recomputed pass can run tile by tile, see `model.recompute`."""
        layer, padding = self.attention.attention, run.padding
        mechanisms = [layer.mechanism(kind) for kind in layer.split]
        dropout = run.rng.training and any(mechanism.spec.dropout for mechanism in mechanisms)
        return (
            self.tiles > 1 and layer.causal and layer.groups == 1 and self.cross_attention is None
            and padding.key_mask is None and not dropout
            and all(heads // layer.group % padding.part.size == 0 for heads in layer.split.values())
            and all(mechanism.attends_prefix(layer.group, padding.part.size) for mechanism in mechanisms)
        )  # fmt: skip

    def whole(
        self, run: Pass, cache: LayerCache | None, source: Tensor | None, *streams: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the auxiliary loss (or None) and the new streams of this block, on whole sequences.

        Args:
            cache: Empty cache to prefill, or None.
            source: (B, S, E), or None without a source or if the cache contains it.
        """
        auxiliary: Tensor | None = None
        for branch, compute in self.branches(run, cache, source):
            out, loss = compute(streams[-1])
            streams = branch.advance(streams, out, run.rng)
            auxiliary = auxiliary if loss is None else loss
        return auxiliary, *streams

    def decode(self, run: Pass, cache: LayerCache, position: int, streams: Streams) -> Streams:
        """Run the layer on the new token at `position`, (B, 1, E) streams. Returns the new streams."""
        out = self.attention.entry(self.attention.decode)(streams[-1], run, cache, position)
        streams = self.attention.advance(streams, out, run.rng)
        for branch, compute in self.branches(run, cache, None)[1:]:
            out, _ = compute(streams[-1])
            streams = branch.advance(streams, out, run.rng)
        return streams

    def branches(self, run: Pass, cache: LayerCache | None, source: Tensor | None) -> list[tuple[Branch, Compute]]:
        """Return the branches in order, with their functions of whole sequences."""
        attention, feed_forward = self.attention, self.feed_forward
        branches: list[tuple[Branch, Compute]] = [
            (attention, partial(attention.entry(attention.update), run=run, cache=cache))
        ]
        if self.cross_attention is not None:
            states: EncoderOutput | SourceKeys
            if source is not None:
                states = EncoderOutput(source, run.source_mask)
            else:
                assert cache is not None
                states = cast(SourceKeys, cache["cross"])
            branches.append((self.cross_attention, partial(self.cross_attention.update, run=run, source=states)))
        return [*branches, (feed_forward, partial(feed_forward.entry(feed_forward.update), run=run))]


class Reversible(Function):
    """Reversible blocks that store only the last output. `apply` returns two streams and the sum of auxiliary losses,
    whose gradient reaches weights that only these losses train.

    source: (B, S, E), input of cross-attention. The backward runs from the last branch to the first (Reformer Eq. 8;
    streams are swapped after each branch): X1 = Y2 − Branch(Y1), X2 = Y1. donated: the backward may overwrite the
    returned streams and their gradients: nothing reads the streams after it, and a single consumer computes the
    gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor, source: Tensor | None, blocks: Sequence[Block], run: Pass, donated: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        remember_autocast(ctx, x1)
        total = torch.zeros((), device=x1.device)
        first, second = x1.clone(), x2.clone()
        for block in blocks:
            for branch, compute in block.branches(run, None, source):
                auxiliary = branch.rewrite(compute, second, first, run)
                first, second = second, first
                if auxiliary is not None:
                    total = total + auxiliary
        ctx.blocks, ctx.run, ctx.donated, ctx.one = blocks, run, donated, x1 is x2
        ctx.save_for_backward(first, second, source)
        return first, second, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d1, d2, d_auxiliary = grads
        if not torch.autograd._is_checkpoint_valid():  # branches write `.grad`, which autograd.grad never reads
            problem = '"reversible" cannot return gradients of weights from torch.autograd.grad or backward(inputs=...)'
            raise ConfigError("model.activations", problem, 'Call backward() without inputs, or set it to "stored"')
        y1, y2, source = ctx.saved_tensors
        d1, d2 = owned([d1, d2]) if ctx.donated else (d1.clone(), d2.clone())
        if not ctx.donated:
            y1, y2 = y1.clone(), y2.clone()
        if source is not None:
            source = source.detach().requires_grad_()
        replay = ctx.run.replay()
        for block in reversed(ctx.blocks):
            for branch, compute in reversed(block.branches(replay, None, source)):
                branch.restore(compute, Residual(y1, y2, d1, d2, d_auxiliary), replay)
                y1, y2, d1, d2 = y2, y1, d2, d1
        if ctx.one:  # both streams are the embedding: sum their gradients in place
            d1, d2 = d1.add_(d2), None  # type: ignore[assignment]
        return d1, d2, None if source is None else source.grad, None, None, None
