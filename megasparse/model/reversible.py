"""Reversible layers: the backward rebuilds inputs from outputs, so activations do not grow with depth."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megasparse.model.block import Block
from megasparse.model.branch import Pass, Place, owned
from megasparse.ops.operator import Function, remember_autocast


class Reversible(Function):
    """Reversible blocks, of which only the last output is kept: `apply` returns two streams and the sum of auxiliary
    losses, which are outputs so that what only they train is trained.

    source: (B, S, E), which the blocks' cross-attention reads. Backward, from the last branch to the first (Reformer
    Eq. 8, where the streams change places after each branch): X1 = Y2 − Branch(Y1), X2 = Y1, each branch run once more
    for its value and its gradients. The source's gradients are summed over the blocks and handed on as one.
    given_away: the backward may overwrite the returned streams and their gradients, which it copies otherwise. Nobody
    may read the streams after that, and nothing but one reader may have made the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor, source: Tensor | None, blocks: Sequence[Block], run: Pass, given_away: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        remember_autocast(ctx, x1)
        total = torch.zeros((), device=x1.device)
        first, second = x1.clone(), x2.clone()
        for block in blocks:
            for branch, compute in block.branches(run, None, source):
                auxiliary = branch.rewrite(compute, Place(second, first), run)
                first, second = second, first
                if auxiliary is not None:
                    total = total + auxiliary
        ctx.blocks, ctx.run, ctx.given_away, ctx.one = blocks, run, given_away, x1 is x2
        ctx.save_for_backward(first, second, source)
        return first, second, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d1, d2, d_auxiliary = grads
        y1, y2, source = ctx.saved_tensors
        d1, d2 = owned([d1, d2]) if ctx.given_away else (d1.clone(), d2.clone())
        if not ctx.given_away:
            y1, y2 = y1.clone(), y2.clone()
        if source is not None:
            source = source.detach().requires_grad_()
        replay = ctx.run.replay()
        for block in reversed(ctx.blocks):
            for branch, compute in reversed(block.branches(replay, None, source)):
                branch.rewrite(compute, Place(y1, y2, d1, d2, d_auxiliary), replay)
                y1, y2, d1, d2 = y2, y1, d2, d1
        if ctx.one:  # both streams are the embedding: their gradients are summed in place
            d1, d2 = d1.add_(d2), None  # type: ignore[assignment]
        return d1, d2, None if source is None else source.grad, None, None, None
