"""Evaluation of trained models: held-out bits/dim, the same of compressors, and texts and images that they write."""
