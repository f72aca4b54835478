"""Launches, bytes and FLOPs of passes on a GPU, counted without one.

A pass runs on torch's meta device: shapes are worked out, and nothing is computed. An operation of torch is taken to be
one launch, unless it only makes a view or takes memory. It moves its inputs and outputs once each; so does a Triton
kernel its tensors, of which it may read some rows several times, from the cache at best."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megasparse.attention.heads import build_mechanism, head_dim
from megasparse.config.schema import Config
from megasparse.ops.kernels import Launch, observed
from megasparse.ops.random import RngContext
from megasparse.planning.passes import META, VIEWS, ConfiguredPass, _bytes, as_on_a_gpu, dummy_records
from tools.bench.attention import outputs_of


@dataclass
class Counts:
    """Counts of one pass. torch: launches of torch's own operations. kernels: launches of Triton kernels. moved: bytes
    of both. flops: those of torch's products alone. transfers: operations with tensors of the host and of the GPU.
    host: operations on tensors of the host alone. by_name: launches and bytes of each operation and kernel."""

    torch: int = 0
    kernels: int = 0
    moved: int = 0
    flops: int = 0
    transfers: int = 0
    host: int = 0
    by_name: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, moved: int) -> None:
        self.moved += moved
        launches = self.by_name.setdefault(name, [0, 0])
        launches[0] += 1
        launches[1] += moved


class OperationsAndKernels(TorchDispatchMode):
    """Dispatch mode whose `_see` gets each launch of a kernel inside the `with`, in place of the launch."""

    def __enter__(self) -> Any:
        self._kernels = observed(self._see)
        self._kernels.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.__exit__(*error)

    def _see(self, launch: Launch) -> None:
        raise AssertionError("a subclass replaces this method")


class LaunchCounter(OperationsAndKernels):
    """Counter of the operations inside the `with`, in `counts`. Kernels are recorded, not started."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def _see(self, launch: Launch) -> None:
        self.counts.kernels += 1
        self.counts.add(f"kernel {launch.kernel.__name__}", _size(launch.arguments))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__.rstrip("_")
        if name in VIEWS:
            return result
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors if not x.is_cpu or x.dim() > 0}  # single numbers of the host are free
        if devices <= {"cpu"}:
            self.counts.host += len(devices)
            return result
        self.counts.transfers += len(devices) > 1
        self.counts.torch += 1
        if function.overloadpacket in flop_registry:
            self.counts.flops += flop_registry[function.overloadpacket](*args, **kwargs, out_val=result)
        self.counts.add(name, _size((args, kwargs, result)))
        return result


def _size(tree: Any) -> int:
    """Bytes of all tensors; for an expanded one, the bytes of its memory."""
    return sum(_bytes(x) for x in tree_leaves(tree) if isinstance(x, Tensor))


def count(forward: Callable[[], Callable[[], None]]) -> dict[str, Counts]:
    """Count a forward pass, and the backward pass that it gives back: "forward" and "backward"."""
    found = {}
    run: Any = forward
    for name in ("forward", "backward"):
        with as_on_a_gpu(), LaunchCounter() as counter:
            run = run()
        found[name] = counter.counts
    return found


def count_step(config: Config) -> dict[str, Counts]:
    """Count the passes of one micro-batch of a pretraining run. The optimizer's step is left out."""
    model, batch = ConfiguredPass(config).model, config.training.micro_batch
    tokens = dummy_records(config.model, batch, config.data.sequence_length, 0).to(META)
    rng = RngContext(0, 0, torch.empty(batch, device=META, dtype=torch.int64), training=True)

    def forward() -> Callable[[], None]:
        objective = model(tokens, rng)[0]
        return lambda: objective.backward()

    return count(forward)


def total(passes: dict[str, Counts]) -> Counts:
    both = Counts()
    for counts in passes.values():
        for name in ("torch", "kernels", "moved", "flops", "transfers", "host"):
            setattr(both, name, getattr(both, name) + getattr(counts, name))
        for name, (launches, moved) in counts.by_name.items():
            so_far = both.by_name.get(name, [0, 0])
            both.by_name[name] = [so_far[0] + launches, so_far[1] + moved]
    return both


def count_layer(kind, model, batch, dtype):
    """Count a mechanism over all heads of a layer in training, from queries, keys and values (B, H, L, D) on, with the
    normalisation of keys, hashing, and what the mechanism learns itself."""
    mechanism = build_mechanism(kind, model, model.heads).to(META, dtype)
    length = model.max_length
    shape = (batch, model.heads, length, head_dim(model))
    q, k, v = (torch.empty(shape, device=META, dtype=dtype, requires_grad=True) for _ in range(3))
    x = torch.empty(batch, length, model.d_model, device=META, dtype=dtype)
    samples = torch.empty(batch, device=META, dtype=torch.int64)
    targets = torch.empty(batch, length, device=META, dtype=torch.int64)

    def forward():
        outs = outputs_of(kind, mechanism, model, (q, k, v), x, samples, targets)
        gradients = [torch.empty_like(out) for out in outs]
        return lambda: torch.autograd.backward(outs, gradients)

    return count(forward)
