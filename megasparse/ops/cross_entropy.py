"""Cross-entropy of targets, and top-1 correctness, with a softmax or an adaptive softmax.

An adaptive softmax (Grave et al. 2017) is a softmax over the frequent ids and a slot per cluster of rarer ids, plus one
inside each cluster: p(id) = head(id) for the first c₁ ids, head(cluster)·tail(id) for the others. Clusters are as wide
as the head, as in Transformer-XL. N tokens, E width, V vocabulary, K clusters.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.operator import at_least_fp32, operator


@operator(largest_width=None)
def token_scores(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Score every token, in columns: −ln p of its target under softmax(logits); 1 if the target is the most likely id
    (the first one in ties), else 0; with smoothing ε also (1 − ε) times the first plus ε times the mean of −ln p over
    all ids.

    Args:
        logits: (N, V).
        targets: (N,) int64 ids; −100 for a token without a target, whose scores and gradient are 0.
        smoothing: ε of label smoothing.

    Returns:
        (N, 2) or (N, 3) in fp32 or wider; all columns except the second are differentiable.
    """
    logits = at_least_fp32(logits)
    nats = F.cross_entropy(logits, targets, reduction="none")
    columns = [nats, (logits.argmax(-1) == targets).to(nats.dtype)]
    if smoothing:  # −ln p(id) = −ln p(target) + logit(target) − logit(id)
        mean_nats = nats + logits.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1) - logits.mean(-1)
        columns.append(torch.lerp(nats, mean_nats, smoothing).masked_fill(targets < 0, 0.0))
    return torch.stack(columns, dim=-1)


def adaptive_scores(
    hidden: Tensor, targets: Tensor, weight: Tensor, clusters: Tensor, cutoffs: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return −ln p of every target, (N,) fp32, and whether it is the most likely of all ids, (N,) bool.

    hidden: (N, E). targets: (N,) int64. weight: (V, E), vectors of all ids. clusters: (K, E), vectors of the clusters,
    whose first ids are `cutoffs`. A cluster's softmax is computed only for targets in it, and for those that only its
    ids could beat: more likely than all frequent ids, but less likely than the cluster as a whole.
    """
    first = cutoffs[0]
    head, *tails = _parts(weight, clusters, cutoffs)
    logits = F.linear(hidden, head).float()  # (N, c₁ + K)
    borders = torch.tensor(cutoffs, device=targets.device)
    cluster = torch.bucketize(targets, borders, right=True)  # 0: in the head
    slot = torch.where(cluster == 0, targets, first - 1 + cluster)
    nats = F.cross_entropy(logits, slot, reduction="none")
    logits = logits.detach()
    best = logits[:, :first].max(dim=-1)
    score = logits.gather(1, slot[:, None]).squeeze(1)
    correct = best.indices == targets
    for number, (tail, start) in enumerate(zip(tails, cutoffs, strict=True), start=1):
        rows = (cluster == number).nonzero().squeeze(1)
        inside = F.linear(hidden[rows], tail).float()
        local_target = targets[rows] - start
        rare = F.cross_entropy(inside, local_target, reduction="none")
        nats = nats.index_add(0, rows, rare)
        score = score.index_add(0, rows, -rare.detach())
        correct[rows] = (inside.argmax(-1) == local_target) & (score[rows] > best.values[rows])
    with torch.no_grad():
        for number, tail in enumerate(tails, start=1):
            whole = logits[:, first - 1 + number]
            rows = (correct & (cluster != number) & (whole > score)).nonzero().squeeze(1)
            likeliest = whole[rows] + F.linear(hidden[rows], tail).float().log_softmax(-1).amax(-1)
            correct[rows] = likeliest < score[rows]
    return nats, correct


def adaptive_log_probabilities(hidden: Tensor, weight: Tensor, clusters: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """Return ln p of every id, (N, V) fp32. Arguments as in `adaptive_scores`."""
    head, *tails = (F.linear(hidden, part).float().log_softmax(-1) for part in _parts(weight, clusters, cutoffs))
    frequent, of_clusters = head.split([cutoffs[0], len(tails)], dim=-1)
    return torch.cat([frequent, *(of_clusters[:, k, None] + tail for k, tail in enumerate(tails))], dim=-1)


def _parts(weight: Tensor, clusters: Tensor, cutoffs: Sequence[int]) -> list[Tensor]:
    """Return the vectors of the head's slots, (c₁ + K, E), and of each cluster's ids, from a single split, so that the
    backward creates only one gradient of the size of `weight`.
    """
    ends = [*cutoffs, len(weight)]
    frequent, *tails = weight.split([end - start for start, end in zip([0, *cutoffs], ends, strict=True)])
    return [torch.cat([frequent, clusters]), *tails]
