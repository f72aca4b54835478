"""Dense definitions of operators, to test against. B batch, H heads, L length, D head dim, F features, V vocabulary."""

import math

import torch
from torch import Tensor

from megasparse.ops.hash_table_attention import HashTableAttentionSpec, visible_pairs, weighted_sum
from megasparse.ops.normalize import SHORTEST
from megasparse.ops.operator import at_least_fp32


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute weight·(x − mean)/√(variance + eps) + bias; without a bias weight·x/√(mean(x²) + eps)."""
    if bias is None:
        return (weight.to(x.dtype) * x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()).to(dtype)
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return (weight.to(x.dtype) * centred / (variance + eps).sqrt() + bias.to(x.dtype)).to(dtype)


def unit_keys(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k = q / max(|q|, SHORTEST), in the dtype of q."""
    length = (q * q).sum(-1, keepdim=True).sqrt()
    return q, q / length.clamp_min(SHORTEST)


def counting_sort(keys: Tensor, bits: int, ordered: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Positions ordered by (key, position): keys (rows, L), below 2^bits; (rows, L) int32."""
    order = [sorted(range(len(row)), key=lambda i: (row[i], i)) for row in keys.tolist()]
    found = torch.tensor(order, dtype=torch.int32, device=keys.device).view(keys.shape)
    found = found.flip(-1) if reverse else found
    if ordered is not None:
        ordered.copy_(keys.gather(-1, found.long()))
    return found


def token_scores(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Score tokens; the third column is the cross-entropy with (1 − smoothing)·onehot + smoothing/V."""
    logits = at_least_fp32(logits)
    cost = -torch.log_softmax(logits, dim=-1)  # of every id
    vocabulary = torch.arange(cost.shape[-1], device=cost.device)
    onehot = targets[:, None] == vocabulary
    likeliest = torch.where(cost == cost.min(-1, keepdim=True).values, vocabulary, len(vocabulary)).min(-1).values
    columns = [cost.masked_fill(~onehot, 0.0).sum(-1), (likeliest == targets).to(cost.dtype)]
    if smoothing:
        columns.append(((onehot * (1 - smoothing) + smoothing / len(vocabulary)) * cost).sum(-1))
    return torch.stack(columns, dim=-1)


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
    that sees no real key gets 0."""
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


def positive_features(x: Tensor, projection: Tensor) -> Tensor:
    """Compute φ(x) = exp(−|x|²/2)/√F · exp(ωx), (B, H, L, F), unstabilised (Choromanski et al. 2020, Lemma 1)."""
    products = torch.einsum("bhld,hfd->bhlf", x, projection.to(x.dtype))
    return torch.exp(-(x**2).sum(-1, keepdim=True) / 2) / math.sqrt(projection.shape[1]) * torch.exp(products)


def expected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: HashTableAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """W_ij = (1 − acos(q_i·k_j)/π)^τ (Eq. 4) where j is visible to i; q, k of length 1 or 0."""
    angle = torch.acos((q @ k.transpose(-1, -2)).clamp(-1.0, 1.0))
    seen = visible_pairs((q.shape[2], k.shape[2]), spec.causal, key_mask, segments, q.device)
    return weighted_sum(q, k, v, (1 - angle / math.pi) ** spec.code_bits * seen, spec.code_bits)


def utilities(kernel: Tensor, in_query: Tensor, in_key: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ψ_i[b] ∝ Σ_{j in b} A_ij (LHA Eq. 11) and ψ′_j[b] ∝ Σ_{i in b} A_ij (Eq. 14), each with sum 1.

    kernel: (B, H, Lq, Lk), exp(q·k/√D); A is it with rows that sum to 1. in_query, in_key: (B, H, L, N), 1 where a
    token is in a bucket, else 0. A token that attends to no bucket has 0. Returns (B, H, Lq, N) and (B, H, Lk, N)."""
    attention = kernel / kernel.sum(-1, keepdim=True)
    queries = torch.einsum("bhij,bhjn->bhin", attention, in_key)
    keys = torch.einsum("bhij,bhin->bhjn", attention, in_query)
    totals = (x.sum(-1, keepdim=True) for x in (queries, keys))
    found = [torch.where(total > 0, x / total, 0.0) for x, total in zip((queries, keys), totals, strict=True)]
    return found[0], found[1]
