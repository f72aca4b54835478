"""Measurements: time and memory of attention and of training steps, and what GPU kernels take."""
