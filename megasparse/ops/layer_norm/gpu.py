"""Layer normalisation on a GPU: one launch forward, and backward one more for the weights' sums. E width of a row."""

from typing import Any

import torch
import triton
from torch import Tensor

from megasparse.ops.autocast import Function
from megasparse.ops.kernels import launch
from megasparse.ops.layer_norm import kernels

_PROGRAMS = 512  # that add up the weights' gradients, whatever the number of rows: sums are the same on every GPU


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Computes `operator.layer_norm` by kernels.

    Cost: forward reads x and writes the result; backward reads x and the gradient and writes x's, and 8·512·E bytes of
    the weights' sums. Means and variances are computed again: that costs no reading.
    """
    return _LayerNorm.apply(x, weight, bias, eps, dtype)


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x, dtype=dtype)
        ctx.eps, ctx.centred = eps, bias is not None
        launch(kernels.norm, (_rows(x),), x, weight, bias, out, x.shape[-1], eps, CENTRED=ctx.centred, **_settings(x))
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, width = _rows(x), x.shape[-1]
        programs = min(_PROGRAMS, rows)
        dx = torch.empty_like(x)
        sums = torch.empty(programs, 1 + ctx.centred, width, dtype=torch.float32, device=x.device)
        arguments = (x, weight, grads[0].contiguous(), dx, sums, rows, width, programs, ctx.eps)
        launch(kernels.norm_gradient, (programs,), *arguments, CENTRED=ctx.centred, **_settings(x))
        d_weight, *d_bias = sums.sum(0).to(weight.dtype)
        return dx, d_weight, d_bias[0] if d_bias else None, None, None


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _settings(x: Tensor) -> dict[str, int]:
    wide = triton.next_power_of_2(x.shape[-1])
    return {"WIDTH": wide, "num_warps": min(16, max(1, wide // 256))}
