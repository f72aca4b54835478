"""Bucketed attention by the implementation that suits the device, see `ops.backend`."""

from torch import Tensor

from megasparse.ops.bucketed_attention import blockwise, reference
from megasparse.ops.bucketed_attention.specification import BucketedAttentionSpec
from megasparse.ops.operator import implementation, without_autocast
from megasparse.ops.random import PairDropout


@without_autocast
def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    spec: BucketedAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    key_codes: Tensor | None = None,
    dropout: PairDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out_i = Σ_r Σ_j exp(scale·q_i·k_j − log N_ij − lse_i) v_j over the keys j visible in round r (Reformer
    Eq. 2–6, appendix A).

    q, k, v: (B, H, L, D). codes: (B, H, R, L) integer buckets, or (B, 1, R, L), the same of all heads; None is one
    bucket and one round (local attention).
    N_ij: the number of rounds in which j is visible to i (1 without spec.count_rounds). key_mask: (B, L) bool, true
    for real tokens: padding sees nothing and is never seen. segments: (B, L) document numbers >= 0: documents never see
    each other. key_codes: (B, H, R, L), the keys' own buckets; then codes are the queries', the window is a band, of
    the last M keys of the query's bucket at or before it and, where not causal, the M after it, and a query that sees
    nothing sees itself in any case (unless spec.self_at_last is false). dropout: of the probabilities; lse is that of
    all pairs.
    Returns out (B, H, L, D) in q's dtype and lse (B, H, L), the log of the sum, in fp32 at least; padding gets 0 and
    −∞. Scores, softmax statistics and gradients are computed in fp32 at least.
    """
    assert key_codes is None or spec.window.kind == "band", "the chunk window needs codes that queries and keys share"
    k, v = k.to(q.dtype), v.to(q.dtype)  # torch.autocast leaves some inputs in bf16 and some in fp32
    chosen = implementation(q, dropout=dropout)
    if chosen == "triton":
        from megasparse.ops.bucketed_attention import gpu  # imported only where Triton is installed

        return gpu.bucketed_attention(q, k, v, codes, spec, key_mask, segments, key_codes)
    module = reference if chosen == "reference" else blockwise
    return module.bucketed_attention(q, k, v, codes, spec, key_mask, segments, key_codes, dropout)
