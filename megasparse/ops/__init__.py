"""Pure functions on tensors, without parameters. They know no other part of megasparse.

An operator is one file: its specification, its dense definition, the form in blocks that a CPU runs, and the `Operator`
that chooses; `*_kernels.py` has its Triton kernels and their host code.
"""
