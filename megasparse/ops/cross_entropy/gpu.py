"""The scores of tokens as Triton kernels. N tokens, V vocabulary.

Cost, b bytes a logit: forward N·V·b bytes, backward 2·N·V·b, and some 10 FLOPs a logit. torch's own operators move
about 18·N·V bytes more forward, and 20·N·V more backward: they hold fp32 logits and their log-softmax.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from megasparse.ops.autocast import Function
from megasparse.ops.cross_entropy.kernels import scores_backward, scores_forward
from megasparse.ops.kernels import launch, whole_vectors

_BLOCK = 4096  # logits that a program holds at a time
_PER_WARP = 512


def token_scores(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Computes `operator.token_scores` by kernels, for logits in fp32, bf16 or fp16."""
    return _TokenScores.apply(logits, targets, smoothing)


def _settings(width: int, smoothing: float) -> dict[str, int]:
    size = min(_BLOCK, triton.next_power_of_2(width))
    return dict(COLUMNS=3 if smoothing else 2, BLOCK=size, num_warps=max(1, size // _PER_WARP))


class _TokenScores(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        logits, targets = whole_vectors(logits), targets.contiguous()
        count, width = logits.shape
        settings = _settings(width, smoothing)
        lse = logits.new_empty(count, dtype=torch.float32)
        scores = lse.new_empty(count, settings["COLUMNS"])
        launch(scores_forward, (count,), logits, targets, lse, scores, logits.stride(0), width, smoothing, **settings)
        ctx.save_for_backward(logits, targets, lse)
        ctx.smoothing = smoothing
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse = ctx.saved_tensors
        count, width = logits.shape
        settings, slopes = _settings(width, ctx.smoothing), logits.new_empty(count, width)
        launch(
            scores_backward, (count, triton.cdiv(width, settings["BLOCK"])), logits, targets, lse, grad.contiguous(),
            slopes, logits.stride(0), width, ctx.smoothing, **settings,
        )  # fmt: skip
        return slopes, None, None
