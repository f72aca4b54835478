"""The scores of tokens in torch's own operators. N tokens, V vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.dtype import at_least_fp32


@without_autocast
def token_scores(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Computes `operator.token_scores`."""
    logits = at_least_fp32(logits)
    nats = F.cross_entropy(logits, targets, reduction="none")
    columns = [nats, (logits.argmax(-1) == targets).to(nats.dtype)]
    if smoothing:  # −ln p of an id is that of the target, plus the target's logit, less the id's
        every = nats + logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.mean(-1)
        columns.append(torch.lerp(nats, every, smoothing))
    return torch.stack(columns, dim=-1)
