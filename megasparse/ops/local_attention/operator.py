"""Local attention with relative positions. B batch, H heads, L length, D head dim, E distances."""

from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.backend import MOST_PAIRS, implementation
from megasparse.ops.local_attention import blockwise, reference
from megasparse.ops.local_attention.specification import LocalAttentionSpec
from megasparse.ops.random import PairDropout


@without_autocast
def relative_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor,
    w: Tensor,
    spec: LocalAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    dropout: PairDropout | None = None,
) -> Tensor:
    """Compute softmax_j(((q_i + u)·k_j + (q_i + w)·r_{i−j})·scale) v_j over the keys j of i's chunk and the one before
    it, and where not causal the one after it (Dai et al. 2019, Transformer-XL, section 3.3).

    q, k, v: (B, H, L, D). r: (H, E, D), a vector for each of `distances`. u, w: (H, D). key_mask: (B, L) bool, true for
    real tokens. segments: (B, L) document numbers >= 0: documents never see each other. Chunks and distances count
    real tokens in the order of (document, position), so that padding moves nothing. dropout: of the probabilities.
    Returns (B, H, L, D) in q's dtype; padding gets 0. Softmax in fp32 at least.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)  # torch.autocast leaves some inputs in bf16 and some in fp32
    name = implementation(q, most_rows=MOST_PAIRS, dropout=dropout)
    if name == "triton":
        from megasparse.ops.local_attention import gpu

        return gpu.relative_local_attention(q, k, v, r, u, w, spec, key_mask, segments)
    module = reference if name == "reference" else blockwise
    return module.relative_local_attention(q, k, v, r, u, w, spec, key_mask, segments, dropout)
