"""Report the resources of every GPU kernel on A100 and H100, read from the binaries; compiled without a GPU.

    python tools/bench/kernels.py                                             (all kernels: half an hour on two cores)
    python tools/bench/kernels.py --operators bucketed_attention --dtypes bf16 --head-dims 64 128           (a minute)
    python tools/bench/kernels.py --output docs/kernels.json                               (write the table to a file)

Each operator is called forward and backward as in models (kernel_cases.py), and every launched kernel is compiled with
the settings of its launch. The table lists, over all variants of a kernel, the most registers per thread, the most
instructions that spill registers to memory, the most bytes of shared memory per program, the fewest tensor-core
instructions, and the most asynchronous products whose registers are reused before the wait (sass.py). Such a reuse is a
bug of the assembler: the command then exits with code 1 and writes nothing.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megasparse.errors import ConfigError, did_you_mean, report_user_errors

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Compute capability -> largest shared memory per program in bytes (CUDA C programming guide, table of technical
specifications): A100, H100."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", metavar="NAME")
    parser.add_argument("--head-dims", nargs="+", type=int, metavar="D")
    parser.add_argument("--dtypes", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--capabilities", nargs="+", type=int, choices=list(SHARED_MEMORY), default=list(SHARED_MEMORY))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: cores)")
    parser.add_argument("--output", type=Path, help="JSON file to record the table in")
    return parser.parse_args(words)


if __name__ == "__main__":  # help and mistakes end before the slow imports
    report_user_errors(arguments)()

import torch
import triton
from torch import Tensor
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megasparse.files import replacing
from megasparse.ops.kernels import INTERPRETED, Launch, recorded
from tools.bench.kernel_cases import CASES, HEAD_DIMS, ONE, ONE_WIDTH
from tools.bench.sass import instructions, reuses

_WARP = 32
_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_TYPES |= {torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8"}
_TYPES |= {torch.bool: "i1"}


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel. registers: per thread. spills: instructions that move registers to and from local
    memory. shared: bytes per program. tensor_cores: matrix instructions. reuses: see `sass.reuses`.
    """

    registers: int
    spills: int
    shared: int
    tensor_cores: int
    reuses: int


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """Return the launches without duplicates that run the same binary."""
    first: dict[str, Launch] = {}
    for launch in launches:
        source, options = _source(launch)
        parts = (launch.kernel.__name__, source.signature, source.constants, source.attrs, options)
        first.setdefault(repr(parts), launch)
    return list(first.values())


class Assembly(NamedTuple):
    """A compiled kernel as printed by cuobjdump. shared: bytes per program."""

    usage: str
    code: str
    shared: int


def assemble(launch: Launch, capability: int) -> Assembly:
    """Compile a recorded launch for a compute capability (80: A100, 90: H100)."""
    source, options = _source(launch)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, _WARP), options=options)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        return Assembly(_dump("--dump-resource-usage", binary), _dump("-sass", binary), compiled.metadata.shared)


def compile_ahead(launch: Launch, capability: int) -> Resources:
    """Return the resources of a recorded launch's binary for a compute capability."""
    usage, code, shared = assemble(launch, capability)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return Resources(
        registers=int(registers[1]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared=shared,
        tensor_cores=len(re.findall(r"\sHG?MMA\.", code)),
        reuses=reuses(instructions(code)),
    )


def _source(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """Return a launch's source as Triton specialises it: pointers and numbers divisible by 16 are marked, and the
    number 1 becomes a constant, except for arguments that the kernel excludes.
    """
    general = {p.name for p in launch.kernel.params if p.do_not_specialize}
    parameters = {p.name: p.is_constexpr for p in launch.kernel.params}
    values = dict(zip(parameters, launch.arguments, strict=False))
    values |= {name: value for name, value in launch.settings.items() if name in parameters}
    missing = [p.name for p in launch.kernel.params if p.name not in values and not p.has_default]
    assert not missing, f"{launch.kernel.__name__} is launched without {missing}"
    values |= {p.name: p.default for p in launch.kernel.params if p.name not in values}
    signature, constants, attributes = {}, {}, {}
    for position, (name, constant) in enumerate(parameters.items()):
        value = values[name]
        if constant or value is None or (type(value) is int and value == 1 and name not in general):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _type(value)
        if (
            name not in general
            and (value.data_ptr() if isinstance(value, Tensor) else type(value) is int and value) % 16 == 0
        ):
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in launch.settings.items() if name not in parameters}
    return ASTSource(launch.kernel, signature, constants, attributes), options


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    assert isinstance(value, float), value
    return "fp32"


def _dump(option: str, binary: Path) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, binary], check=True, capture_output=True, text=True).stdout


class Variants(NamedTuple):
    """A kernel at one head dim, dtype and compute capability."""

    kernel: str
    dtype: str
    head_dim: int
    capability: int


Table = dict[Variants, Resources]


def kernel_table(
    operators: list[str], names: list[str], head_dims: list[int], capabilities: list[int], jobs: int
) -> Table:
    """Compile the kernels of the operators in `jobs` processes. names: names of the dtypes.

    Raises ConfigError if Triton's interpreter is active.
    """
    if INTERPRETED:
        raise ConfigError("TRITON_INTERPRET", "the interpreter does not compile kernels", "Unset it")
    dtypes = [getattr(torch, NAMES[name]) for name in names]
    work = [(o, t, d) for o in operators for t in dtypes for d in head_dims if d == ONE or o not in ONE_WIDTH]
    table: Table = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(compiled, *item, capabilities) for item in work]
        for task in tqdm(as_completed(tasks), total=len(tasks), unit="case", disable=None):
            table |= task.result()
    return table


def compiled(operator: str, dtype: torch.dtype, head_dim: int, capabilities: list[int]) -> Table:
    """Return the resources of every kernel that a case launches, merged over variants."""
    with recorded() as launches:
        CASES[operator](dtype, head_dim)
    table: Table = {}
    for launch in distinct(launches):
        for capability in capabilities:
            key = Variants(f"{operator}.{launch.kernel.__name__}", _TYPES[dtype], head_dim, capability)
            resources = compile_ahead(launch, capability)
            table[key] = worst(table.get(key, resources), resources)
    return table


def worst(a: Resources, b: Resources) -> Resources:
    return Resources(
        max(a.registers, b.registers),
        max(a.spills, b.spills),
        max(a.shared, b.shared),
        min(a.tensor_cores, b.tensor_cores),
        max(a.reuses, b.reuses),
    )


def markdown(table: Table) -> Iterator[str]:
    yield (
        "| kernel | dtype | head dim | for | registers | spills | shared KiB | tensor-core instructions "
        "| registers of products reused before the wait |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for key, resources in sorted(table.items()):
        excess = " (too much)" if resources.shared > SHARED_MEMORY[key.capability] else ""
        shared = f"{resources.shared / 1024:.1f}{excess}"
        counts = (
            f"{resources.registers} | {resources.spills} | {shared} | {resources.tensor_cores} | {resources.reuses}"
        )
        yield f"| {key.kernel} | {key.dtype} | {key.head_dim} | sm_{key.capability} | {counts} |"


def record(table: Table, path: Path) -> None:
    """Write the table to the file; its entries replace earlier entries of the same kernels.

    One line per kernel, capability and dtype: head dim -> [registers, spills, shared bytes, tensor-core instructions].
    """
    recorded_table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"kernels": {}}
    lines = recorded_table["kernels"] if recorded_table.get("triton") == triton.__version__ else {}
    for key, resources in table.items():
        line = lines.setdefault(f"{key.kernel} sm_{key.capability} {key.dtype}", {})
        line[str(key.head_dim)] = [resources.registers, resources.spills, resources.shared, resources.tensor_cores]
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(lines[name])}" for name in sorted(lines))
    with replacing(path) as file:
        file.write(f'{{\n  "triton": "{triton.__version__}",\n  "kernels": {{\n{rows}\n  }}\n}}\n'.encode())


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    operators, head_dims = args.operators or sorted(CASES), args.head_dims or list(HEAD_DIMS)
    if unknown := sorted(set(operators) - CASES.keys()):
        raise ConfigError("--operators", f'unknown name "{unknown[0]}"', did_you_mean(unknown[0], CASES))
    table = kernel_table(operators, args.dtypes, head_dims, args.capabilities, args.jobs)
    print("\n".join(markdown(table)))
    if any(resources.reuses for resources in table.values()):
        sys.exit(
            "registers of products are reused before the wait: set TRITON_PTXAS_PATH to ptxas of CUDA 13.3 or later"
        )
    if args.output is not None:
        record(table, args.output)


if __name__ == "__main__":
    main()
