"""Pure functions on tensors, without parameters. They import no other part of megasparse except its errors.

Each operator is one file: its specification, the blockwise form for CPUs, and the `Operator` that selects the
implementation; `*_kernels.py` contains its Triton kernels. `tests/helpers/definitions.py` contains the dense
definitions, docs/lab/kernels.md the cost of each kernel.

Letters in all files: B batch, H heads, L length (Lq queries, Lk keys), D head dim, R rounds, M chunk of a window, G =
B·H rows. lse is the log of the sum of exponentials of a query's scores.
"""
