"""The definition of the sketch and of the keys chosen from it, dense, to test against.

B batch, H heads, L length, d width of the sketch, K keys a query chooses.
"""

import torch
from torch import Tensor


def sketched_weights(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """α_ij = softmax_j(q_i·k_j/√d), 0 where j is invisible to i, and who is visible: (B, L, L) each.

    rounded: with q_i·k_j/√d to the nearest multiple of 1/256, as where nothing is drawn.
    """
    batch, length, width = q.shape
    seen = torch.ones(batch, length, length, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril()
    if key_mask is not None:
        seen = seen & key_mask[:, :, None] & key_mask[:, None, :]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    score = (q @ k.transpose(-1, -2)) / width**0.5
    weight = torch.exp(torch.round(score * 256) / 256 if rounded else score) * seen
    return weight / weight.sum(-1, keepdim=True).clamp_min(1e-300), seen


def chosen_keys(alpha: Tensor, seen: Tensor, count: int, *, sampling: str, uniform: Tensor | None) -> Tensor:
    """The K visible keys of the highest s_ij = u_ij·p_ij in each row (Smart Bird Eq. 2 and 3), (B, H, L, K); −1 where
    there are fewer. Of equal ones the first.

    uniform: u, (B, H, L, L); None is u = 1 for one head.
    """
    p = {
        "inverse_log_squared": (1 / alpha.log()) ** 2,
        "inverse_log": (1 / alpha.log()).abs(),
        "raw": alpha,
        "top_k": alpha,
        "random": torch.ones_like(alpha),
    }[sampling]
    score = p[:, None] if uniform is None else uniform * p[:, None]
    score = score.masked_fill(~seen[:, None], -1.0)
    order = torch.sort(score, dim=-1, descending=True, stable=True)
    index = order.indices.masked_fill(order.values < 0, -1)
    empty = index.new_full((*index.shape[:-1], count), -1)
    return torch.cat([index, empty], dim=-1)[..., :count]
