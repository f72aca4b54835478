"""Frozen matrices in 4 or 8 bits, with bitsandbytes; the codes equal transformers'.

nf4: 4-bit NormalFloat in blocks of 64 with 8-bit block scales (Dettmers et al. 2023, sections 3 and 4). int8: one scale
per row (Dettmers et al. 2022, without their outliers).
"""

import logging
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megasparse.errors import UserError

Kind = Literal["nf4", "int8"]
BLOCK, SCALES = 64, 256
"""Numbers per block, and block scales that share a scale."""
aten = torch.ops.aten
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # faster kernels, optional, are missing


class Quantised(Tensor):
    """A matrix that stores codes, and is dequantised by each operation that reads it.

    Views and casts share the codes, so autograd saves codes for the backward pass. codes and scales: as bitsandbytes
    returns them, on the meta device without values.
    """

    codes: Tensor
    scales: Any

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Any, shape: tuple[int, int], dtype: torch.dtype, transposed: bool = False
    ) -> "Quantised":
        strides = (1, shape[1]) if transposed else (shape[1], 1)
        size = shape[::-1] if transposed else shape
        options: dict[str, Any] = {"strides": strides, "dtype": dtype, "device": codes.device}
        return Tensor._make_wrapper_subclass(cls, size, **options)

    def __init__(
        self, codes: Tensor, scales: Any, shape: tuple[int, int], dtype: torch.dtype, transposed: bool = False
    ):
        self.codes, self.scales, self.stored, self.transposed = codes, scales, shape, transposed

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Quantised({list(self.shape)}, {self.dtype}, {self.codes.dtype} codes)"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the codes, for reports of memory."""
        return self.codes.untyped_storage()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the codes and scales, without bitsandbytes' table of values."""
        rows, columns = self.stored
        if self.codes.dtype == torch.int8:
            return rows * columns + 4 * rows
        blocks = -(-rows * columns // BLOCK)
        return -(-rows * columns // 2) + blocks + 4 * -(-blocks // SCALES)

    def dequantise(self) -> Tensor:
        """Return the matrix in the tensor's dtype."""
        if self.codes.is_meta:
            values = self.codes.new_empty(self.stored, dtype=self.dtype)
        elif self.codes.dtype == torch.int8:
            values = _bitsandbytes().int8_vectorwise_dequant(self.codes, self.scales).to(self.dtype)
        else:
            scales = self.scales
            scales.dtype = self.dtype
            values = _bitsandbytes().dequantize_4bit(self.codes, scales)
        return values.t() if self.transposed else values

    def _like(self, dtype: torch.dtype | None = None, turned: bool = False) -> "Quantised":
        return Quantised(self.codes, self.scales, self.stored, dtype or self.dtype, self.transposed != turned)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if function in (aten.detach.default, aten.alias.default):
            return args[0]._like()
        if function is aten.t.default:
            return args[0]._like(turned=True)
        if function is aten._to_copy.default and _is_cast(args[0], **kwargs):
            return args[0]._like(kwargs["dtype"])
        args, kwargs = tree_map_only(Quantised, Quantised.dequantise, (args, kwargs))
        return function(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[object, ...]]:
        return ["codes"], (self.scales, self.stored, self.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(tensors: Any, context: Any, size: Any, stride: Any) -> "Quantised":
        return Quantised(tensors["codes"], *context)


def _is_cast(x: Tensor, dtype: torch.dtype | None = None, device: Any = None, **others: Any) -> bool:
    return dtype is not None and dtype.is_floating_point and device in (None, x.device)


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """True for the frozen matrices of layers, outside mechanisms and adapters."""
    return len(shape) == 2 and "blocks." in name and ".mechanisms." not in name and ".lora_" not in name


def quantise(values: Tensor, kind: Kind, dtype: torch.dtype) -> Quantised:
    """Quantise a matrix. dtype: of the dequantised values. Raises UserError if bitsandbytes is not installed."""
    shape = (values.shape[0], values.shape[1])
    if values.is_meta:
        sizes = shape if kind == "int8" else (-(-math.prod(shape) // 2), 1)
        codes = torch.empty(sizes, dtype=torch.int8 if kind == "int8" else torch.uint8, device=values.device)
        return Quantised(codes, None, shape, dtype)
    values = values.detach().contiguous()
    if kind == "int8":
        codes, scales, _ = _bitsandbytes().int8_vectorwise_quant(values.half())
    else:
        options = {"blocksize": BLOCK, "compress_statistics": True, "quant_type": kind}
        codes, scales = _bitsandbytes().quantize_4bit(values, **options)
    return Quantised(codes, scales, shape, dtype)


def _bitsandbytes() -> ModuleType:
    try:
        import bitsandbytes.functional
    except ImportError:
        problem = "lora.quantized: bitsandbytes is not installed"
        raise UserError(f'{problem}. Install it: pip install -e ".[quantized]", or set it to null') from None
    return bitsandbytes.functional
