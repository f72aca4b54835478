"""The definition of YOSO attention, to test against. B batch, H heads, L length, D head dim, m hashes, τ bits."""

import math

import torch
from torch import Tensor

from megasparse.ops.hash_table_attention.specification import HashTableAttentionSpec


def visible_pairs(
    lengths: tuple[int, int],
    causal: bool,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    segments: Tensor | None,
    device: torch.device,
) -> Tensor:
    """(B or 1, 1, Lq, Lk) bool."""
    seen = torch.ones(1, 1, *lengths, dtype=torch.bool, device=device)
    if causal:
        seen = seen.tril()
    if query_mask is not None:
        seen = seen & query_mask[:, None, :, None]
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    return seen


def weighted_sum(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, code_bits: int) -> tuple[Tensor, Tensor]:
    """Wv and W1, where ∂W_ij/∂(q_i·k_j) is DEFINED as τ/2·W_ij (YOSO Eq. 12 and 19, with the τ of Eq. 11)."""
    weight, score = weight.detach(), q @ k.transpose(-1, -2)
    with_gradient = weight * (1 + code_bits / 2 * (score - score.detach()))
    return with_gradient @ v, weight.sum(-1)


def hash_table_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_codes: Tensor,
    k_codes: Tensor,
    spec: HashTableAttentionSpec,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """W_ij = B_ij = 1/m Σ_h [code_h(q_i) = code_h(k_j)] (Eq. 5) where j is visible to i. codes: (B, H, m, L)."""
    q, k, v = (x.to(torch.promote_types(v.dtype, torch.float32)) for x in (q, k, v))
    weight = (q_codes[..., :, None] == k_codes[..., None, :]).to(q.dtype).mean(2)
    seen = visible_pairs((q.shape[2], k.shape[2]), spec.causal, query_mask, key_mask, segments, q.device)
    return weighted_sum(q, k, v, weight * seen, spec.code_bits)


def expected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: HashTableAttentionSpec,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """W_ij = (1 − acos(q_i·k_j)/π)^τ (Eq. 4) where j is visible to i; q, k of length 1 or 0."""
    angle = torch.acos((q @ k.transpose(-1, -2)).clamp(-1.0, 1.0))
    seen = visible_pairs((q.shape[2], k.shape[2]), spec.causal, query_mask, key_mask, segments, q.device)
    return weighted_sum(q, k, v, (1 - angle / math.pi) ** spec.code_bits * seen, spec.code_bits)
