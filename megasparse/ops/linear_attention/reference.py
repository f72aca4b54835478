"""The definition of linear attention, dense, to test against. B batch, H heads, L length, D head dim, F features."""

import torch
from torch import Tensor


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    causal: bool,
    scale: float,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Compute out_i = Σ_j A_ij v_j / Σ_j A_ij over the visible keys, A_ij = φ(√scale·q_i)·φ(√scale·k_j) (Performer,
    Eq. 4–5).

    φ: positive features of `projection` (H, F, D). Sums of exponentials are taken in log space, pair by pair. A query
    that sees no real key gets 0.
    """
    length = q.shape[2]
    logs = [
        torch.einsum("bhld,hfd->bhlf", x * scale**0.5, projection.to(x.dtype)) - scale * (x * x).sum(-1)[..., None] / 2
        for x in (q, k)
    ]
    score = torch.logsumexp(logs[0][:, :, :, None] + logs[1][:, :, None], dim=-1)  # (B, H, L, L): log A·F
    seen = torch.ones(1, length, length, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril()
    if key_mask is not None:
        seen = seen & key_mask[:, None, :]
    if segments is not None:
        seen = seen & (segments[:, None, :] == segments[:, :, None])
    blind = ~seen.any(-1)[:, None, :, None]
    score = score.masked_fill(~seen[:, None], -torch.inf).masked_fill(blind, 0.0)
    return (torch.softmax(score, dim=-1) @ v).masked_fill(blind, 0.0)
