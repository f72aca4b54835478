"""The kernels' binaries: what they take of a GPU is within its limits, and is what docs/kernels.json says."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import triton
from packaging.requirements import Requirement

from megasparse.benchmarks.kernel_cases import CASES, HEAD_DIMS, ONE, ONE_WIDTH
from megasparse.benchmarks.kernels import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "docs" / "kernels.json"
SUPPORTED = ("3.6.0", "3.7.1")
"""Triton 3.7.1, which PyPI's CUDA builds of torch 2.13 require, and the one before it."""


def compiled(tmp_path, *options):
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tools/kernel_report.py", "--output", tmp_path / "kernels.json", *options]
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads((tmp_path / "kernels.json").read_text())["kernels"]


def check(table):
    """Against the limits of the GPUs under any Triton, and against what was recorded under the Triton of the record."""
    known = json.loads(RECORDED.read_text())
    assert known["triton"] in SUPPORTED, "record the table anew: megasparse bench kernels --output"
    assert set(table) <= set(known["kernels"])
    recorded = known["triton"] == triton.__version__
    if not recorded:
        warnings.warn(f"{RECORDED.name} is of Triton {known['triton']}: its figures are not compared", stacklevel=2)
    for name, line in table.items():
        _, capability, dtype = name.split()
        for head_dim, (_, spills, shared, tensor_cores) in line.items():
            what = f"{name} {head_dim}"
            assert shared <= SHARED_MEMORY[int(capability.removeprefix("sm_"))], what
            if dtype != "fp32" and int(head_dim) <= 128:
                assert spills <= SPILLS.get(name.split()[0], 0), what
            if dtype == "fp32":
                assert tensor_cores == 0, f"{what}: TF32"
            elif name.split()[0] in TENSOR_CORES:
                assert tensor_cores > 0, what
            if recorded:
                assert line[head_dim] == known["kernels"][name][head_dim], what


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_requirement_admits_the_supported_versions_of_triton(version):
    pins = [Requirement(text) for text in re.findall(r'"(triton\b[^"]*)"', (ROOT / "pyproject.toml").read_text())]
    assert pins and all(version in pin.specifier for pin in pins), [str(pin) for pin in pins]


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


QUICK = ("bucketed_attention",)
"""Operators whose kernels `make test` compiles: the one of all hashed attention."""
TENSOR_CORES = [
    *(f"bucketed_attention.{name}" for name in ("forward", "query_gradient", "key_gradient")),
    *(f"hash_table_attention.{name}" for name in ("sum_runs", "sum_products", "weighted_sums")),
    *(f"local_attention.local_{name}" for name in ("forward", "backward_queries", "backward_keys")),
    "local_attention.local_backward_distances",
    "gathered_attention.tile_gradients",
]
"""Kernels whose arithmetic is matrix products. Others hash in exact fp32, sort, or do little with each number."""
SPILLS = {
    "random_numbers._normals": 21,
    "sign_codes.transformed_sides": 17,
    "bucketed_attention.forward": 2,
    "bucketed_attention.key_gradient": 6,
}
"""Instructions that a kernel may spill in half precision up to D = 128, others none: a table of the float64 cosine, for
large arguments; registers beyond 168, which ptxas gives up so that three programs fit a multiprocessor; and a few for
sm_80 under Triton 3.7.1 (docs/performance.md)."""
