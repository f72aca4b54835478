"""Attention by Bernoulli sampling over hash codes (YOSO), by the implementation that suits the device."""

from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.backend import implementation
from megasparse.ops.hash_table_attention import blockwise, reference
from megasparse.ops.hash_table_attention.specification import HashTableAttentionSpec


@without_autocast
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
    """Compute out_i = Σ_j B_ij v_j, B_ij = 1/m Σ_h [code_h(q_i) = code_h(k_j)] over the keys visible to i (YOSO Eq. 5
    and 9).

    q: (B, H, Lq, D), k: (B, H, Lk, D), of length 1, only for the gradient: that of B_ij by q_i·k_j is τ/2·B_ij, the
    lower bound of the paper. v: (B, H, Lk, D). q_codes: (B, H, m, Lq), k_codes: (B, H, m, Lk), integers below
    2^code_bits. query_mask, key_mask: (B, Lq), (B, Lk) bool, true for real tokens: padding sees nothing (output 0) and
    is never seen. segments: (B, L) document numbers >= 0: documents never see each other.
    Returns out (B, H, Lq, D) and B's row sums (B, H, Lq), the keys a query meets in one hash on average (not
    differentiable); both in fp32 at least.
    """
    masks = query_mask, key_mask, segments
    chosen = implementation(v)
    if chosen == "triton":
        from megasparse.ops.hash_table_attention import gpu

        return gpu.hash_table_attention(q, k, v, q_codes, k_codes, spec, *masks)
    module = reference if chosen == "reference" else blockwise
    return module.hash_table_attention(q, k, v, q_codes, k_codes, spec, *masks)
