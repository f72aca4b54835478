"""Exact softmax attention of every query to the few keys that an index names for it: the implementation that runs."""

from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.backend import implementation
from megasparse.ops.gathered_attention import blockwise, reference
from megasparse.ops.random import PairDropout


@without_autocast
def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, scale: float, dropout: PairDropout | None = None
) -> tuple[Tensor, Tensor]:
    """Compute out_i = Σ_j exp(scale·q_i·k_j − lse_i) v_j over the keys j that row i of the index names.

    q: (B, H, Lq, D). k, v: (B, H, Lk, D). index: (B|1, H|1, Lq, K) int32 or int64 key numbers, −1 for an empty place;
    a key named twice counts twice. dropout: of the probabilities; lse is that of all pairs.
    Returns out (B, H, Lq, D) in q's dtype and lse (B, H, Lq), the log of the sum, in fp32 at least; a query whose
    places are all empty gets 0 and −∞. Scores, softmax statistics and gradients are computed in fp32 at least.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)  # torch.autocast leaves some inputs in bf16 and some in fp32
    chosen = implementation(q, dropout=dropout)
    if chosen == "reference":
        return reference.gathered_attention(q, k, v, index, scale=scale, dropout=dropout)
    if chosen == "blockwise":
        return blockwise.gathered_attention(q, k, v, index, scale=scale, dropout=dropout)
    from megasparse.ops.gathered_attention import gpu

    return gpu.gathered_attention(q, k, v, index, scale=scale)
