"""Where the tests of Triton kernels run."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Kernels run on the GPU where there is one, else on the CPU, in Triton's interpreter."""
