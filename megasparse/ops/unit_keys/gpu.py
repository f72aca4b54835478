"""Unit vectors on a GPU: one launch forward, and one backward, which adds the queries' own gradient to the keys'.

B batch, H heads, L length, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from megasparse.ops.autocast import Function
from megasparse.ops.kernels import block, empty_alike, launch, strides, whole_vectors
from megasparse.ops.unit_keys import kernels
from megasparse.ops.unit_keys.reference import SHORTEST

_NUMBERS = 4096  # of a program


def unit_keys(q: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `operator.unit_keys` by kernels.

    Cost: forward reads q and writes k, 2·B·H·L·D·bytes; backward reads q and both gradients and writes one, twice that.
    """
    q, k = _UnitKeys.apply(q)
    return q, k


class _UnitKeys(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor) -> tuple[Tensor, Tensor]:
        rows = whole_vectors(q)
        k = empty_alike(rows)
        _launch(kernels.unit, SHORTEST, rows, k)
        ctx.save_for_backward(rows)
        return q, k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (q,) = ctx.saved_tensors
        grad_q, grad_k = (whole_vectors(grad) for grad in grads)
        dq = empty_alike(q)
        _launch(kernels.unit_gradient, SHORTEST, q, grad_q, grad_k, dq)
        return dq


def unit_vectors(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Computes `operator.unit_vectors` by kernels, each of which reads and writes everything once."""
    return _UnitVectors.apply(x, dtype or torch.float32)


class _UnitVectors(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = whole_vectors(x)
        out = empty_alike(rows, dtype)
        _launch(kernels.unit, 0.0, rows, out)
        ctx.save_for_backward(rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dx = empty_alike(x)
        _launch(kernels.unit_gradient, 0.0, x, None, whole_vectors(grads[0]), dx)
        return dx, None


def _launch(kernel: Any, shortest: float, q: Tensor, *others: Tensor | None) -> None:
    _, heads, length, width = q.shape
    wide = block(width)
    tokens = max(1, _NUMBERS // wide)
    blocks = -(-length // tokens)
    sizes = (heads, length, blocks, shortest)
    steps = strides(*(q if x is None else x for x in (q, *others)))
    fixed = {"D": width, "WIDTH": wide, "TOKENS": tokens, "num_warps": 4}
    grid = (blocks * q.shape[0] * heads,)
    launch(kernel, grid, q, *others, *steps, *sizes, **fixed)
