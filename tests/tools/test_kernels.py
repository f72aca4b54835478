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

from tools.bench.kernel_cases import CASES, HEAD_DIMS, ONE, ONE_WIDTH
from tools.bench.kernels import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "docs" / "kernels.json"
SUPPORTED = ("3.6.0", "3.7.1")
"""Triton 3.7.1, which PyPI's CUDA builds of torch 2.13 require, and the one before it."""


def compiled(tmp_path, *options):
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tools/bench/kernels.py", "--output", tmp_path / "kernels.json", *options]
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads((tmp_path / "kernels.json").read_text())["kernels"]


def check(table):
    """Against the limits of the GPUs under any Triton, and against what was recorded under the Triton of the record."""
    known = json.loads(RECORDED.read_text())
    assert known["triton"] in SUPPORTED, "record the table anew: python tools/bench/kernels.py --output"
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

PROGRAM = """
import torch, triton, triton.language as tl
from megasparse.ops.kernels import dot, launch, precision, recorded
from tools.bench.kernels import compile_ahead

@triton.jit
def product(a, b, n, mask, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(a + i[:, None] * SIZE + i[None, :])
    y = dot(x, tl.trans(x), PRECISION)
    if mask is not None:
        y += tl.load(mask + i)[None, :]
    tl.store(b + i[:, None] * SIZE + i[None, :], y, mask=i[:, None] < n)

for dtype, size in ((torch.bfloat16, 64), (torch.float32, 32), (torch.float32, 64)):
    with recorded() as launches:
        launch(product, (1,), torch.zeros(size, size, dtype=dtype), torch.zeros(size, size), size, None,
               SIZE=size, PRECISION=precision(), num_warps=4)
    for capability in (80, 90):
        found = compile_ahead(launches[0], capability)
        print(found.registers, found.spills, found.shared, found.tensor_cores)
"""


@pytest.mark.slow
def test_registers_spills_shared_memory_and_tensor_cores_are_read_from_the_binary(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)  # Triton reads a kernel's source from its file
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    result = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    bf16_80, bf16_90, small_80, _, large_80, large_90 = (
        [int(n) for n in line.split()] for line in result.stdout.splitlines()
    )
    assert bf16_80[3] == 64 * 64 * 64 // (16 * 8 * 16) // 4  # each of four warps' m16n8k16
    assert bf16_90[3] == 64 // 16  # one warpgroup's m64n64k16
    assert bf16_80[1] == bf16_90[1] == small_80[1] == small_80[3] == 0
    assert large_80[1] > 0 and large_90[1] > 0  # IEEE products keep whole rows in registers
    assert 2 * 64 * 64 <= bf16_90[2] <= 64 * 1024
