"""Reversible layers: the backward rebuilds every layer's input from its output, so activations do not grow with depth."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megasparse.model.block import Block, Pass, Streams


def reversible(blocks: Sequence[Block], streams: Streams, run: Pass) -> tuple[Streams, Tensor]:
    """Runs reversible blocks, keeping only the last output. Returns the streams and the sum of auxiliary losses.

    Backward, from the last block to the first (Reformer Eq. 8): X2 = Y2 − FeedForward(Y1), X1 = Y1 − Attention(X2), each
    branch run once more for its value and its gradient. Auxiliary losses are outputs, so what only they train is trained.
    """
    first, second, auxiliary = _Reversible.apply(*streams, blocks, run)
    return (first, second), auxiliary


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor, blocks: Sequence[Block], run: Pass
    ) -> tuple[Tensor, Tensor, Tensor]:
        streams: Streams = (x1, x2)
        total = torch.zeros((), device=x1.device)
        for block in blocks:
            streams, auxiliary = block(streams, run)
            if auxiliary is not None:
                total = total + auxiliary
        ctx.blocks, ctx.run = blocks, run
        ctx.save_for_backward(*streams)
        return streams[0], streams[1], total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d1, d2, d_auxiliary = grads
        y1, y2 = ctx.saved_tensors
        run: Pass = ctx.run
        # A pass of its own: what is recomputed adds nothing to the statistics, and takes decisions from the memories.
        replay = Pass(run.draws, run.padding, run.memories)
        for memory in run.memories:
            memory.replay()
        for block in reversed(ctx.blocks):
            out, gradient = _branch(lambda y, run=run, feed=block.feed_forward: (feed(y, run.draws), None), y1, d2, None)
            y2 = y2 - out
            d1 = d1 + gradient
            out, gradient = _branch(lambda y, attend=block.attention: attend(y, replay), y2, d1, d_auxiliary)
            y1 = y1 - out
            d2 = d2 + gradient
        return d1, d2, None, None


def _branch(
    function: Callable[[Tensor], tuple[Tensor, Tensor | None]], x: Tensor, grad: Tensor, grad_auxiliary: Tensor | None
) -> tuple[Tensor, Tensor]:
    """function(x), and the gradient of x; the gradients of the branch's weights go to the weights."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        out, auxiliary = function(x)
    outputs = [out] if auxiliary is None else [out, auxiliary]
    torch.autograd.backward(outputs, [grad, grad_auxiliary][: len(outputs)])
    assert x.grad is not None
    return out.detach(), x.grad
