"""Attention inside clusters given as lists, by the implementation that suits the device."""

from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.backend import implementation
from megasparse.ops.cluster_attention import blockwise, reference
from megasparse.ops.cluster_attention.specification import ClusterAttentionSpec
from megasparse.ops.random import PairDropout


@without_autocast
def cluster_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    spec: ClusterAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    dropout: PairDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out_i = Σ_w Σ_j exp(scale·q_i·k_j − log N_ij − lse_i) v_j over the clusters w that hold query i and their
    keys j.

    q: (B, H, Lq, D). k, v: (B, H, Lk, D). query_index (B or 1, H or 1, W, Mq), key_index (B or 1, H or 1, W, Mk): token
    numbers, −1 for an empty place; a token at most once in a list. N_ij: the number of clusters that hold query i and
    key j (1 without spec.count_clusters). key_mask: (B, Lk) bool,
    keys that may be seen; queries of padding see what their lists give them. segments: (B, L) with Lq = Lk: documents
    never see each other. dropout: of the probabilities; lse is that of all pairs.
    Returns out (B, H, Lq, D) in q's dtype and lse (B, H, Lq), the log of the sum, in fp32 at least; a query that is in
    no cluster or sees nothing gets 0 and −∞. Scores, softmax statistics and gradients are computed in fp32 at least.
    Memory is linear in the lists; counting takes time of W more a pair, and on a GPU a bit a pair.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)  # torch.autocast leaves some inputs in bf16 and some in fp32
    chosen = implementation(q, dropout=dropout)
    if chosen == "triton":
        from megasparse.ops.cluster_attention import gpu

        return gpu.cluster_attention(q, k, v, query_index, key_index, spec, key_mask, segments)
    module = reference if chosen == "reference" else blockwise
    return module.cluster_attention(q, k, v, query_index, key_index, spec, key_mask, segments, dropout)
