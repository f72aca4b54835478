"""The definition of unit keys, to test against."""

from torch import Tensor

SHORTEST = 1e-12
"""Queries shorter than this are divided by it: a zero vector stays zero."""


def unit_keys(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k = q / max(|q|, SHORTEST), in the dtype of q."""
    length = (q * q).sum(-1, keepdim=True).sqrt()
    return q, q / length.clamp_min(SHORTEST)
