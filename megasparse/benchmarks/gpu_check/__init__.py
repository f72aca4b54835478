"""The stages of `megasparse gpu-check`: kernels against their definitions, times, and what was counted beforehand."""
