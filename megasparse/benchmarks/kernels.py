"""Resources that a Triton kernel takes of a GPU, read from its binary: registers, spills, shared memory, tensor cores.

It is compiled ahead of time, which needs no GPU.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megasparse.ops.kernels import Launch

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may have, by compute capability (CUDA C programming guide, table of technical
specifications): A100, H100."""
_WARP = 32
_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel. registers: a thread's. spills: instructions that move registers to and from local
    memory. shared: bytes a program. tensor_cores: matrix instructions.
    """

    registers: int
    spills: int
    shared: int
    tensor_cores: int


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """The launches but those that run the same binary as an earlier one."""
    found: dict[str, Launch] = {}
    for launch in launches:
        source, options = _source(launch)
        parts = (launch.kernel.__name__, source.signature, source.constants, source.attrs, options)
        found.setdefault(repr(parts), launch)
    return list(found.values())


def compile_ahead(launch: Launch, capability: int) -> Resources:
    """Compiles a recorded launch for a compute capability (80 is the A100's, 90 the H100's)."""
    source, options = _source(launch)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, _WARP), options=options)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage, code = _dump("--dump-resource-usage", binary), _dump("-sass", binary)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return Resources(
        registers=int(registers[1]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared=compiled.metadata.shared,
        tensor_cores=len(re.findall(r"\sHG?MMA\.", code)),
    )


def _source(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """A launch's source as Triton would specialise it: pointers and numbers that 16 divides are marked, and a number 1
    is constant, but for arguments that the kernel excludes.
    """
    general = {p.name for p in launch.kernel.params if p.do_not_specialize}
    parameters = {p.name: p.is_constexpr for p in launch.kernel.params}
    values = dict(zip(parameters, launch.arguments, strict=False))
    values |= {name: value for name, value in launch.settings.items() if name in parameters}
    missing = [p.name for p in launch.kernel.params if p.name not in values and not p.has_default]
    assert not missing, f"{launch.kernel.__name__} is launched without {missing}"
    values |= {p.name: p.default for p in launch.kernel.params if p.name not in values}
    signature, constants, attributes = {}, {}, {}
    for place, (name, constant) in enumerate(parameters.items()):
        value = values[name]
        if constant or value is None or (type(value) is int and value == 1 and name not in general):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _type(value)
        if (
            name not in general
            and (value.data_ptr() if isinstance(value, Tensor) else type(value) is int and value) % 16 == 0
        ):
            attributes[(place,)] = [["tt.divisibility", 16]]
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
