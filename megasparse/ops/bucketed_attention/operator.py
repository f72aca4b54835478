"""Bucketed attention by whichever implementation serves. See `ops.backend`."""

from typing import Any

from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.backend import implementation
from megasparse.ops.bucketed_attention import blockwise, reference
from megasparse.ops.bucketed_attention.layout import Window


@without_autocast
def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    window: Window,
    *,
    causal: bool,
    scale: float = 1.0,
    exclude_self: bool = True,
    count_rounds: bool = True,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    key_codes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out_i = Σ_r Σ_j exp(q_i·k_j·scale − log N_ij − z_i) v_j over the keys j visible in round r (Reformer Eq. 2–6,
    appendix A).

    q, k, v: (B, H, L, D). codes: (B, H, R, L) integer buckets; None is one bucket and one round (local attention).
    N_ij: the number of rounds in which j is visible to i (1 if not count_rounds). With exclude_self a token sees
    itself only when it sees nothing else. key_mask: (B, L) bool, true for real tokens: padding sees nothing and is
    never seen. segments: (B, L) document numbers >= 0: documents never see each other.
    key_codes: (B, H, R, L), the keys' own buckets; then codes are the queries', the window is a band, of the last M
    keys of the query's bucket at or before it and, where not causal, the M after it, and whoever sees nothing sees
    itself in any case.
    Returns out (B, H, L, D) in q's dtype and z (B, H, L), the log of the sum, in fp32 at least; padding gets 0 and −∞.
    Scores, softmax statistics and gradients are computed in fp32 at least.
    """
    assert key_codes is None or window.kind == "band", "the chunk window needs codes that queries and keys share"
    rule: dict[str, Any] = {"causal": causal, "scale": scale, "exclude_self": exclude_self}
    rule |= {"count_rounds": count_rounds, "key_mask": key_mask, "segments": segments}
    k, v = k.to(q.dtype), v.to(q.dtype)  # torch.autocast leaves some inputs in bf16 and some in fp32
    chosen = implementation(q)
    if chosen == "triton":
        from megasparse.ops.bucketed_attention import gpu  # where there is no Triton, nothing asks for it

        return gpu.bucketed_attention(q, k, v, codes, window, **rule, key_codes=key_codes)
    if chosen == "reference":
        return reference.bucketed_attention(q, k, v, codes, window, **rule, key_codes=key_codes)
    return blockwise.bucketed_attention(q, k, v, codes, window, **rule, key_codes=key_codes)
