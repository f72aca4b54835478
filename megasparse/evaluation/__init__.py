"""Evaluation of trained models: held-out bits/dim, comparison with compressors, generated texts and images."""
