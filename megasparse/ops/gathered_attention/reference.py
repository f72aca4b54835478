"""The definition of gathered attention, dense, to test against.

B batch, H heads, Lq queries, Lk keys, K index places.
"""

import torch
from torch import Tensor

from megasparse.ops.random import PairDropout


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, scale: float, dropout: PairDropout | None = None
) -> tuple[Tensor, Tensor]:
    """Compute out_i = Σ_j n_ij exp(scale·q_i·k_j − lse_i) v_j, n_ij the number of times that row i of the index names
    key j.

    index: (B|1, H|1, Lq, K), −1 for an empty place. lse_i: the log of the sum. Returns out (B, H, Lq, D) and lse (B, H,
    Lq); a query whose places are all empty gets 0 and −∞.
    """
    keys = torch.arange(k.shape[2], device=k.device)
    count = (index[..., None] == keys).sum(3).to(q.dtype)  # (B|1, H|1, Lq, Lk)
    logits = scale * (q @ k.transpose(-1, -2)) + count.log()
    blind = (logits == -torch.inf).all(-1)  # kept out of the softmax, whose gradient would be NaN
    logits = logits.masked_fill(blind[..., None], 0.0)
    probability = torch.softmax(logits, dim=-1)
    if dropout is not None:
        probability = probability * dropout.dense(k.shape[2], q.dtype)
    out = probability @ v
    return out.masked_fill(blind[..., None], 0.0), torch.logsumexp(logits, dim=-1).masked_fill(blind, -torch.inf)
