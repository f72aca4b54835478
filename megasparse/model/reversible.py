"""Reversible layers: the backward rebuilds inputs from outputs, so activations do not grow with depth."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megasparse.model.block import Block, Compute, Pass, Streams
from megasparse.ops.autocast import Function


def reversible(blocks: Sequence[Block], streams: Streams, source: Tensor | None, run: Pass) -> tuple[Streams, Tensor]:
    """Runs reversible blocks, keeping only the last output. Returns the streams and the sum of auxiliary losses.

    source: (B, S, E), what the blocks' cross-attention sees. Backward, from the last branch to the first (Reformer Eq.
    8, where the streams change places after each branch): X1 = Y2 − Branch(Y1), X2 = Y1, each branch run once more for
    its value and its gradients. The source's gradients are summed over the blocks and handed on as one. Auxiliary
    losses are outputs, so what only they train is trained.
    """
    first, second, auxiliary = _Reversible.apply(*streams, source, blocks, run)
    return (first, second), auxiliary


class _Reversible(Function):
    """In torch.compile it stays outside of the graphs, of which the forward is one, and so is each branch again."""

    @staticmethod
    @torch._disable_dynamo(recursive=False)  # torch.compiler.disable imports the compiler at once
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor, source: Tensor | None, blocks: Sequence[Block], run: Pass
    ) -> tuple[Tensor, Tensor, Tensor]:
        first, second, total = _forward(blocks, run, source, x1, x2)
        ctx.blocks, ctx.run = blocks, run
        ctx.save_for_backward(first, second, source)
        return first, second, total

    @staticmethod
    @torch._disable_dynamo(recursive=False)  # torch.compiler.disable imports the compiler at once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d1, d2, d_auxiliary = grads
        y1, y2, source = ctx.saved_tensors
        if source is not None:
            source = source.detach().requires_grad_()
        replay = ctx.run.replay()
        for block in reversed(ctx.blocks):
            for branch, compute in reversed(block.branches(replay, None, source)):
                replay.gradient = branch.gradient(d2, replay.rng)
                out, gradient = _again(compute, y1, replay.gradient, d_auxiliary)
                y1, y2 = branch.plus(y2, out, replay.rng, sign=-1), y1
                d1, d2 = d2, d1 + gradient
        return d1, d2, None if source is None else source.grad, None, None


def _forward(
    blocks: Sequence[Block], run: Pass, source: Tensor | None, *streams: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.zeros((), device=streams[0].device)
    for block in blocks:
        auxiliary, *streams = block(run, None, source, *streams)  # type: ignore[assignment]
        if auxiliary is not None:
            total = total + auxiliary
    first, second = streams
    return first, second, total


def _again(compute: Compute, x: Tensor, *grads: Tensor) -> tuple[Tensor, Tensor]:
    """A branch's output for x, and the gradient of x; weights and source accumulate theirs.

    grads: gradients of its output and of its auxiliary loss.
    """
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        outputs = [y for y in compute(x) if y is not None]
    torch.autograd.backward(outputs, [grad.to(y.dtype) for y, grad in zip(outputs, grads, strict=False)])
    assert x.grad is not None
    return outputs[0].detach(), x.grad
