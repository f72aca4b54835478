"""The definition of attention utility per bucket, dense. B batch, H heads, L length, N buckets."""

import torch
from torch import Tensor


def utilities(kernel: Tensor, in_query: Tensor, in_key: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ψ_i[b] ∝ Σ_{j in b} A_ij (LHA Eq. 11) and ψ′_j[b] ∝ Σ_{i in b} A_ij (Eq. 14), each with sum 1.

    kernel: (B, H, Lq, Lk), exp(q·k/√D); A is it with rows that sum to 1. in_query, in_key: (B, H, L, N), 1 where a
    token is in a bucket, else 0. A token that attends to no bucket has 0. Returns (B, H, Lq, N) and (B, H, Lk, N).
    """
    attention = kernel / kernel.sum(-1, keepdim=True)
    queries = torch.einsum("bhij,bhjn->bhin", attention, in_key)
    keys = torch.einsum("bhij,bhin->bhjn", attention, in_query)
    totals = (x.sum(-1, keepdim=True) for x in (queries, keys))
    found = [torch.where(total > 0, x / total, 0.0) for x, total in zip((queries, keys), totals, strict=True)]
    return found[0], found[1]
