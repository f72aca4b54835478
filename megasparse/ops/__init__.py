"""Pure functions on tensors, without parameters. They import no other part of megasparse except its errors.

Each operator is one file: its specification, a dense reference, the blockwise form for CPUs, and the `Operator` that
selects the implementation; `*_kernels.py` contains its Triton kernels and their host code.
"""
