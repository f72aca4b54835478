"""Adaptive softmax (Grave et al. 2017): a softmax over the frequent ids and one slot a cluster of rarer ids, and one
softmax inside each cluster.

p(id) = head(id) for the first c₁ ids, head(cluster)·tail(id) for the others. Clusters are as wide as the head, as in
Transformer-XL's model of WikiText-103. N positions, E width, V vocabulary, K clusters.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def adaptive_scores(
    hidden: Tensor, targets: Tensor, weight: Tensor, clusters: Tensor, cutoffs: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return −ln p of every target, (N,) fp32, and whether it is the likeliest of all ids, (N,) bool.

    hidden: (N, E). targets: (N,) int64. weight: (V, E), the vectors of all ids. clusters: (K, E), those of the
    clusters, which begin at the ids `cutoffs`.
    A cluster's softmax is computed where the target lies in it, or where the target could only be beaten by one of its
    ids: where it is likelier than all frequent ids, and less likely than the cluster as a whole.
    """
    first = cutoffs[0]
    head, *tails = _parts(weight, clusters, cutoffs)
    logits = F.linear(hidden, head).float()  # (N, c₁ + K)
    borders = torch.tensor(cutoffs, device=targets.device)
    cluster = torch.bucketize(targets, borders, right=True)  # 0: in the head
    slot = torch.where(cluster == 0, targets, first - 1 + cluster)
    nats = F.cross_entropy(logits, slot, reduction="none")
    logits, best = logits.detach(), logits.detach()[:, :first].max(dim=-1)
    score = logits.gather(1, slot[:, None]).squeeze(1)
    correct = best.indices == targets
    for number, (tail, start) in enumerate(zip(tails, cutoffs, strict=True), start=1):
        rows = (cluster == number).nonzero().squeeze(1)
        inside, local_target = F.linear(hidden[rows], tail).float(), targets[rows] - start
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
    """Return ln p of every id, (N, V) fp32. As in `adaptive_scores`."""
    head, *tails = _parts(weight, clusters, cutoffs)
    frequent, of_clusters = F.linear(hidden, head).float().log_softmax(-1).split([cutoffs[0], len(tails)], dim=-1)
    rare = [
        of_cluster.unsqueeze(-1) + F.linear(hidden, tail).float().log_softmax(-1)
        for tail, of_cluster in zip(tails, of_clusters.unbind(-1), strict=True)
    ]
    return torch.cat([frequent, *rare], dim=-1)


def _parts(weight: Tensor, clusters: Tensor, cutoffs: Sequence[int]) -> list[Tensor]:
    """Return the vectors of the head's slots, (c₁ + K, E), and of the ids of each cluster. One split for all of them,
    so that the backward makes one gradient of the size of `weight`.
    """
    ends = [*cutoffs, len(weight)]
    frequent, *tails = weight.split([end - start for start, end in zip([0, *cutoffs], ends, strict=True)])
    return [torch.cat([frequent, clusters]), *tails]
