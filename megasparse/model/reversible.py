"""Reversible layers: the backward rebuilds every layer's input from its output, so activations do not grow with
depth.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasparse.model.block import Block, Pass, Streams


def reversible(blocks: Sequence[Block], streams: Streams, run: Pass) -> tuple[Streams, Tensor]:
    """Runs reversible blocks, keeping only the last output. Returns the streams and the sum of auxiliary losses.

    Backward, from the last block to the first (Reformer Eq. 8): X2 = Y2 − FeedForward(Y1), X1 = Y1 − Attention(X2),
    each branch run once more for its value and its gradient. Auxiliary losses are outputs, so what only they train is
    trained.
    """
    first, second, auxiliary = _Reversible.apply(*streams, blocks, run)
    return (first, second), auxiliary


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, blocks: Sequence[Block], run: Pass) -> tuple[Tensor, Tensor, Tensor]:
        streams = [x1, x2]
        total = torch.zeros((), device=x1.device)
        for block in blocks:
            auxiliary, *streams = block(run, None, *streams)
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
        replay = Pass(run.draws, run.padding, run.memories, run.targets)
        for memory in run.memories:
            memory.replay()
        for block in reversed(ctx.blocks):
            out, gradient = _branch(partial(block.feed_forward, draws=run.draws), y1, d2)
            y2 = y2 - out
            d1 = d1 + gradient
            out, gradient = _branch(partial(block.attention, run=replay), y2, d1, d_auxiliary)
            y1 = y1 - out
            d2 = d2 + gradient
        return d1, d2, None, None


def _branch(branch: Callable[[Tensor], Any], x: Tensor, *grads: Tensor) -> tuple[Tensor, Tensor]:
    """branch(x), and the gradient of x; the gradients of the branch's weights go to the weights.

    An attention branch returns its auxiliary loss too, or None; grads: of all that it returns.
    """
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        result = branch(x)
    outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None]
    torch.autograd.backward(outputs, grads[: len(outputs)])
    assert x.grad is not None
    return outputs[0].detach(), x.grad
