"""Residual branches: compute an update from one stream and add it to another, at once or in place and tile by tile.

In a reversible stack the forward adds each branch's output to a stream in place, and the backward subtracts it again.
Streams are fp32 or bf16 (`model.residual_dtype`), norms fp32. A branch computes in the dtype of its weights and is
added to a stream in fp32. B batch, L length, E d_model.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from megasparse.attention.contract import RecomputeCache, Targets
from megasparse.attention.heads import Padding
from megasparse.config.schema import ModelConfig
from megasparse.ops.normalize import Norm
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.random import RngContext, add_dropout, add_dropout_, dropout
from megasparse.ops.tiled import GradientSums, pieces

P = ParamSpec("P")
R = TypeVar("R")
Streams = tuple[Tensor, ...]
"""The residual streams, (B, L, E) each, of one dtype: two in a reversible stack, one in an ordinary stack."""
Compute = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Function of a branch: input stream -> update (B, L, E) and auxiliary loss or None."""


@dataclass
class Pass:
    """One forward pass: random state, padding, training targets, mask of the source's real tokens, and the decisions of
    its branches, by purpose and layer.
    """

    rng: RngContext
    padding: Padding
    targets: Targets | None = None
    source_mask: Tensor | None = None
    tokens: Tensor | None = None
    """See AttentionContext.tokens."""
    donated: bool = False
    """True if the backward may overwrite the streams and their gradients, see `Reversible`."""
    statistics: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Statistics by name and layer."""
    recompute: defaultdict[tuple[str, int], RecomputeCache] = field(default_factory=lambda: defaultdict(RecomputeCache))

    def replay(self) -> "Pass":
        """Return the pass of a recomputation, which replays cached decisions."""
        for cache in self.recompute.values():
            cache.replay()
        return replace(self, statistics={})

    def undecided(self) -> "Pass":
        """Return a copy with separate, empty statistics and decisions."""
        return replace(self, statistics={}, recompute=defaultdict(RecomputeCache))

    def note(self, layer: int, statistics: Mapping[str, Tensor]) -> None:
        for name, value in statistics.items():
            self.statistics.setdefault(f"attention/{name}", {})[layer] = value


@dataclass(frozen=True)
class Residual:
    """Streams (B, L, E) of a branch in the backward, their gradients (d_read is added to), and the auxiliary loss's."""

    read: Tensor
    written: Tensor
    d_read: Tensor
    d_written: Tensor
    d_auxiliary: Tensor


class Gathered(nn.Module):
    """Module with several methods that read its weights. A call runs one of them, because ZeRO 3 gathers the weights of
    a module when it is called.

    Example:
        >>> logits = head(head.logits, streams)
    """

    gathered_at_once: bool = False
    """True if its methods read weights of submodules, for example tile by tile; ZeRO 3 gathers them at each call."""

    def forward(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with self._loaded() if self.gathered_at_once else nullcontext():
            return method(*args, **kwargs)

    @contextmanager
    def _loaded(self) -> Iterator[None]:
        """Load the weights that accelerate's hooks offload, which otherwise load a submodule when it is called."""
        hooks = [(hook, part) for part in self.modules() if (hook := getattr(part, "_hf_hook", None)) is not None]
        for hook, part in hooks:
            hook.pre_forward(part)
        yield
        for hook, part in hooks:
            hook.post_forward(part, None)


class Branch(Gathered):
    """Part of a layer, added to a stream after dropout. Normalises its input (pre-norm), or with style bert the sum."""

    purpose: str
    """Purpose of the random draws of its dropout."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.rate, self.post_norm = layer, config.dropout, config.style == "bert"
        self.tiles = config.feed_forward_tiles
        self.norm = Norm(config.norm, config.d_model, config.norm_eps)

    def read(self, stream: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the input from a stream, in the dtype of the weights. weights: the branch's, by name."""
        dtype = self.norm.weight.dtype
        if self.post_norm:
            return stream.to(dtype)
        return self.norm(stream, dtype) if weights is None else self.norm.by(inside("norm", weights), stream, dtype)

    def add(
        self, stream: Tensor, out: Tensor, rng: RngContext, rows: Tensor | None = None, sign: int = 1,
        in_place: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return stream + sign·dropout(out), summed in fp32 or wider, in the stream's dtype.

        rows: see `RngContext.rows`, for a tile. in_place: overwrite the stream.
        """
        if rng.training and self.rate > 0.0:
            rows = rng.rows(out.shape[1], out.device) if rows is None else rows
            key = rng.key(self.layer, self.purpose)
            if not in_place:
                return add_dropout(stream, out, self.rate, key, rows, sign)
            add_dropout_(stream, out, self.rate, key, rows, sign)
            return stream
        if in_place:
            return stream.add_(out, alpha=sign)
        out = at_least_fp32(out)
        return (stream + out if sign == 1 else stream - out).to(stream.dtype)

    def advance(self, streams: Streams, out: Tensor, rng: RngContext) -> Streams:
        """Return a layer's streams after the branch's output is added; two streams are also swapped."""
        x = self.add(streams[0], out, rng)
        if len(streams) == 2:
            return streams[1], x
        return (self.norm(x) if self.post_norm else x,)

    def entry(self, method: Callable[P, R]) -> Callable[P, R]:
        """Return a function that runs a method of this branch with its weights gathered."""
        return partial(self, method) if self.gathered_at_once else method

    def rewrite(self, compute: Compute, read: Tensor, written: Tensor, run: Pass) -> Tensor | None:
        """Add the output for the stream `read` to the stream `written` in place. Returns the auxiliary loss."""
        if self.gathered_at_once:
            return self.entry(self.rewrite_tiles)(read, written, run)
        out, auxiliary = compute(read)
        self.add(written, out, run.rng, in_place=True)
        return auxiliary

    def restore(self, compute: Compute, residual: Residual, run: Pass) -> None:
        """Run the backward of `rewrite`: subtract the output again, and add to the gradients of input and weights."""
        read = residual.read
        if self.gathered_at_once:
            with torch.enable_grad():
                zero = torch.zeros((), dtype=read.dtype, device=read.device, requires_grad=True)
                injected = self.entry(self._inject_gradients)(zero, residual, run)
            if injected.requires_grad:
                injected.backward()
            return
        rows = run.rng.rows(read.shape[1], read.device)
        grads = output_gradient(self, residual.d_written, run.rng, rows), residual.d_auxiliary
        x = read.detach().requires_grad_()
        with torch.enable_grad():
            outputs = [y for y in compute(x) if y is not None]
        torch.autograd.backward(outputs, [g.to(y.dtype) for y, g in zip(outputs, grads, strict=False)])
        assert x.grad is not None
        residual.d_read.add_(x.grad)
        self.add(residual.written, outputs[0].detach(), run.rng, rows, sign=-1, in_place=True)

    def rewrite_tiles(self, read: Tensor, written: Tensor, run: Pass) -> Tensor | None:
        """Run `rewrite` tile by tile."""
        raise NotImplementedError

    def restore_tiles(self, residual: Residual, run: Pass) -> GradientSums:
        """Run `restore` tile by tile. Returns the gradients of the weights."""
        raise NotImplementedError

    def _inject_gradients(self, zero: Tensor, residual: Residual, run: Pass) -> Tensor:
        """Return a 0 that injects the gradients of the weights in its backward: ZeRO 3's post-backward hooks fire."""
        sums = self.restore_tiles(residual, run)
        injected: Tensor = _InjectGradients.apply(sums, zero, *sums.weights.values())
        return injected


def output_gradient(branch: Branch, grad: Tensor, rng: RngContext, rows: Tensor) -> Tensor:
    """Return the gradient of the branch's output, given the gradient of the dropped-out output."""
    dtype = branch.norm.weight.dtype
    if not (rng.training and branch.rate > 0.0):
        return grad.to(dtype)
    return dropout(grad, branch.rate, rng.key(branch.layer, branch.purpose), rows, dtype)


class StreamTiles:
    """Tiles of a branch's input stream and of the stream that it is added to."""

    def __init__(self, branch: Branch, read: Tensor, written: Tensor, rng: RngContext, sign: int = 1):
        """Cut the streams. sign: -1 subtracts the outputs."""
        self.branch = branch
        self.rng = rng
        self.sign = sign
        self.x = cut(read, branch.tiles)
        self.rows = cut(rng.rows(read.shape[1], read.device), branch.tiles)
        self._written = cut(written, branch.tiles)

    def write(self, number: int, out: Tensor) -> None:
        self.branch.add(self._written[number], out, self.rng, self.rows[number], self.sign, in_place=True)


class BackwardTiles(StreamTiles):
    """Tiles of the streams and gradients of a branch in the backward."""

    def __init__(self, branch: Branch, residual: Residual, rng: RngContext):
        super().__init__(branch, residual.read, residual.written, rng, sign=-1)
        self.dx = cut(residual.d_read, branch.tiles)
        self._grad = cut(residual.d_written, branch.tiles)

    def grad(self, number: int) -> Tensor:
        return output_gradient(self.branch, self._grad[number], self.rng, self.rows[number])


class _InjectGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: GradientSums, zero: Tensor, *weights: Tensor) -> Tensor:
        ctx.sums = sums
        return torch.zeros_like(zero)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, grads[0], *ctx.sums.gradients().values()


def inside(name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a submodule, by their names in it."""
    return {key.removeprefix(f"{name}."): weight for key, weight in weights.items() if key.startswith(f"{name}.")}


def cut(x: Tensor, tiles: int) -> list[Tensor]:
    return [piece for (piece,) in pieces([x], min(tiles, x.shape[1]))]


def owned(gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return gradients that may be overwritten: copies of those that share memory with themselves or each other."""
    copies: list[Tensor] = []
    for grad in gradients:
        shared = any(grad.untyped_storage()._cdata == other.untyped_storage()._cdata for other in copies)
        copies.append(grad.clone(memory_format=torch.contiguous_format) if shared or not grad.is_contiguous() else grad)
    return tuple(copies)


def mean_stream(streams: Streams) -> Tensor:
    """Return the mean of a stack's streams, (B, L, E), in fp32 or wider."""
    return torch.stack([at_least_fp32(x) for x in streams]).mean(0)
