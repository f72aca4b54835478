"""Unit keys on a GPU: one launch forward, and one backward, which adds the queries' own gradient to the keys'.

B batch, H heads, L length, D head dim.
"""

from typing import Any

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
        _launch(kernels.unit, rows, k)
        ctx.save_for_backward(rows)
        return q, k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (q,) = ctx.saved_tensors
        grad_q, grad_k = (whole_vectors(grad) for grad in grads)
        dq = empty_alike(q)
        _launch(kernels.unit_gradient, q, grad_q, grad_k, dq)
        return dq


def _launch(kernel: Any, q: Tensor, *others: Tensor) -> None:
    _, heads, length, width = q.shape
    wide = block(width)
    tokens = max(1, _NUMBERS // wide)
    blocks = -(-length // tokens)
    sizes = (heads, length, blocks, SHORTEST)
    fixed = {"D": width, "WIDTH": wide, "TOKENS": tokens, "num_warps": 4}
    grid = (blocks * q.shape[0] * heads,)
    launch(kernel, grid, q, *others, *strides(q, *others), *sizes, **fixed)
