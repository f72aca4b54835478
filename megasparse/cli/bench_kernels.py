"""Report what every GPU kernel takes of an A100 and of an H100, read from its binary; compiled ahead of time, without
a GPU.

    megasparse bench kernels                                             (all of them: half an hour on two cores)
    megasparse bench kernels --operators bucketed_attention --dtypes bf16 --head-dims 64 128           (a minute)
    megasparse bench kernels --output docs/kernels.json                               (records what was compiled)

Each operator is called forward and backward as models call it (megasparse/benchmarks/kernel_cases.py), and every kernel
that it starts is compiled with the settings it is started with. The table has, over all variants of a kernel, the most
registers per thread, the most instructions that spill registers to memory, the most bytes of shared memory per
program, and the fewest tensor-core instructions.
"""

import argparse
import os
from pathlib import Path

from megasparse.benchmarks.kernel_cases import CASES, HEAD_DIMS
from megasparse.benchmarks.kernel_report import NAMES, kernel_table, markdown, record
from megasparse.benchmarks.kernels import SHARED_MEMORY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operators", nargs="+", choices=sorted(CASES), default=sorted(CASES), metavar="NAME")
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS), metavar="D")
    parser.add_argument("--dtypes", nargs="+", choices=list(NAMES.values()), default=list(NAMES.values()))
    parser.add_argument("--capabilities", nargs="+", type=int, choices=list(SHARED_MEMORY), default=list(SHARED_MEMORY))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: cores)")
    parser.add_argument("--output", type=Path, help="JSON file to record the table in")


def run(args: argparse.Namespace) -> None:
    table = kernel_table(args.operators, args.dtypes, args.head_dims, args.capabilities, args.jobs)
    print("\n".join(markdown(table)))
    if args.output is not None:
        record(table, args.output)
