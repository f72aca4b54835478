"""Work on a sequence in tiles, one after another, in the backward too: the peak is one tile's, not the sequence's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megasparse.ops.autocast import Function


def tiled(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    tiles: int,
    gradient: Tensor | None = None,
) -> Tensor:
    """`function(*inputs, *weights)`, computed on `tiles` pieces of the inputs along dimension 1.

    inputs: (B, L, ...) each; `function` must treat every position of L by itself. weights: used whole by every tile.
    Returns (B, L, ...). The backward recomputes each tile and hands every weight ONE gradient, the sum over the tiles
    (in fp32): ZeRO 2 and 3 reduce a weight's gradient as soon as it comes, so a gradient per tile would be wrong there.
    gradient: that of the result, where it is known before (a reversible layer's, when it is recomputed): the backward
    then needs no tile again, and takes no other gradient.
    """
    tiles = min(tiles, inputs[0].shape[1])
    if tiles <= 1:
        return function(*inputs, *weights)
    if torch.compiler.is_compiling() and gradient is None:  # a graph sums each weight's gradients by itself
        again = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([again(*tile, *weights) for tile in _pieces(inputs, tiles)], dim=1)
    return _Tiled.apply(function, tiles, len(inputs), gradient, *inputs, *weights)


class _Tiled(Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], tiles: int, count: int, gradient: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        ctx.function, ctx.tiles, ctx.count, ctx.known = function, tiles, count, gradient is not None
        if gradient is not None:
            outputs: list[Tensor] = []
            needed = [x.requires_grad for x in tensors]
            found = _gradients(function, tensors, count, tiles, gradient, needed, outputs)
            ctx.save_for_backward(*found)
            return torch.cat(outputs, dim=1)
        ctx.save_for_backward(*tensors)
        weights = tensors[count:]
        return torch.cat([function(*tile, *weights) for tile in _pieces(tensors[:count], tiles)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.saved_tensors
        if not ctx.known:
            needed = ctx.needs_input_grad[4:]
            found = _gradients(ctx.function, found, ctx.count, ctx.tiles, grad_outputs[0], needed, None)
        return None, None, None, None, *found


def _gradients(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    count: int,
    tiles: int,
    gradient: Tensor,
    needed: Sequence[bool],
    outputs: list[Tensor] | None,
) -> list[Tensor | None]:
    """The gradients of the `count` inputs and of weights that need one, by tiles. outputs: takes tiles' values."""
    inputs, weights = tensors[:count], tensors[count:]
    grad_inputs = [torch.empty_like(x) if need else None for x, need in zip(inputs, needed, strict=False)]
    leaves = [w.detach().requires_grad_(need) for w, need in zip(weights, needed[count:], strict=True)]
    sums = [torch.zeros_like(w, dtype=_accumulator(w)) if w.requires_grad else None for w in leaves]
    windows = [_pieces([g], tiles) if g is not None else None for g in grad_inputs]
    pairs = zip(_pieces(inputs, tiles), _pieces([gradient], tiles), strict=True)
    for i, (pieces, (grad,)) in enumerate(pairs):
        tile = [x.detach().requires_grad_(need) for x, need in zip(pieces, needed, strict=False)]
        with torch.enable_grad():
            output = function(*tile, *leaves)
        wanted = [x for x in (*tile, *leaves) if x.requires_grad]
        grads = iter(torch.autograd.grad(output, wanted, grad.to(output.dtype)))
        for window in windows:
            if window is not None:
                window[i][0].copy_(next(grads))
        for total in sums:
            if total is not None:
                total += next(grads)
        if outputs is not None:
            outputs.append(output.detach())
    totals = [t.to(w.dtype) if t is not None else None for t, w in zip(sums, weights, strict=True)]
    return [*grad_inputs, *totals]


def _pieces(tensors: Sequence[Tensor], tiles: int) -> list[tuple[Tensor, ...]]:
    """The tensors cut along dimension 1 into `tiles` pieces of nearly equal length."""
    return list(zip(*(torch.tensor_split(x, tiles, dim=1) for x in tensors), strict=True))


def _accumulator(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
