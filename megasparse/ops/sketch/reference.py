"""The definition of the sketch and of the keys chosen from it, dense, to test against.

B batch, H heads, L length, Lq queries, d width of the sketch, K keys a query chooses.
"""

import torch
from torch import Tensor

from megasparse.ops.random import random_bits
from megasparse.ops.sketch import draws
from megasparse.ops.sketch.draws import Noise
from megasparse.ops.sketch.specification import KeyChoiceSpec


def sketched_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes `operator.sketched_attention`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    alpha, seen = sketched_weights(q, k, causal=causal, key_mask=key_mask, segments=segments)
    score = (q @ k.transpose(-1, -2)) / q.shape[2] ** 0.5
    lse = score.masked_fill(~seen, -1e300 if dtype == torch.float64 else -1e38).logsumexp(-1)
    return alpha @ v, lse.masked_fill(~seen.any(-1), -torch.inf)


@torch.no_grad()
def chosen_keys(
    q: Tensor,
    k: Tensor,
    spec: KeyChoiceSpec,
    noise: Noise | None,
    lse: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    first_query: int = 0,
) -> Tensor:
    """Computes `operator.chosen_keys`. lse is not read: α is at hand."""
    who = key_mask, segments
    alpha, seen = sketched_weights(q.double(), k.double(), spec.causal, *who, noise is None, first_query)
    drawn = None if noise is None else uniform(noise, k.shape[1])
    sampling = "top_k" if noise is None else spec.sampling
    return best_keys(alpha, seen, spec.count, sampling=sampling, uniform=drawn).to(torch.int32)


def uniform(noise: Noise, keys: int) -> Tensor:
    """Return u of every pair, (B, H, Lq, keys) float64: the 2^23 numbers (n + ½)/2^23."""
    tiles = range(0, keys, draws.KEYS)
    heads = [
        torch.cat([random_bits(noise.tile(h, t // draws.KEYS), noise.rows, draws.KEYS) for t in tiles], -1)
        for h in range(len(noise.heads))
    ]
    return ((torch.stack(heads, 1)[..., :keys] >> 9) + 2**22 + 0.5).double() / 2**23


def sketched_weights(
    q: Tensor,
    k: Tensor,
    causal: bool,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    rounded: bool = False,
    first_query: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return α_ij = softmax_j(q_i·k_j/√d), 0 where j is invisible to i, and who is visible: (B, Lq, L) each.

    rounded: with q_i·k_j/√d to the nearest multiple of 1/256, as where nothing is drawn. The queries (B, Lq, d) are
    those from position `first_query` on.
    """
    batch, queries, width = q.shape
    seen = torch.ones(batch, queries, k.shape[1], dtype=torch.bool, device=q.device)
    here = slice(first_query, first_query + queries)
    if causal:
        seen = seen.tril(first_query)
    if key_mask is not None:
        seen = seen & key_mask[:, here, None] & key_mask[:, None, :]
    if segments is not None:
        seen = seen & (segments[:, here, None] == segments[:, None, :])
    score = (q @ k.transpose(-1, -2)) / width**0.5
    score = (torch.round(score * 256) / 256 if rounded else score).masked_fill(~seen, -torch.inf)
    largest = score.amax(-1, keepdim=True).detach().clamp_min(torch.finfo(score.dtype).min)
    weight = torch.exp(score - largest)
    return weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny), seen


def best_keys(alpha: Tensor, seen: Tensor, count: int, *, sampling: str, uniform: Tensor | None) -> Tensor:
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
