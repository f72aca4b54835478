"""Positive random features of the softmax kernel (Choromanski et al. 2020): E[φ(x)·φ(y)] = exp(x·y)."""

from megasparse.ops.random_features.blockwise import exponents, orthogonal_projections, positive_features

__all__ = ["exponents", "orthogonal_projections", "positive_features"]
