"""What a Smart Bird sketch predicts by itself: a token a position, a label a sequence, or the tokens of an answer.

B batch, L length, d width of the sketch, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import Targets
from megasparse.ops.tiled import tiled

_LOGIT_ELEMENTS = 1 << 22  # logits of the token objective that exist at a time


class TokenObjective(nn.Module):
    """The sketch's objective where there is no label: each position's output h_i predicts the model's own target there
    (the next token, or the masked one). Mean nats a counted position.
    """

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, h: Tensor, targets: Targets, key_mask: Tensor | None) -> Tensor:
        """Compute the loss of the sketch's predictions. h: (B, L, d) in fp32 at least."""
        counted = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
        for mask in (targets.counted, key_mask):
            if mask is not None:
                counted = counted & mask
        wanted = targets.values.masked_fill(~counted, 0)

        def score(wanted: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            logits = F.linear(h, weight.to(h.dtype), bias.to(h.dtype))  # (B, T, V)
            return F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")

        tiles = -(-counted.numel() * len(self.weight) // _LOGIT_ELEMENTS)
        nats = tiled(score, (wanted, h), (self.weight, self.bias), tiles)  # (B, L)
        return torch.where(counted, nats, 0.0).sum() / counted.sum().clamp_min(1)


class PooledObjective(nn.Module):
    """The sketch's objective where a sequence has a label: its outputs h_i, pooled by attention Σ_i softmax_i(u·h_i)
    h_i, predict it (section 3.1), or, which the paper does not have, each token of the answer alike. Mean nats a label,
    or a token that counts.
    """

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.pool = nn.Parameter(torch.empty(1, width))
        self.weight = nn.Parameter(torch.empty(labels, width))
        self.bias = nn.Parameter(torch.zeros(labels))

    def forward(self, h: Tensor, targets: Targets, key_mask: Tensor | None) -> Tensor:
        """Compute the loss of the sketch's predictions. h: (B, L, d) in fp32 at least. targets.values: (B,) labels, or
        (B, T) tokens.
        """
        score = F.linear(h, self.pool.to(h.dtype)).squeeze(-1)  # (B, L)
        if key_mask is not None:
            score = score.masked_fill(~key_mask, torch.finfo(h.dtype).min)
        pooled = (torch.softmax(score, dim=-1).unsqueeze(-1) * h).sum(1)  # (B, d)
        logits = F.linear(pooled, self.weight.to(h.dtype), self.bias.to(h.dtype))
        if targets.values.dim() == 1:
            return F.cross_entropy(logits, targets.values)
        counted = torch.ones_like(targets.values, dtype=torch.bool) if targets.counted is None else targets.counted
        nats = -torch.log_softmax(logits, dim=-1).gather(1, targets.values.masked_fill(~counted, 0))  # (B, T)
        return torch.where(counted, nats, 0.0).sum() / counted.sum().clamp_min(1)
