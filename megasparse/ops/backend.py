"""Choice of an operator's implementation: its definition, blockwise torch, or Triton kernels."""

import importlib.util
import os
from functools import cache
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from megasparse.errors import ConfigError

Implementation = Literal["reference", "blockwise", "triton"]
VARIABLE = "MEGASPARSE_OPS"
LARGEST_HEAD_DIM = 256
"""Above it a tile of keys and values leaves no room in a GPU's shared memory."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def implementation(
    x: Tensor,
    dtypes: tuple[torch.dtype, ...] = _DTYPES,
    largest_width: int | None = LARGEST_HEAD_DIM,
    *,
    dropout: object = None,
) -> Implementation:
    """The implementation for vectors x (..., D): kernels on a GPU for fp32, bf16 and fp16 up to D = 256 (or for the
    dtypes and widths given, None being any width), else blockwise torch. Of tensors without memory (torch's meta
    device) what a GPU would run, so that its memory can be counted without one. dropout: of attention probabilities,
    which no kernel has: blockwise torch computes it on a GPU too.

    The environment variable MEGASPARSE_OPS=reference|blockwise|triton forces one; kernels then run on a CPU too, in
    Triton's interpreter. ConfigError for another value, or where the forced kernels cannot take x.
    """
    forced = os.environ.get(VARIABLE)
    fits = x.dtype in dtypes and (largest_width is None or x.shape[-1] <= largest_width)
    if forced == "triton" and dropout is not None:
        raise ConfigError(VARIABLE, "the kernels have no dropout of attention probabilities", "Unset it")
    if forced is None:
        return "triton" if (x.is_cuda or x.is_meta) and fits and dropout is None and _has_triton() else "blockwise"
    if forced not in get_args(Implementation):
        raise ConfigError(
            VARIABLE, f"{forced!r} is no implementation", "Set reference, blockwise or triton, or unset it"
        )
    if forced == "triton":
        _require_kernels(x, fits, dtypes, largest_width)
    return cast(Implementation, forced)


def _require_kernels(x: Tensor, fits: bool, dtypes: tuple[torch.dtype, ...], largest_width: int | None) -> None:
    if not _has_triton():
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


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
