"""The kernels' binaries: their resources are within a GPU's limits and equal docs/kernels.json."""

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

from tests.helpers.cases import together
from tools.bench.kernel_cases import CASES, HEAD_DIMS, ONE, ONE_WIDTH
from tools.bench.kernels import SHARED_MEMORY
from tools.bench.sass import instructions, reuses

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "docs" / "kernels.json"
SUPPORTED = ("3.6.0", "3.7.1")
"""Triton 3.7.1, which PyPI's CUDA builds of torch 2.13 require, and the one before it."""


def compiled(tmp_path, *options):
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tools/bench/kernels.py", "--output", tmp_path / "kernels.json", *options]
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads((tmp_path / "kernels.json").read_text())["kernels"]


def run(tmp_path, program):
    """Return the output of a program that compiles kernels."""
    (tmp_path / "program.py").write_text(program)  # Triton reads a kernel's source from its file
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    return subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout


def check(table):
    """Against the limits of the GPUs under any Triton, and against the record under its Triton."""
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
            if dtype == "fp32" and name.split()[0] not in HASHES:
                assert tensor_cores == 0, f"{what}: TF32"
            elif name.split()[0] in (*TENSOR_CORES, *HASHES):
                assert tensor_cores > 0, what
            if recorded:
                assert line[head_dim] == known["kernels"][name][head_dim], what


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_requirement_admits_the_supported_versions_of_triton(version):
    pins = [Requirement(text) for text in re.findall(r'"(triton\b[^"]*)"', (ROOT / "pyproject.toml").read_text())]
    assert pins and all(version in pin.specifier for pin in pins), [str(pin) for pin in pins]


@pytest.mark.slow
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
"""Operators whose kernels `make test-all` compiles: the one of all hashed attention."""
TENSOR_CORES = [
    *(f"bucketed_attention.{name}" for name in ("forward", "query_gradient", "key_gradient")),
    *(f"hash_table_attention.{name}" for name in ("sum_runs", "sum_products", "weighted_sums")),
    "gathered_attention.tile_gradients",
]
"""Kernels whose arithmetic is matrix products, exact in fp32. Others sort, or do little with each number."""
HASHES = ("angular_hash.angular", "learned_codes.best_bucket", "learned_codes.hidden_units", "sign_codes.sides")
"""Kernels that compute every product as three TF32 products, whatever the dtype."""
SPILLS = {"random_numbers._normals": 21, "sign_codes.transformed_sides": 17}
"""Instructions that a kernel may spill in half precision up to D = 128, others none: a table of the float64 cosine, for
large arguments; registers beyond 168, which ptxas gives up so that three programs fit a multiprocessor."""

LOOP = """
        /*0100*/                   HGMMA.64x64x16.F32.BF16 R56, R36, gdesc[UR8].tnspB, R56 ;   /* 0x4 */
        /*0110*/                   HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR20].tnspB, R56, gsb0 ;
        /*0120*/                   {0} ;
        /*0130*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0140*/                   WARPGROUP.DEPBAR.LE gsb0, {1} ;
        /*0150*/                   {2} ;
        /*0160*/              @!P3 BRA 0x0100 ;
        /*0170*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0180*/                   IMAD.MOV.U32 R24, RZ, RZ, R36 ;
        /*0190*/                   EXIT ;
"""


@together(
    "before,pending,after,products",
    [
        ("FADD R23, R24, R36", "0x1", "MOV R36, R1", 0),  # at most the later group is pending
        ("FADD R24, R23, R36", "0x1", "MOV R36, R1", 1),
        ("LDG.E.128 R24, desc[UR4][R2.64]", "0x0", "NOP", 1),
        ("LDS.64 R23, [R2]", "0x0", "NOP", 1),  # and R24
        ("@P0 SHFL.BFLY PT, R39, R2, 0x1, 0x1f", "0x0", "NOP", 1),
        ("ISETP.GE.AND P0, PT, R24, R36, PT", "0x0", "STS.128 [R24], R36", 0),
        ("@P1 BRA 0x0150", "0x0", "MOV R36, R1", 1),  # around the wait
        ("CS2R R26, SRZ", "0x2", "MOV R39, R1", 2),
        ("NOP", "0x3", "MOV R36, R1", 1),
    ],
)
def test_a_register_of_a_product_reused_before_the_wait_is_found(before, pending, after, products):
    assert reuses(instructions(LOOP.format(before, pending, after))) == products


LENGTHS = """
import torch
from megasparse.ops.hash_table_attention import HashTableAttentionSpec
from megasparse.ops.hash_table_attention_kernels import hash_table_attention
from megasparse.ops.kernels import recorded
from megasparse.ops.normalize_kernels import unit_keys
from tools.bench.kernels import distinct

torch.set_default_device("meta")

def pass_at(length):
    q, k, v = (torch.zeros(1, 2, length, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    codes = torch.zeros(1, 2, 2, length, dtype=torch.int16)
    hash_table_attention(q, k, v, codes, codes, HashTableAttentionSpec(11, True))[0].sum().backward()
    unit_keys(q)[1].sum().backward()

found = []
for length in (512, 2048, 4096, 4112, 65536):
    with recorded() as launches:
        pass_at(length)
    found += launches
    print(len(distinct(found)))
"""


def test_a_new_length_compiles_nothing(tmp_path):
    """Multiples of 16, whose numbers of blocks, tiles and spans are 1, multiples of 16, and neither."""
    first, *others = run(tmp_path, LENGTHS).split()
    assert int(first) > 15 and set(others) == {first}


WITHOUT_WAITS = """
import torch
from megasparse.ops.kernels import recorded
from tools.bench.kernel_cases import CASES
from tools.bench.kernels import assemble
from tools.bench.sass import instructions, reuses

with recorded() as launches:
    CASES["bucketed_attention"](torch.bfloat16, 64)
launch = next(x for x in launches if x.kernel.__name__ == "forward")
code = instructions(assemble(launch, 90).code)
print(reuses(code), reuses([x for x in code if not x.name.startswith("WARPGROUP.DEPBAR")]))
"""


@pytest.mark.slow
def test_without_their_waits_all_products_with_registers_are_found(tmp_path):
    """Products of weights and values, on an H100: four with 16 of 64 keys each."""
    assert run(tmp_path, WITHOUT_WAITS).split() == ["0", "4"]


AHEAD = """
import torch
from megasparse.ops.kernels import recorded
from tools.bench.kernel_cases import CASES
from tools.bench.kernels import assemble
from tools.bench.sass import instructions

with recorded() as launches:
    CASES["bucketed_attention"](torch.bfloat16, 64)
names = ("forward", "query_gradient", "key_gradient")
lsh, local = ([x for x in launches if x.kernel.__name__ in names and x.settings["ROUNDS"] == n][:count]
              for n, count in ((2, 4), (1, 1)))
for launch in (lsh[0], local[0], *lsh[2:4]):
    for capability in (80, 90):
        names = [x.name for x in instructions(assemble(launch, capability).code)]
        product = next(i for i, name in enumerate(names) if name.startswith(("HMMA", "HGMMA")))
        copies = [i for i, name in enumerate(names) if name.startswith("LDGSTS")]
        print(launch.kernel.__name__, launch.settings["JUMP"], bool(copies) and copies[0] < product < copies[-1])
"""


@pytest.mark.slow
def test_loops_copy_the_next_tiles_while_they_multiply(tmp_path):
    """Asynchronous copies before the first product and after it."""
    lines = [line.split() for line in run(tmp_path, AHEAD).splitlines()]
    assert [line[0] for line in lines[::2]] == ["forward", "forward", "query_gradient", "key_gradient"]
    assert all(ahead == "True" for *_, ahead in lines)


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
        launch(product, (1,), a=torch.zeros(size, size, dtype=dtype), b=torch.zeros(size, size), n=size, mask=None,
               SIZE=size, PRECISION=precision(), num_warps=4)
    for capability in (80, 90):
        found = compile_ahead(launches[0], capability)
        print(found.registers, found.spills, found.shared, found.tensor_cores)
"""


@pytest.mark.slow
def test_registers_spills_shared_memory_and_tensor_cores_are_read_from_the_binary(tmp_path):
    bf16_80, bf16_90, small_80, _, large_80, large_90 = (
        [int(n) for n in line.split()] for line in run(tmp_path, PROGRAM).splitlines()
    )
    assert bf16_80[3] == 64 * 64 * 64 // (16 * 8 * 16) // 4  # each of four warps' m16n8k16
    assert bf16_90[3] == 64 // 16  # one warpgroup's m64n64k16
    assert bf16_80[1] == bf16_90[1] == small_80[1] == small_80[3] == 0
    assert large_80[1] > 0 and large_90[1] > 0  # IEEE products keep whole rows in registers
    assert 2 * 64 * 64 <= bf16_90[2] <= 64 * 1024
