"""The kernels' binaries: what they take of a GPU is within its limits, and is what docs/kernels.json says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from megasparse.benchmarks.kernel_cases import CASES, HEAD_DIMS, ONE, ONE_WIDTH
from megasparse.benchmarks.kernels import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "docs" / "kernels.json"


def compiled(tmp_path, *options):
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tools/kernel_report.py", "--output", tmp_path / "kernels.json", *options]
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads((tmp_path / "kernels.json").read_text())["kernels"]


def check(table):
    """Against the limits of the GPUs, and what was recorded."""
    known = json.loads(RECORDED.read_text())
    assert known["triton"] == triton.__version__, "record the table anew: tools/kernel_report.py --output"
    for name, line in table.items():
        _, capability, dtype = name.split()
        for head_dim, (_, spills, shared, tensor_cores) in line.items():
            what = f"{name} {head_dim}"
            assert shared <= SHARED_MEMORY[int(capability.removeprefix("sm_"))], what
            if dtype != "fp32" and int(head_dim) <= 128:
                assert spills == 0, what
            if dtype == "fp32":
                assert tensor_cores == 0, f"{what}: TF32"
            elif name.split()[0] in TENSOR_CORES:
                assert tensor_cores > 0, what
            assert line[head_dim] == known["kernels"][name][head_dim], what


def test_kernels_in_bf16_are_within_their_limits_and_as_recorded(tmp_path):
    options = ["--dtypes", "bf16", "--head-dims", "64", "--capabilities", "80"]
    table = compiled(tmp_path, *options, "--operators", *QUICK)
    assert {name.split(".")[0] for name in table} == set(QUICK)
    check(table)


@pytest.mark.kernels
def test_every_kernel_is_within_its_limits_and_as_recorded(tmp_path):
    table = compiled(tmp_path)
    assert {name.split(".")[0] for name in table} == set(CASES)
    for name, line in table.items():
        dims = [ONE] if name.split(".")[0] in ONE_WIDTH else HEAD_DIMS
        assert set(line) == {str(d) for d in dims}, name
    check(table)


QUICK = ("bucketed_attention", "hash_table_attention")
"""Operators whose kernels `make test` compiles."""
TENSOR_CORES = [
    *(f"bucketed_attention.{name}" for name in ("forward", "query_gradient", "key_gradient")),
    *(f"cluster_attention.{name}" for name in ("attend", "query_gradients", "key_gradients")),
    *(f"hash_table_attention.{name}" for name in ("sum_runs", "sum_products", "weighted_sums")),
    *(f"local_attention.local_{name}" for name in ("forward", "backward_queries", "backward_keys")),
    "local_attention.local_backward_distances",
    "gathered_attention.tile_gradients",
]
"""Kernels whose arithmetic is matrix products. Others hash in exact fp32, sort, or do little with each number."""
