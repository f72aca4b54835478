"""The definition of attention utility per bucket, dense, to test against. B batch, H heads, L length, N buckets."""

import torch
import torch.nn.functional as F
from torch import Tensor


def utilities(
    kernel: Tensor, query_codes: Tensor, key_codes: Tensor, buckets: int, visible: bool
) -> tuple[Tensor, Tensor]:
    """ψ_i[b] = Σ_{j: h_K(j) = b} A_ij (LHA Eq. 11) and ψ′_j[b] ∝ Σ_{i: h_Q(i) = b} A_ij (Eq. 14), each with sum 1.

    kernel: (B, H, Lq, Lk), exp(q·k/√D) or an estimate of it; A is it with rows that sum to 1. codes: (B, H, L).
    visible: pairs j > i count as 0. Returns (B, H, Lq, N) and (B, H, Lk, N).
    """
    if visible:
        kernel = kernel.tril()
    attention = kernel / kernel.sum(-1, keepdim=True)
    of_key, of_query = (F.one_hot(codes.long(), buckets).to(kernel.dtype) for codes in (key_codes, query_codes))
    queries = torch.einsum("bhij,bhjn->bhin", attention, of_key)
    keys = torch.einsum("bhij,bhin->bhjn", attention, of_query)
    return queries, keys / keys.sum(-1, keepdim=True)
