"""Which implementation of an operator runs: its definition, blockwise torch, or Triton kernels."""

import importlib.util
import os
from functools import cache
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from megasparse.errors import ConfigError

Implementation = Literal["reference", "eager", "triton"]
VARIABLE = "MEGASPARSE_OPS"
LARGEST_HEAD_DIM = 256
"""Above it a tile of keys and values leaves no room in a GPU's shared memory."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def implementation(x: Tensor) -> Implementation:
    """The implementation for vectors x (..., D): kernels on a GPU for fp32, bf16 and fp16 up to D = 256, else blockwise
    torch.

    The environment variable MEGASPARSE_OPS=reference|eager|triton forces one; kernels then run on a CPU too, in
    Triton's interpreter. ConfigError for another value, or where the forced kernels cannot take x.
    """
    forced = os.environ.get(VARIABLE)
    fits = x.dtype in _DTYPES and x.shape[-1] <= LARGEST_HEAD_DIM
    if forced is None:
        return "triton" if x.is_cuda and fits and _has_triton() else "eager"
    if forced not in get_args(Implementation):
        raise ConfigError(VARIABLE, f"{forced!r} is no implementation", "Set reference, eager or triton, or unset it")
    if forced == "triton":
        _require_kernels(x, fits)
    return cast(Implementation, forced)


def _require_kernels(x: Tensor, fits: bool) -> None:
    if not _has_triton():
        raise ConfigError(VARIABLE, "triton is not installed", "pip install triton, or set eager")
    if not fits:
        problem = f"the kernels take fp32, bf16 and fp16 up to a head dim of {LARGEST_HEAD_DIM}"
        raise ConfigError(
            VARIABLE, f"{problem}, not {str(x.dtype).removeprefix('torch.')} of {x.shape[-1]}", "Unset it"
        )
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        mend = "Run on a GPU, or set TRITON_INTERPRET=1, which is slow"
        raise ConfigError(VARIABLE, "triton kernels run on a CPU in its interpreter only", mend)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
