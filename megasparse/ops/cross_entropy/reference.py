"""The definition of the scores of tokens, to test against. N tokens, V vocabulary."""

import torch
from torch import Tensor

from megasparse.ops.dtype import at_least_fp32


def token_scores(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Computes `operator.token_scores`; its cost is the cross-entropy with (1 − smoothing)·onehot + smoothing/V."""
    logits = at_least_fp32(logits)
    cost = -torch.log_softmax(logits, dim=-1)  # of every id
    vocabulary = torch.arange(cost.shape[-1], device=cost.device)
    onehot = targets[:, None] == vocabulary
    likeliest = torch.where(cost == cost.min(-1, keepdim=True).values, vocabulary, len(vocabulary)).min(-1).values
    columns = [cost.masked_fill(~onehot, 0.0).sum(-1), (likeliest == targets).to(cost.dtype)]
    if smoothing:
        columns.append(((onehot * (1 - smoothing) + smoothing / len(vocabulary)) * cost).sum(-1))
    return torch.stack(columns, dim=-1)
