"""Branches of reversible layers in place: what a branch adds to a stream in the forward, its backward takes off again.

No stream is allocated anew: the backward overwrites a layer's outputs with its inputs, and their gradients with those
of the inputs. B batch, L length, E d_model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasparse.ops.random import RngContext
from megasparse.ops.tiled import GradientSums, pieces

if TYPE_CHECKING:
    from megasparse.model.block import Branch, Compute


@dataclass(frozen=True)
class Place:
    """The streams (B, L, E) of one branch. In the backward also the gradient of the stream that it reads, to which it
    adds, that of the stream that it writes, and that of its auxiliary loss.
    """

    read: Tensor
    written: Tensor
    d_read: Tensor | None = None
    d_written: Tensor | None = None
    d_auxiliary: Tensor | None = None

    @property
    def sign(self) -> int:
        """Whether the output is added to the written stream, or taken off."""
        return 1 if self.d_read is None else -1


def recomputed(compute: "Compute", place: Place, grad: Tensor) -> Tensor:
    """A branch's output. The gradient of what it reads is added to the place's; weights and source accumulate theirs.

    grad: gradient of the output.
    """
    assert place.d_read is not None and place.d_auxiliary is not None
    x = place.read.detach().requires_grad_()
    with torch.enable_grad():
        outputs = [y for y in compute(x) if y is not None]
    grads = grad, place.d_auxiliary
    torch.autograd.backward(outputs, [g.to(y.dtype) for y, g in zip(outputs, grads, strict=False)])
    assert x.grad is not None
    place.d_read.add_(x.grad)
    return outputs[0].detach()


class Tiles:
    """The tiles of a branch's streams, and what is done to each."""

    def __init__(self, branch: "Branch", place: Place, rng: RngContext):
        self.branch, self.place, self.rng = branch, place, rng
        self.x, self._written = cut(place.read, branch.tiles), cut(place.written, branch.tiles)
        self.rows = cut(rng.rows(place.read.shape[1], place.read.device), branch.tiles)
        self.dx = [] if place.d_read is None else cut(place.d_read, branch.tiles)
        self._grad = [] if place.d_written is None else cut(place.d_written, branch.tiles)

    def write(self, number: int, out: Tensor) -> None:
        """Adds the branch's output on a tile to the stream, or takes it off."""
        self.branch.write(self._written[number], out, self.rng, self.place.sign, self.rows[number])

    def grad(self, number: int) -> Tensor:
        """The gradient of the branch's output on a tile."""
        return self.branch.gradient(self._grad[number], self.rng, self.rows[number])


def inside(name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a part of a module, by their names in it."""
    return {key.removeprefix(f"{name}."): weight for key, weight in weights.items() if key.startswith(f"{name}.")}


def cut(x: Tensor, tiles: int) -> list[Tensor]:
    return [piece for (piece,) in pieces([x], min(tiles, x.shape[1]))]


def in_tiles(
    branch: "Branch", function: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor], place: Place, rng: RngContext
) -> GradientSums | None:
    """A branch that treats every position by itself, tile by tile. Returns the gradients of its weights, in a backward.

    function: from a tile of the stream, its rows and the branch's weights by name, what is added to the stream.
    """
    weights, tiles = dict(branch.named_parameters()), Tiles(branch, place, rng)
    if not tiles.dx:
        for number, (x, rows) in enumerate(zip(tiles.x, tiles.rows, strict=True)):
            tiles.write(number, function(x, rows, weights))
        return None
    sums = GradientSums(weights)
    for number, (x, rows) in enumerate(zip(tiles.x, tiles.rows, strict=True)):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = function(x, rows, {name: sums.leaf(name) for name in weights})
        (dx,) = sums.take([out], [tiles.grad(number)], [x])
        tiles.dx[number].add_(dx)
        tiles.write(number, out.detach())
    return sums


def handed_over(sums: GradientSums, wanted: Tensor) -> Tensor:
    """A zero, whose backward hands the sums to their weights. wanted: a scalar that requires a gradient, through which
    ZeRO 3 sees that a module's backward is over.
    """
    found: Tensor = _HandedOver.apply(sums, wanted, *sums.weights.values())
    return found


class _HandedOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: GradientSums, wanted: Tensor, *weights: Tensor) -> Tensor:
        ctx.sums = sums
        return torch.zeros_like(wanted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, grads[0], *ctx.sums.gradients().values()


def owned(gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients that may be overwritten: those that share memory, with themselves or each other, are copied."""
    found: list[Tensor] = []
    for grad in gradients:
        shared = any(grad.untyped_storage()._cdata == other.untyped_storage()._cdata for other in found)
        found.append(grad.clone(memory_format=torch.contiguous_format) if shared or not grad.is_contiguous() else grad)
    return tuple(found)
