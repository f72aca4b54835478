"""Execution of operators: choice of an implementation, autocast, precision, and products whose rows do not depend on
their number.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, update_wrapper, wraps
from typing import Any, Generic, Literal, ParamSpec, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megasparse.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
Implementation = Literal["blockwise", "triton"]
VARIABLE = "MEGASPARSE_OPS"
LARGEST_HEAD_DIM = 256
"""Above this, a tile of keys and values exceeds a GPU's shared memory."""
LARGEST_IN_99_KB = 128
"""The same for GPUs with 99 KB of shared memory per program, such as consumer Ampere and Ada GPUs."""
MOST_PAIRS = 65535
"""Largest second dimension of a CUDA grid."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class Operator(Generic[P, R]):
    """Pure function of tensors with several implementations of one signature, which runs without autocast.

    Args:
        blocks: Plain torch in blocks of bounded memory. Its docstring becomes the operator's.
        kernels: "module:function" of Triton kernels, imported on first use; None runs `blocks` on GPUs too.
        decides: Position of the argument whose device, dtype and shape select the implementation.
        cast: Number of arguments after the first that are cast to its dtype, because torch.autocast mixes dtypes.
        differentiable: False runs it without recording gradients.
        limits: Limits of the kernels on the deciding argument, see `implementation`.

    With a keyword argument `dropout` (of attention probabilities) other than None, the kernels are not used.
    """

    def __init__(
        self,
        blocks: Callable[P, R],
        *,
        kernels: str | None = None,
        decides: int = 0,
        cast: int = 0,
        differentiable: bool = True,
        **limits: Any,
    ):
        self.blocks = blocks
        self.kernels = kernels
        self.limits = limits
        self.decides = decides
        self.cast = cast
        self.differentiable = differentiable
        update_wrapper(self, blocks)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        x: Any = args[self.decides]
        chosen = implementation(x, **self.limits, dropout=kwargs.get("dropout"))
        function: Callable[..., R] = self.blocks
        if chosen == "triton" and self.kernels is not None:
            module, name = self.kernels.split(":")
            function = getattr(importlib.import_module(module), name)
            kwargs.pop("dropout", None)
        first, *rest = args
        dtype = getattr(first, "dtype", None)
        rest[: self.cast] = [tensor.to(dtype) for tensor in rest[: self.cast]]  # type: ignore[attr-defined]
        with autocast_off(x), torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            return function(first, *rest, **kwargs)


def operator(kernels: bool = True, **settings: Any) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Decorate a blockwise function to make it an `Operator`. Its kernels are the function of the same name in
    MODULE_kernels, unless `kernels` is False. settings: of `Operator`.
    """

    def decorate(blocks: Callable[P, R]) -> Operator[P, R]:
        path = f"{blocks.__module__}_kernels:{blocks.__name__}" if kernels else None  # type: ignore[attr-defined]
        return Operator(blocks, kernels=path, **settings)

    return decorate


_times = 1.0


def counted_times() -> float:
    """Return how often a plan counts the current operation, see `counted`."""
    return _times


@contextmanager
def counted(times: float) -> Iterator[None]:
    """Count the operations of a block `times` times in a plan: on the meta device one of many equal tiles runs."""
    global _times
    before, _times = _times, _times * times
    try:
        yield
    finally:
        _times = before


def implementation(
    x: Tensor,
    dtypes: tuple[torch.dtype, ...] = _DTYPES,
    largest_width: int | None = LARGEST_HEAD_DIM,
    most_rows: int | None = None,
    *,
    dropout: object = None,
) -> Implementation:
    """Return the implementation for vectors x (..., L, D).

    Kernels run on a GPU for `dtypes`, up to a width D of `largest_width` (None: any) and `most_rows` rows of L, without
    `dropout` of probabilities, else blockwise torch. Meta tensors get the implementation for GPUs, to estimate their
    memory. Unsupported GPUs (ROCm, compute capability below 8.0, too little shared memory) run blockwise torch, with
    one warning on stderr.

    MEGASPARSE_OPS=blockwise|triton in the environment overrides the choice; kernels then also run on a CPU, in Triton's
    interpreter. Raises ConfigError for another value, or if it forces kernels that do not support x.
    """
    requested = os.environ.get(VARIABLE)
    fits = x.dtype in dtypes and (largest_width is None or x.shape[-1] <= largest_width)
    fits = fits and (most_rows is None or x.shape[:-2].numel() <= most_rows)
    if requested == "triton" and dropout is not None:
        raise ConfigError(VARIABLE, "the kernels do not support dropout of attention probabilities", "Unset it")
    if requested is None:
        if not fits or dropout is not None or not _HAS_TRITON or not (x.is_cuda or x.is_meta):
            return "blockwise"
        return "triton" if x.is_meta or _suits(x.device, x.shape[-1], largest_width) else "blockwise"
    if requested not in get_args(Implementation):
        raise ConfigError(VARIABLE, f"{requested!r} is not an implementation", "Set blockwise or triton, or unset it")
    if requested == "blockwise":
        return "blockwise"
    if not _HAS_TRITON:
        raise ConfigError(VARIABLE, "triton is not installed", "pip install triton, or set blockwise")
    if not fits:
        *supported, dtype = (str(dtype).removeprefix("torch.") for dtype in (*dtypes, x.dtype))
        widths = "" if largest_width is None else f" up to a head dim of {largest_width}"
        problem = f"the kernels support {', '.join(supported)}{widths}, not {dtype} of {x.shape[-1]}"
        raise ConfigError(VARIABLE, problem, "Unset it")
    if not (x.is_cuda or x.is_meta) and os.environ.get("TRITON_INTERPRET") != "1":
        hint = "Run on a GPU, or set TRITON_INTERPRET=1, which is slow"
        raise ConfigError(VARIABLE, "triton kernels run on a CPU in its interpreter only", hint)
    return "triton"


def _suits(device: torch.device, width: int, largest_width: int | None) -> bool:
    """Return True if the kernels support this GPU; otherwise print the reason once."""
    reason, shared = _facts(device)
    if reason is None and largest_width == LARGEST_HEAD_DIM and width > LARGEST_IN_99_KB and shared < 160 << 10:
        reason = f"a head dim of {width} needs more shared memory than the {shared >> 10} KB of this GPU"
    if reason is not None:
        _say(f"megasparse: {reason}. Using blockwise torch instead of kernels: equal results, but slower")
    return reason is None


@cache
def _facts(device: torch.device) -> tuple[str | None, int]:
    """Return why a GPU cannot run the kernels, or None, and its shared memory per program in bytes."""
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs, not for ROCm", 0
    gpu = torch.cuda.get_device_properties(device)
    shared: int = getattr(gpu, "shared_memory_per_block_optin")  # noqa: B009  (missing in torch's stubs)
    reason = f"the kernels need compute capability 8.0, but {gpu.name} has {gpu.major}.{gpu.minor}"
    return reason if gpu.major < 8 else None, shared


@cache
def _say(line: str) -> None:
    print(line, file=sys.stderr)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return fp32, or the dtype of x if it is wider (fp64)."""
    return torch.promote_types(x.dtype, torch.float32)


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if its dtype is wider (fp64)."""
    return x.to(wide_dtype(x))


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to disable autocast on its tensors' device. Inputs keep their dtypes."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with autocast_off(*args, *kwargs.values()):
            return function(*args, **kwargs)

    return call


def autocast_off(*arguments: Any) -> AbstractContextManager[object]:
    """Return a context that disables autocast on the device of the first tensor among the arguments."""
    device = _autocast_device(arguments)
    if device is None or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


class Function(torch.autograd.Function):
    """Autograd function whose backward runs without autocast, or, if the forward calls `remember_autocast`, under the
    autocast of the forward. Second derivatives raise an error.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        backward = cls.backward

        @once_differentiable
        @wraps(backward)
        def under_autocast_of_forward(ctx: Any, *grads: Any) -> object:
            state = getattr(ctx, "autocast", None)
            with autocast_off(*grads) if state is None else torch.autocast(**state):
                return backward(ctx, *grads)

        cls.backward = staticmethod(under_autocast_of_forward)  # type: ignore[method-assign,assignment]


def remember_autocast(ctx: Any, *arguments: Any) -> None:
    """Make the backward of a `Function` run under the autocast of this forward, because it recomputes parts of it."""
    device = _autocast_device(arguments)
    if device is not None and torch.is_autocast_enabled(device):
        ctx.autocast = {"device_type": device, "dtype": torch.get_autocast_dtype(device)}


def _autocast_device(arguments: tuple[Any, ...]) -> str | None:
    """Return the device type of the first tensor if it supports autocast, else None."""
    for x in arguments:
        if isinstance(x, Tensor):
            return x.device.type if _has_autocast(x.device.type) else None
    return None


_has_autocast = cache(torch.amp.is_autocast_available)


ROWS = 16
"""With at least this many rows (8 on one thread), a row of a product on a CPU does not depend on their number, so a
token decoded from a cache is bit-identical to a full pass."""


def at_least_rows(x: Tensor, rows: int = ROWS) -> Tensor:
    """Pad x (..., n, D) with rows of zeros to at least `rows`."""
    return F.pad(x, (0, 0, 0, rows - x.shape[-2])) if x.shape[-2] < rows else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` with at least ROWS rows on a CPU. x: (..., D)."""
    rows = x.shape[:-1].numel()
    if rows >= ROWS or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return F.linear(at_least_rows(x.flatten(0, -2)), weight, bias)[:rows].view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """Linear layer that uses `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes; accelerate keeps offloaded weights on the meta device."""
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    used = (device for hook in hooks if (device := getattr(hook, "execution_device", None)) is not None)
    return torch.device(next(used, next(module.parameters()).device))


class ParameterList(nn.ParameterList):
    """Parameters that a function reads in a call of this module, when ZeRO 3 and accelerate's offloading load them."""

    __call__ = nn.Module.__call__  # torch's list raises an error

    def forward(self, read: Callable[[list[Tensor]], R]) -> R:
        return read([*self])
