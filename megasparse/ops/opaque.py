"""Calls that torch.compile keeps whole: one operator runs a function of tensors as eager Python, with its gradients.

Traced, an attention mechanism would compile for minutes, and its random draws would become constants. In a compiled
graph the operator `megasparse::call` is the whole function. It records the function's autograd graph, which lives as
long as its third output; `megasparse::call_backward` differentiates that graph.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate, count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megasparse.ops.operator import wide_dtype

Function = Callable[..., tuple[Tensor, Tensor | None]]
"""Function of named tensors, seed, step and constants. Returns an output and an auxiliary loss, or None."""


def call(
    function: Function,
    constants: dict[str, Any],
    tensors: dict[str, Tensor | None],
    weights: dict[str, Tensor],
    dtype: torch.dtype | None = None,
    seed: int = 0,
    step: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `function({**tensors, **weights}, seed, step, **constants)` from a function that torch.compile traces.

    Args:
        function: Returns an output of the shape of the first tensor; None as auxiliary loss becomes 0.
        constants: Plain Python values; others compile again. `seed` and `step` change without compiling again.
        tensors: Inputs, which are copied, because a compiler may reuse their memory before the backward pass.
        weights: Inputs whose memory outlives the backward pass.
        dtype: Dtype of the output; None for the one of autocast, or without autocast of the first tensor.
    """
    inputs = {name: x for name, x in tensors.items() if x is not None}
    values = [*inputs.values(), *weights.values()]
    number = _number_of(function, constants, (*inputs, *weights), len(inputs), values[0].device.type, dtype)
    differentiated = [torch.is_grad_enabled() and x.requires_grad for x in values]
    out, auxiliary, _ = torch.ops.megasparse.call(number, seed, step, values, differentiated)
    return out, auxiliary


class _Call(NamedTuple):
    """The constants of a compiled graph's call. copied: number of tensors to copy. autocast: its dtype, or None."""

    function: Function
    constants: dict[str, Any]
    names: tuple[str, ...]
    copied: int
    device: str
    dtype: torch.dtype | None
    autocast: torch.dtype | None

    def results(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return an empty output and an empty loss, given the first tensor."""
        out = first.new_empty(first.shape, dtype=self.dtype or self.autocast)
        return out, first.new_empty((), dtype=wide_dtype(first))


_calls: list[_Call] = []
_numbers: dict[str, int] = {}


def _number_of(
    function: Function, constants: dict[str, Any], names: tuple[str, ...], copied: int, device: str,
    dtype: torch.dtype | None,
) -> int:  # fmt: skip
    """Return the number of a call in `_calls`; runs when torch.compile traces."""
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    new = _Call(function, constants, names, copied, device, dtype, autocast)
    number = _numbers.setdefault(repr(new), len(_calls))
    if number == len(_calls):
        _calls.append(new)
    return number


# as torch.compiler.assume_constant_result, which loads the compiler for seconds
_number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Graph(bytearray):
    """Recorded pass. Its 8 bytes are its key in `_graphs`; the tensor that shares them keeps it alive."""

    outputs: list[Tensor]
    leaves: list[Tensor]


_graphs: WeakValueDictionary[int, _Graph] = WeakValueDictionary()
_keys = count()


@contextmanager
def _outside_of_operators() -> Iterator[None]:
    """Let operators record gradients, which inside of a custom operator they do not."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


@torch.library.custom_op(
    "megasparse::call",
    mutates_args=(),
    schema="(int number, SymInt seed, SymInt? step, Tensor[] tensors, bool[] differentiated)"
    " -> (Tensor, Tensor, Tensor)",
)
def _call(
    number: int, seed: int, step: int | None, tensors: list[Tensor], differentiated: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    call = _calls[number]
    recorded = any(differentiated)
    leaves = [x.detach() for x in tensors]
    if recorded:
        leaves = [x.clone() for x in leaves[: call.copied]] + leaves[call.copied :]
        leaves = [x.requires_grad_(wanted) for x, wanted in zip(leaves, differentiated, strict=True)]
    with ExitStack() as contexts:
        contexts.enter_context(_outside_of_operators())
        contexts.enter_context(torch.set_grad_enabled(recorded))
        contexts.enter_context(torch.autocast(call.device, call.autocast, enabled=call.autocast is not None))
        # autocast would cast an input that is a leaf once, and sum the gradients of its uses in bf16
        arguments = [x.view_as(x) for x in leaves[: call.copied]] + leaves[call.copied :]
        out, auxiliary = call.function(dict(zip(call.names, arguments, strict=True)), seed, step, **call.constants)
    results = call.results(tensors[0])
    results[0].copy_(out.detach())
    results[1].copy_(auxiliary.detach()) if auxiliary is not None else results[1].zero_()
    if not recorded:
        return *results, torch.zeros(1, dtype=torch.int64)
    key = next(_keys)
    graph = _graphs[key] = _Graph(key.to_bytes(8, sys.byteorder))
    graph.outputs = [out] if auxiliary is None else [out, auxiliary]
    graph.leaves = leaves
    return *results, torch.frombuffer(graph, dtype=torch.int64)


@_call.register_fake
def _(number: int, seed: Any, step: Any, tensors: list[Tensor], differentiated: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *_calls[number].results(tensors[0]), torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "megasparse::call_backward",
    mutates_args=(),
    schema="(Tensor key, Tensor? out, Tensor? auxiliary, SymInt[] sizes, int[] dims, str dtypes) -> Tensor[]",
)
def _call_backward(
    key: Tensor, out: Tensor | None, auxiliary: Tensor | None, sizes: list[int], dims: list[int], dtypes: str
) -> list[Tensor]:
    graph = _graphs.pop(int(key), None)
    if graph is None:
        advice = "call backward once, without hooks that copy saved tensors"
        raise RuntimeError(f"the recorded pass of a compiled megasparse layer is gone: {advice}")
    outputs, grads = [], []
    for x, grad in zip(graph.outputs, (out, auxiliary), strict=False):
        if x.requires_grad and grad is not None:
            outputs.append(x)
            grads.append(grad.to(x.dtype))
    leaves = [x for x in graph.leaves if x.requires_grad]
    with _outside_of_operators():
        results = torch.autograd.grad(outputs, leaves, grads, allow_unused=True) if outputs else [None] * len(leaves)
    return [
        torch.zeros_like(x, memory_format=torch.contiguous_format) if grad is None else grad.contiguous()
        for x, grad in zip(leaves, results, strict=True)
    ]


@_call_backward.register_fake
def _(
    key: Tensor, out: Tensor | None, auxiliary: Tensor | None, sizes: list[int], dims: list[int], dtypes: str
) -> list[Tensor]:
    grad = auxiliary if out is None else out
    assert grad is not None
    parts = zip(accumulate(dims), dims, dtypes.split(), strict=True)
    return [grad.new_empty(sizes[end - count : end], dtype=getattr(torch, name)) for end, count, name in parts]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2])
    *_, tensors, ctx.differentiated = inputs
    leaves = [x for x, wanted in zip(tensors, ctx.differentiated, strict=True) if wanted]
    ctx.sizes, ctx.dims = [size for x in leaves for size in x.shape], [x.dim() for x in leaves]
    ctx.dtypes = " ".join(str(x.dtype).removeprefix("torch.") for x in leaves)


def _backward(ctx: Any, out: Tensor | None, auxiliary: Tensor | None, _: None) -> tuple[object, ...]:
    (key,) = ctx.saved_tensors
    grads = iter(torch.ops.megasparse.call_backward(key, out, auxiliary, ctx.sizes, ctx.dims, ctx.dtypes))
    return None, None, None, [next(grads) if wanted else None for wanted in ctx.differentiated], None


_call.register_autograd(_backward, setup_context=_setup_context)
