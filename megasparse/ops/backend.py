"""Choice of an operator's implementation: its definition, blockwise torch, or Triton kernels."""

import importlib.util
import os
import sys
from functools import cache
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from megasparse.errors import ConfigError

Implementation = Literal["reference", "blockwise", "triton"]
VARIABLE = "MEGASPARSE_OPS"
LARGEST_HEAD_DIM = 256
"""Above it a tile of keys and values leaves no room in a GPU's shared memory."""
LARGEST_IN_99_KB = 128
"""The same where a program has 99 KB of it, as on consumer GPUs of the Ampere and Ada generations."""
MOST_PAIRS = 65535
"""The largest second number of a grid."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def implementation(
    x: Tensor,
    dtypes: tuple[torch.dtype, ...] = _DTYPES,
    largest_width: int | None = LARGEST_HEAD_DIM,
    most_rows: int | None = None,
    *,
    dropout: object = None,
) -> Implementation:
    """The implementation for vectors x (..., L, D): kernels on a GPU for fp32, bf16 and fp16 up to D = 256 (or for the
    dtypes and widths given, None being any width, and for so many rows of L at most), else blockwise torch. Of tensors
    without memory (torch's meta device) what a GPU would run, so that its memory can be counted without one. dropout:
    of attention probabilities, which no kernel has: blockwise torch computes it on a GPU too.

    A GPU that the kernels are not for (ROCm, compute capability below 8.0, or too little shared memory for D) runs
    blockwise torch too, and a line on stderr says so once.

    The environment variable MEGASPARSE_OPS=reference|blockwise|triton forces one; kernels then run on a CPU too, in
    Triton's interpreter. ConfigError for another value, or where the forced kernels cannot take x.
    """
    forced = os.environ.get(VARIABLE)
    fits = x.dtype in dtypes and (largest_width is None or x.shape[-1] <= largest_width)
    fits = fits and (most_rows is None or x.shape[:-2].numel() <= most_rows)
    if forced == "triton" and dropout is not None:
        raise ConfigError(VARIABLE, "the kernels have no dropout of attention probabilities", "Unset it")
    if forced is None:
        if not fits or dropout is not None or not _HAS_TRITON or not (x.is_cuda or x.is_meta):
            return "blockwise"
        return "triton" if x.is_meta or _suits(x.device, x.shape[-1], largest_width) else "blockwise"
    if forced not in get_args(Implementation):
        raise ConfigError(
            VARIABLE, f"{forced!r} is no implementation", "Set reference, blockwise or triton, or unset it"
        )
    if forced == "triton":
        _require_kernels(x, fits, dtypes, largest_width)
    return cast(Implementation, forced)


def _require_kernels(x: Tensor, fits: bool, dtypes: tuple[torch.dtype, ...], largest_width: int | None) -> None:
    if not _HAS_TRITON:
        raise ConfigError(VARIABLE, "triton is not installed", "pip install triton, or set blockwise")
    if not fits:
        taken = ", ".join(_name(dtype) for dtype in dtypes)
        widths = "" if largest_width is None else f" up to a head dim of {largest_width}"
        problem = f"the kernels take {taken}{widths}, not {_name(x.dtype)} of {x.shape[-1]}"
        raise ConfigError(VARIABLE, problem, "Unset it")
    if not (x.is_cuda or x.is_meta) and os.environ.get("TRITON_INTERPRET") != "1":
        hint = "Run on a GPU, or set TRITON_INTERPRET=1, which is slow"
        raise ConfigError(VARIABLE, "triton kernels run on a CPU in its interpreter only", hint)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _suits(device: torch.device, width: int, largest_width: int | None) -> bool:
    """Whether the kernels are for this GPU; says it once where they are not."""
    lack, shared = _facts(device)
    if lack is None and largest_width == LARGEST_HEAD_DIM and width > LARGEST_IN_99_KB and shared < 160 << 10:
        lack = f"a head dim of {width} needs more shared memory than the {shared >> 10} KB of this GPU"
    if lack is not None:
        _say(f"megasparse: {lack}. Blockwise torch runs in place of kernels: the same results, more slowly")
    return lack is None


@cache
def _facts(device: torch.device) -> tuple[str | None, int]:
    """Why a GPU cannot run the kernels, and the bytes of shared memory that a program may have."""
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs, not for ROCm", 0
    found = torch.cuda.get_device_properties(device)
    shared: int = getattr(found, "shared_memory_per_block_optin")  # noqa: B009  (which torch's stubs do not have)
    lack = f"the kernels need compute capability 8.0, {found.name} has {found.major}.{found.minor}"
    return lack if found.major < 8 else None, shared


@cache
def _say(line: str) -> None:
    print(line, file=sys.stderr)
