"""Work on a sequence in tiles, one after another, in the backward too: the peak is one tile's, not the sequence's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.autocast import Function


def tiled(function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], tiles: int) -> Tensor:
    """`function(*inputs, *weights)`, computed on `tiles` pieces of the inputs along dimension 1.

    inputs: (B, L, ...) each; `function` must treat every position of L by itself. weights: used whole by every tile.
    Returns (B, L, ...). The backward recomputes each tile and hands every weight ONE gradient, the sum over the tiles
    (in fp32): ZeRO 2 and 3 reduce a weight's gradient as soon as it comes, so a gradient per tile would be wrong there.
    """
    tiles = min(tiles, inputs[0].shape[1])
    if tiles <= 1:
        return function(*inputs, *weights)
    return _Tiled.apply(function, tiles, len(inputs), *inputs, *weights)


class _Tiled(Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], tiles: int, count: int, *tensors: Tensor) -> Tensor:
        ctx.function, ctx.tiles, ctx.count = function, tiles, count
        ctx.save_for_backward(*tensors)
        weights = tensors[count:]
        return torch.cat([function(*tile, *weights) for tile in _pieces(tensors[:count], tiles)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        inputs, weights = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        needed = ctx.needs_input_grad[3:]
        grad_inputs = [torch.empty_like(x) if need else None for x, need in zip(inputs, needed, strict=False)]
        leaves = [w.detach().requires_grad_(need) for w, need in zip(weights, needed[ctx.count :], strict=True)]
        sums = [torch.zeros_like(w, dtype=_accumulator(w)) if w.requires_grad else None for w in leaves]
        windows = [_pieces([g], ctx.tiles) if g is not None else None for g in grad_inputs]
        pairs = zip(_pieces(inputs, ctx.tiles), _pieces([grad_output], ctx.tiles), strict=True)
        for i, (pieces, (grad,)) in enumerate(pairs):
            tile = [x.detach().requires_grad_(need) for x, need in zip(pieces, needed, strict=False)]
            with torch.enable_grad():
                output = ctx.function(*tile, *leaves)
            wanted = [x for x in (*tile, *leaves) if x.requires_grad]
            grads = iter(torch.autograd.grad(output, wanted, grad))
            for window in windows:
                if window is not None:
                    window[i][0].copy_(next(grads))
            for total in sums:
                if total is not None:
                    total += next(grads)
        totals = [t.to(w.dtype) if t is not None else None for t, w in zip(sums, weights, strict=True)]
        return (None, None, None, *grad_inputs, *totals)


def _pieces(tensors: Sequence[Tensor], tiles: int) -> list[tuple[Tensor, ...]]:
    """The tensors cut along dimension 1 into `tiles` pieces of nearly equal length."""
    return list(zip(*(torch.tensor_split(x, tiles, dim=1) for x in tensors), strict=True))


def _accumulator(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
