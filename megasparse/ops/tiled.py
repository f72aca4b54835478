"""Process a sequence in tiles, in forward and backward, so that peak memory depends only on the tile size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.operator import Function, remember_autocast, wide_dtype


def tiled(function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], tiles: int) -> Tensor:
    """Compute `function(*inputs, *weights)` on `tiles` pieces of the inputs along dimension 1.

    inputs: (B, L, ...) each; `function` must be independent for each position of L. weights: passed whole to every
    tile. Returns (B, L, ...). The backward recomputes each tile and returns the sum over tiles (in fp32) of a weight's
    gradient: ZeRO 2 and 3 reduce it once it arrives, so one gradient per tile would be wrong.
    """
    tiles = min(tiles, inputs[0].shape[1])
    if tiles <= 1:
        return function(*inputs, *weights)
    return _Tiled.apply(function, tiles, len(inputs), *inputs, *weights)


class _Tiled(Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], tiles: int, count: int, *tensors: Tensor) -> Tensor:
        remember_autocast(ctx, *tensors)
        ctx.function = function
        ctx.tiles = tiles
        ctx.count = count
        ctx.save_for_backward(*tensors)
        weights = tensors[count:]
        return torch.cat([function(*tile, *weights) for tile in pieces(tensors[:count], tiles)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[: ctx.count]
        weights = ctx.saved_tensors[ctx.count :]
        needed = ctx.needs_input_grad[3:]
        grad_inputs = [torch.empty_like(x) if need else None for x, need in zip(inputs, needed, strict=False)]
        windows = [pieces([grad], ctx.tiles) for grad in grad_inputs if grad is not None]
        named = {str(number): weight for number, weight in enumerate(weights)}
        sums = GradientSums(named)
        tiles = zip(pieces(inputs, ctx.tiles), pieces(grad_outputs, ctx.tiles), strict=True)
        for number, (tile, grads) in enumerate(tiles):
            leaves = [x.detach().requires_grad_(need) for x, need in zip(tile, needed, strict=False)]
            with torch.enable_grad():
                output = ctx.function(*leaves, *map(sums.leaf, named))
            gradients = sums.take([output], grads, [x for x in leaves if x.requires_grad])
            for window, grad in zip(windows, gradients, strict=True):
                window[number][0].copy_(grad)
        weight_grads = sums.gradients()
        return None, None, None, *grad_inputs, *map(weight_grads.get, named)


class GradientSums:
    """Sums over tiles of weight gradients, in fp32 or wider."""

    def __init__(self, weights: Mapping[str, Tensor]):
        self._all = weights
        self.weights = {name: w for name, w in weights.items() if w.requires_grad}
        self._sums = {name: torch.zeros_like(w, dtype=wide_dtype(w)) for name, w in self.weights.items()}
        self._used: list[tuple[Tensor, Tensor]] = []

    def leaf(self, name: str, dim: int = 0, start: int = 0, count: int | None = None) -> Tensor:
        """Return the weight, or `count` of its rows or columns, as a leaf whose gradient the next `take` adds."""
        weight = self._all[name].detach()
        total = self._sums.get(name)
        if count is not None:
            weight = weight.narrow(dim, start, count)
            total = None if total is None else total.narrow(dim, start, count)
        if total is not None:
            self._used.append((weight.requires_grad_(), total))
        return weight

    def itself(self, name: str) -> None:
        """Make the next `take` add the gradient of the weight itself, for computations that read it directly."""
        if name in self.weights:
            self._used.append((self.weights[name], self._sums[name]))

    def total(self, name: str) -> Tensor:
        """Return the sum of a weight so far, in fp32 or wider."""
        return self._sums[name]

    def take(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the gradients of `inputs`, None for the unused, and add those of the leaves since the last `take`."""
        leaves = self._used
        self._used = []
        cast = [grad.to(y.dtype) for y, grad in zip(outputs, grads, strict=True)]
        gradients = torch.autograd.grad(outputs, [*inputs, *(leaf for leaf, _ in leaves)], cast, allow_unused=True)
        for (_, total), grad in zip(leaves, gradients[len(inputs) :], strict=True):
            if grad is not None:
                total += grad
        return gradients[: len(inputs)]

    def gradients(self) -> dict[str, Tensor]:
        """Return the summed gradient of each weight, in the dtype of the weight."""
        return {name: self._sums.pop(name).to(weight.dtype) for name, weight in self.weights.items()}


def pieces(tensors: Sequence[Tensor], tiles: int) -> list[tuple[Tensor, ...]]:
    """Split the tensors along dimension 1 into `tiles` pieces of nearly equal length."""
    return list(zip(*(torch.tensor_split(x, tiles, dim=1) for x in tensors), strict=True))
