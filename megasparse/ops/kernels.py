"""Products, random bits and the launch of kernels, shared by the Triton kernels of all operators.

Kernels are started by `launch` only, so that `observed` sees every one of them with the very settings it runs with:
ahead-of-time compilation needs no list of its own.

Triton compiles a kernel again if an integer argument is 1 or a multiple of 16. Kernels exclude counts and lengths from
that (`do_not_specialize`), so that a new length compiles nothing. Strides are not excluded, nor lengths that mask the
contiguous dimension: a load of several elements needs to know that these are multiples of 16.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Kernels run in Triton's interpreter, on a CPU."""

if INTERPRETED.value:  # it reads bounds of loops by int() of arrays of one number, which numpy refuses from 2.4 on
    from triton.runtime import interpreter

    _prepare = interpreter._patch_lang_tensor

    def _prepare_tensors(tensor: Any, scope: Any) -> None:
        _prepare(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _prepare_tensors


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return a·b, (m, k) and (k, n), summed in fp32. PRECISION, of fp32 factors only: see `precision`."""
    if INTERPRETED:  # it multiplies the bit patterns of bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def mix(x):
    """`ops.random`'s bijection of 32-bit integers, for uint32 x."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def load_rows(x, row, valid, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows (n) of x, which has one every `stride` numbers, 0 where not valid: (n, WIDTH)."""
    d = tl.arange(0, WIDTH)[None, :]
    places = x + row.to(tl.int64)[:, None] * stride + d
    return tl.load(places, mask=valid[:, None] & (d < D), other=0.0)


@triton.jit
def store_rows(x, row, values, valid, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows, the inverse of `load_rows`, in the dtype of x."""
    d = tl.arange(0, WIDTH)[None, :]
    places = x + row.to(tl.int64)[:, None] * stride + d
    tl.store(places, values.to(x.dtype.element_ty), mask=valid[:, None] & (d < D))


def whole_vectors(x: Tensor) -> Tensor:
    """Return x, whose vectors' elements are next to each other; heads are views, and stay so."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_alike(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor like x (B, H, L, D), contiguous, with heads inside tokens where x has them: no copy is
    needed then.
    """
    settings: dict[str, Any] = {"memory_format": torch.contiguous_format, "dtype": dtype}
    if x.stride(1) < x.stride(2):
        return torch.empty_like(x.transpose(1, 2), **settings).transpose(1, 2)
    return torch.empty_like(x, **settings)


def strides(*xs: Tensor) -> list[int]:
    """Return the strides of batch, head and token of each tensor (B, H, L, D)."""
    return [stride for x in xs for stride in x.stride()[:3]]


def steps_of_lists(x: Tensor, row: int = 1) -> tuple[int, int]:
    """Return the steps in lists x (B|1, H|1, ...), of `row` numbers each, from one sequence, and from one head, to the
    next; 0 where they share a list.
    """
    batch, heads = x.shape[:2]
    return heads * row if batch > 1 else 0, row if heads > 1 else 0


def precision() -> str:
    """Return the precision of products of fp32 factors: exactly, or in TF32 where torch allows it."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def block(width: int) -> int:
    """Return the smallest power of two that holds `width`, at least 16: what tl.dot takes."""
    return max(16, triton.next_power_of_2(width))


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, its positional arguments, and its settings: compile-time constants, num_warps, num_stages."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    settings: dict[str, Any]

    def start(self) -> None:
        """Start it on the device of its first tensor; a grid without programs, or tensors without memory, nothing."""
        first = next(x for x in self.arguments if isinstance(x, Tensor))
        if all(self.grid) and not first.is_meta:
            with torch.cuda.device_of(first):
                self.kernel[self.grid](*self.arguments, **self.settings)


_observer: Callable[[Launch], None] = Launch.start


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    """Start `kernel`, see `Launch.start`."""
    _observer(Launch(kernel, grid, arguments, settings))


@contextlib.contextmanager
def observed(see: Callable[[Launch], None]) -> Iterator[None]:
    """Give kernels inside the context to `see` instead of starting them."""
    global _observer
    before, _observer = _observer, see
    try:
        yield
    finally:
        _observer = before


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """List kernels inside the context instead of starting them."""
    launches: list[Launch] = []
    with observed(launches.append):
        yield launches
