"""Cross-entropy of logits, and whether the target is the likeliest id. N tokens, V vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.operator import Operator, at_least_fp32


def _token_scores(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Score every token, a column each: −ln p of its target under softmax(logits); 1 if the target is the likeliest id
    (the first of equals), else 0; with smoothing ε also (1 − ε) times the first plus ε times the mean of −ln p over all
    ids.

    Args:
        logits: (N, V).
        targets: (N,) int64 ids; −100 for a token without a target: its scores are 0, and it gets no gradient.
        smoothing: ε of label smoothing.

    Returns:
        (N, 2) or (N, 3) in fp32 at least; all columns but the second are differentiable.
    """
    logits = at_least_fp32(logits)
    nats = F.cross_entropy(logits, targets, reduction="none")
    columns = [nats, (logits.argmax(-1) == targets).to(nats.dtype)]
    if smoothing:  # −ln p of an id is that of the target, plus the target's logit, less the id's
        mean_nats = nats + logits.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1) - logits.mean(-1)
        columns.append(torch.lerp(nats, mean_nats, smoothing).masked_fill(targets < 0, 0.0))
    return torch.stack(columns, dim=-1)


token_scores = Operator(_token_scores, kernels="megasparse.ops.cross_entropy_kernels:token_scores", largest_width=None)
