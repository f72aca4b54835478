"""Operators under torch.autocast: they choose the precision of every product themselves, so they run without it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of tensors: inside it autocast is off on their device. Its inputs keep their dtypes."""

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        device = _autocast_device((*arguments, *named.values()))
        if device is None or not torch.is_autocast_enabled(device):
            return function(*arguments, **named)
        with torch.autocast(device, enabled=False):
            return function(*arguments, **named)

    return call


class Function(torch.autograd.Function):
    """An autograd function whose backward runs under the autocast of its forward, wherever it is called: a backward
    that recomputes a part of the forward computes the same, and one of an operator computes in the operator's dtypes.
    It has no second derivative: a gradient's gradient is refused, not wrong.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        forward, backward = cls.forward, cls.backward

        @wraps(forward)
        def remembering(ctx: Any, *arguments: Any) -> Any:
            device = _autocast_device(arguments)
            ctx.autocast = device and (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            return forward(ctx, *arguments)

        @once_differentiable
        @wraps(backward)
        def again(ctx: Any, *grads: Any) -> Any:
            with _as_it_was(ctx.autocast):
                return backward(ctx, *grads)

        cls.forward, cls.backward = staticmethod(remembering), staticmethod(again)  # type: ignore[method-assign,assignment]


def _as_it_was(state: tuple[str, bool, torch.dtype] | None) -> AbstractContextManager[Any]:
    if state is None:
        return nullcontext()
    device, enabled, dtype = state
    if not enabled and not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, dtype=dtype, enabled=enabled)


def _autocast_device(arguments: tuple[Any, ...]) -> str | None:
    """The type of the first tensor's device; None if there is no tensor, or no autocast of that type."""
    for x in arguments:
        if isinstance(x, Tensor):
            return x.device.type if torch.amp.is_autocast_available(x.device.type) else None
    return None
