"""Products, random bits and kernel launches, shared by the Triton kernels of all operators.

Start kernels only with `launch`, so that `observed` captures every one with its exact settings. Triton recompiles a
kernel if an integer argument is 1 or a multiple of 16. Counts and lengths are excluded from this (`do_not_specialize`);
strides, and lengths that mask the contiguous dimension, are not, because vectorised loads need to know that they are
multiples of 16.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "y", "on", "yes", "true"))
"""True if kernels run in Triton's interpreter, on a CPU."""

if INTERPRETED.value:  # Triton 3.6 and 3.7 call int() on loop bounds, 1-element arrays, an error since numpy 2.4
    from triton.runtime import interpreter

    _prepare = interpreter._patch_lang_tensor

    def _prepare_tensors(tensor: Any, *scope: Any) -> None:  # scope: since Triton 3.6
        _prepare(tensor, *scope)
        change = scope[0].set_attr if scope else setattr
        change(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _prepare_tensors


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return a·b, (m, k) and (k, n), summed in fp32. PRECISION: for fp32 factors, see `precision`."""
    if INTERPRETED:  # the interpreter would multiply bf16 bit patterns
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def mix(x):
    """Apply `ops.random`'s bijection of 32-bit integers to uint32 x."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def load_rows(x, row, valid, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows (n) of x, `stride` numbers apart, 0 for invalid rows: (n, WIDTH)."""
    d = tl.arange(0, WIDTH)[None, :]
    places = x + row.to(tl.int64)[:, None] * stride + d
    return tl.load(places, mask=valid[:, None] & (d < D), other=0.0)


@triton.jit
def store_rows(x, row, values, valid, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows in the dtype of x; inverse of `load_rows`."""
    d = tl.arange(0, WIDTH)[None, :]
    places = x + row.to(tl.int64)[:, None] * stride + d
    tl.store(places, values.to(x.dtype.element_ty), mask=valid[:, None] & (d < D))


def whole_vectors(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension; views of heads are not copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_alike(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor like x (B, H, L, D), contiguous, with heads inside tokens as in x, to avoid copies."""
    if x.stride(1) < x.stride(2):
        return torch.empty_like(x.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).transpose(1, 2)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def strides(**xs: Tensor) -> dict[str, int]:
    """Return the strides of each tensor (B, H, L, D) as NAME_batch, NAME_head and NAME_stride (of tokens)."""
    names = ("batch", "head", "stride")
    return {f"{x}_{name}": step for x in xs for name, step in zip(names, xs[x].stride()[:3], strict=True)}


def steps_of_lists(name: str, x: Tensor, row: int) -> dict[str, int]:
    """Return the strides of lists x (B|1, H|1, ...) of `row` numbers as NAME_batch and NAME_head, 0 if shared."""
    batch, heads = x.shape[:2]
    return {f"{name}_batch": heads * row if batch > 1 else 0, f"{name}_head": row if heads > 1 else 0}


def precision() -> str:
    """Return the precision of products of fp32 factors: TF32 if torch allows it, else exact."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def block(width: int) -> int:
    """Return the smallest power of two >= `width`, at least 16 as tl.dot requires."""
    return max(16, 1 << (width - 1).bit_length())


class Launch(NamedTuple):
    """A kernel, its grid, its arguments by position, and its settings: constants, num_warps, num_stages."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    settings: dict[str, Any]

    def start(self) -> None:
        """Run on the device of the first tensor; do nothing for an empty grid or meta tensors."""
        first = next(x for x in self.arguments if isinstance(x, Tensor))
        if not all(self.grid) or first.is_meta:
            return
        with torch.cuda.device_of(first):
            # Triton's own lookup of the binary takes half of a launch's time on the host. It depends on no more than:
            traits = [(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in self.arguments]
            key = (self.kernel.fn, first.device, *traits, *self.settings.items())
            binary = _binaries.get(key)
            if binary is None:
                if len(_binaries) == _MOST_BINARIES:
                    _binaries.clear()
                _binaries[key] = self.kernel[self.grid](*self.arguments, **self.settings)
            else:
                constants = map(self.settings.__getitem__, self.kernel.arg_names[len(self.arguments) :])
                binary[(*self.grid, 1, 1)](*self.arguments, *constants)


_binaries: dict[tuple[Any, ...], Any] = {}
_MOST_BINARIES = 4096  # entries, since each length adds some


_observer: Callable[[Launch], None] = Launch.start


def launch(kernel: Any, grid: tuple[int, ...], **values: Any) -> None:
    """Start `kernel`, given its parameters by name, num_warps and num_stages. See `Launch.start`."""
    constants = kernel.fn.__annotations__
    arguments = tuple(values.pop(name) for name in kernel.arg_names if name not in constants)
    _observer(Launch(kernel, grid, arguments, values))


@contextlib.contextmanager
def observed(see: Callable[[Launch], None]) -> Iterator[None]:
    """Context manager that passes kernel launches to `see` instead of running them."""
    global _observer
    before = _observer
    _observer = see
    try:
        yield
    finally:
        _observer = before


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Context manager that yields a list of kernel launches instead of running them."""
    launches: list[Launch] = []
    with observed(launches.append):
        yield launches
