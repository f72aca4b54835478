"""Reading a kernel's resources from its binary, on kernels whose resources are known."""

import subprocess
import sys

PROGRAM = """
import torch, triton, triton.language as tl
from megasparse.ops.kernels import dot, launch, precision, recorded
from megasparse.benchmarks.kernels import compile_ahead

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


def test_registers_spills_shared_memory_and_tensor_cores_are_read_from_the_binary(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)  # Triton reads a kernel's source from its file
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
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
