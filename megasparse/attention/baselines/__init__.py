"""Attention mechanisms of other papers: baselines."""
