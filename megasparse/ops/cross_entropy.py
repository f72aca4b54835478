"""Cross-entropy whose logits never exist all at once. B batch, L length, E width, V vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.tiled import tiled


def token_nats(hidden: Tensor, weight: Tensor, targets: Tensor, tiles: int) -> Tensor:
    """−ln p(target) of every token, (B, L) fp32, where p = softmax(hidden·weightᵀ).

    hidden: (B, L, E). weight: (V, E). targets: (B, L) int64. Logits exist for L/tiles positions at a time, forward and backward;
    the softmax is computed in fp32 (float64 for float64 inputs).
    """
    return tiled(_nats, (hidden, targets), (weight,), tiles)


def _nats(hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
