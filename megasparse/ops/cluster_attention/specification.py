"""Settings of cluster attention that are not tensors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterAttentionSpec:
    """Settings of cluster attention.

    causal: only keys at or before the query are visible. scale: factor of q·k. count_clusters: a pair that N clusters
    hold counts once, else N times.
    """

    causal: bool
    scale: float
    count_clusters: bool
