"""Settings of local attention with relative positions that are not tensors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LocalAttentionSpec:
    """Settings of local attention with relative positions.

    chunk: C, in tokens. causal: only keys at or before the query are visible. scale: factor of the scores.
    """

    chunk: int
    causal: bool
    scale: float
