"""Operators inside torch.compile: each is one torch.library custom operator, with a fake implementation and gradients.

The compiler sees neither kernels nor blocks. A custom operator keeps its inputs alone, so a compiled backward computes
the operator once more; outside of torch.compile nothing changes.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_CALLS: list[Any] = []
"""The encoded arguments of each call that was compiled, with `_TENSOR` in the place of tensors."""
_TENSOR = "tensor"
_FORWARD = "(Tensor[] tensors, int call) -> Tensor[]"
_BACKWARD = "(Tensor[] tensors, Tensor[] grads, int call) -> Tensor[]"


def custom(fake: Callable[P, R], copies: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function of tensors, and of constants that can be hashed, that gives a tensor or a tuple of them.

    fake: a function of the same arguments that gives tensors of the results' shapes and dtypes. copies: it reads
    tensors of the host, or has the host read a tensor, so that torch.compile leaves it and its gradients out of the
    CUDA graphs that it captures.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        operator = _operator(function, fake, (torch.Tag.cudagraph_unsafe,) if copies else ())

        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            if not torch.compiler.is_compiling():
                return function(*arguments, **named)
            tensors: list[Tensor] = []
            encoded = _encoded((arguments, tuple(named), tuple(named.values())), tensors)
            if not tensors:
                return function(*arguments, **named)
            found = operator(tensors, _number(encoded))
            return found[0] if len(found) == 1 else tuple(found)  # type: ignore[return-value]

        return call

    return decorate


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.assume_constant_result, which imports the compiler: as long as torch itself, for what compiles
    nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def _number(call: Any) -> int:
    """The number of these arguments, the same for equal ones."""
    if call not in _CALLS:
        _CALLS.append(call)
    return _CALLS.index(call)


def _encoded(x: Any, tensors: list[Tensor]) -> Any:
    """An argument as nested tuples of constants, each begun by its type; its tensors are put into the list."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return _TENSOR
    if isinstance(x, (tuple, list)):
        return (type(x), *[_encoded(item, tensors) for item in x])
    if x is None or isinstance(x, (int, float, str)):
        return x
    if isinstance(x, range):
        return range, x.start, x.stop, x.step
    kind: Any = type(x)
    if is_dataclass(x):
        return (kind, *[_encoded(getattr(x, name), tensors) for name in kind.__dataclass_fields__])
    return x


def _decoded(x: Any, tensors: Iterator[Tensor]) -> Any:
    """The argument, given its tensors."""
    if not isinstance(x, tuple):
        return next(tensors) if x == _TENSOR else x
    kind, items = x[0], [_decoded(item, tensors) for item in x[1:]]
    return kind(items) if kind in (tuple, list) else kind(*items)


def _name(function: Callable[..., Any]) -> str:
    """The operator's name. That of a copy of this code, as exported folders have one, names its module, too: torch
    takes the operator of the first owner away where a second one registers its name.
    """
    module, name = function.__module__, function.__name__
    if not module.startswith("megasparse."):
        name = re.sub(r"\W", "_", f"{module}_{name}", flags=re.ASCII)
    return f"megasparse::{name}"


def _operator(
    function: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...]
) -> Callable[..., list[Tensor]]:
    name = _name(function)

    def run(tensors: list[Tensor], call: int) -> list[Tensor]:
        return [x.contiguous() for x in _results(function, tensors, call)]

    def shapes(tensors: list[Tensor], call: int) -> list[Tensor]:
        return _results(fake, tensors, call)

    def gradients(tensors: list[Tensor], grads: list[Tensor], call: int) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        wanted = [x for x in leaves if x.requires_grad]
        with _recording():  # the backward, too, as functions that compute anew record inside it
            outs = _results(function, leaves, call)
            pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
            if not pairs:
                return [torch.zeros_like(x) for x in wanted]
            results, toward = zip(*pairs, strict=True)
            found = torch.autograd.grad(results, wanted, toward, allow_unused=True, materialize_grads=True)
        return [x.contiguous() for x in found]

    def gradient_shapes(tensors: list[Tensor], grads: list[Tensor], call: int) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in tensors if x.is_floating_point()]

    backward = torch.library.custom_op(f"{name}_backward", gradients, mutates_args=(), schema=_BACKWARD, tags=tags)
    backward.register_fake(gradient_shapes)
    forward = torch.library.custom_op(name, run, mutates_args=(), schema=_FORWARD, tags=tags)
    forward.register_fake(shapes)

    def save(ctx: Any, inputs: tuple[list[Tensor], int], output: list[Tensor]) -> None:
        tensors, ctx.call = inputs
        ctx.save_for_backward(*tensors)
        ctx.like = [(x.shape, x.dtype, x.device) for x in output]

    def propagate(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
        tensors = list(ctx.saved_tensors)
        whole = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
        ]
        found = iter(backward(tensors, whole, ctx.call))
        return [next(found) if x.is_floating_point() else None for x in tensors], None

    forward.register_autograd(propagate, setup_context=save)
    return forward


@contextmanager
def _recording() -> Iterator[None]:
    """Record gradients, which the dispatcher leaves out inside a custom operator."""
    keys, exclude = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with exclude(keys.AutogradFunctionality, False), exclude(keys.ADInplaceOrView, False), torch.enable_grad():
        yield


def attention_like(q: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Empty results of softmax attention of queries (..., L, D): one a query, and the log of its sum."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


def _results(function: Callable[..., Any], tensors: list[Tensor], call: int) -> list[Tensor]:
    arguments, names, named = _decoded(_CALLS[call], iter(tensors))
    found = function(*arguments, **dict(zip(names, named, strict=True)))
    return [found] if isinstance(found, Tensor) else list(found)
