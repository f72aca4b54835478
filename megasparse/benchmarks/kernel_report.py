"""What every GPU kernel takes of an A100 and of an H100, read from its binary; compiled without a GPU."""

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from tqdm import tqdm

from megasparse.benchmarks.kernel_cases import CASES, ONE, ONE_WIDTH
from megasparse.benchmarks.kernels import SHARED_MEMORY, Resources, compile_ahead, distinct
from megasparse.data.files import replacing
from megasparse.errors import ConfigError
from megasparse.ops.kernels import INTERPRETED, recorded

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Variants(NamedTuple):
    """One kernel at a head dim, dtype and compute capability."""

    kernel: str
    dtype: str
    head_dim: int
    capability: int


Table = dict[Variants, Resources]


def kernel_table(
    operators: list[str], names: list[str], head_dims: list[int], capabilities: list[int], jobs: int
) -> Table:
    """Compile the kernels of the operators in `jobs` processes. names: those of the dtypes.

    Raises ConfigError where Triton's interpreter is on.
    """
    if INTERPRETED:
        raise ConfigError("TRITON_INTERPRET", "the interpreter compiles nothing", "Unset it")
    dtypes = [dtype for dtype, name in NAMES.items() if name in names]
    work = [(o, t, d) for o in operators for t in dtypes for d in head_dims if d == ONE or o not in ONE_WIDTH]
    table: Table = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(compiled, *item, capabilities) for item in work]
        for task in tqdm(as_completed(tasks), total=len(tasks), unit="case", disable=None):
            table |= task.result()
    return table


def compiled(operator: str, dtype: torch.dtype, head_dim: int, capabilities: list[int]) -> Table:
    """Every kernel that a case starts, over its variants."""
    with recorded() as launches:
        CASES[operator](dtype, head_dim)
    table: Table = {}
    for launch in distinct(launches):
        for capability in capabilities:
            key = Variants(f"{operator}.{launch.kernel.__name__}", NAMES[dtype], head_dim, capability)
            found = compile_ahead(launch, capability)
            table[key] = worst(table.get(key, found), found)
    return table


def worst(a: Resources, b: Resources) -> Resources:
    return Resources(
        max(a.registers, b.registers),
        max(a.spills, b.spills),
        max(a.shared, b.shared),
        min(a.tensor_cores, b.tensor_cores),
    )


def markdown(table: Table) -> Iterator[str]:
    yield "| kernel | dtype | head dim | for | registers | spills | shared KiB | tensor-core instructions |"
    yield "|---|---|---|---|---|---|---|---|"
    for key, found in sorted(table.items()):
        shared = f"{found.shared / 1024:.1f}" + (" (too much)" if found.shared > SHARED_MEMORY[key.capability] else "")
        counts = f"{found.registers} | {found.spills} | {shared} | {found.tensor_cores}"
        yield f"| {key.kernel} | {key.dtype} | {key.head_dim} | sm_{key.capability} | {counts} |"


def record(table: Table, path: Path) -> None:
    """Puts the table into the file, in place of what it has of the same kernels.

    A line a kernel, capability and dtype: head dim -> [registers, spills, shared bytes, tensor-core instructions].
    """
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"kernels": {}}
    lines = known["kernels"] if known.get("triton") == triton.__version__ else {}
    for key, found in table.items():
        line = lines.setdefault(f"{key.kernel} sm_{key.capability} {key.dtype}", {})
        line[str(key.head_dim)] = [found.registers, found.spills, found.shared, found.tensor_cores]
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(lines[name])}" for name in sorted(lines))
    with replacing(path) as file:
        file.write(f'{{\n  "triton": "{triton.__version__}",\n  "kernels": {{\n{rows}\n  }}\n}}\n'.encode())
