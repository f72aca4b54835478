"""Launches, bytes and transfers of an attention layer or of a model's pass on a GPU, counted without one.

The pass runs on torch's meta device: shapes are worked out, and nothing is computed. An operation of torch is taken to
be one launch, unless it only makes a view or takes memory. It moves its inputs and outputs once each; so does a Triton
kernel its tensors, of which it may read some rows several times, from the cache at best.

B batch, H heads, L length, D head dim, E = H·D.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megasparse.attention.contract import AttentionContext, Targets
from megasparse.attention.heads import Padding, build_mechanism, head_dim, split_heads_by_mechanism
from megasparse.config.attention import AttentionKind
from megasparse.config.schema import Config, ModelConfig
from megasparse.ops.kernels import Launch, observed
from megasparse.ops.random import RngContext
from megasparse.planning.dry_run import dummy_records
from megasparse.planning.pass_memory import PassMemory, as_on_a_gpu
from megasparse.planning.roofline import PEAKS, Peaks

META = torch.device("meta")
LAUNCH_SECONDS = 5e-6
"""Assumed time of the host for one launch."""
_NO_LAUNCH = {
    *("alias", "as_strided", "detach", "diagonal", "expand", "is_same_size", "lift_fresh", "narrow", "permute"),
    *("promote_types", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"),
    *("unfold", "unsqueeze", "view", "_reshape_alias", "_unsafe_view"),
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
}
"""Operations that make a view or take memory."""


@dataclass
class Counts:
    """Counts of one pass. torch: launches of torch's own operations. kernels: launches of Triton kernels. moved: bytes
    of both. flops: those of torch's products alone. transfers: operations with tensors of the host and of the GPU.
    host: operations on tensors of the host alone. by_name: launches and bytes of each operation and kernel.
    """

    torch: int = 0
    kernels: int = 0
    moved: int = 0
    flops: int = 0
    transfers: int = 0
    host: int = 0
    by_name: dict[str, list[int]] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        return self.torch + self.kernels

    def add(self, name: str, moved: int) -> None:
        self.moved += moved
        launches = self.by_name.setdefault(name, [0, 0])
        launches[0] += 1
        launches[1] += moved


class LaunchCounter(TorchDispatchMode):
    """Counter of what runs inside the `with`, in `counts`. Kernels are recorded and not started."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __enter__(self) -> "LaunchCounter":
        self._kernels = observed(self._see)
        self._kernels.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.__exit__(*error)

    def _see(self, launch: Launch) -> None:
        moved = sum(_sizes(launch.arguments)) - sum(_sizes(launch.untouched))
        self.counts.kernels += 1
        self.counts.add(f"kernel {launch.kernel.__name__}", moved)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__.rstrip("_")
        if name in _NO_LAUNCH:
            return result
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors if not x.is_cpu or x.dim() > 0}  # single numbers of the host are free
        if devices <= {"cpu"}:
            self.counts.host += len(devices)
            return result
        self.counts.transfers += len(devices) > 1
        self.counts.torch += 1
        self.counts.add(name, sum(_sizes((args, kwargs, result))))
        if function.overloadpacket in flop_registry:
            self.counts.flops += flop_registry[function.overloadpacket](*args, **kwargs, out_val=result)
        return result


def _sizes(tree: Any) -> Iterator[int]:
    """Bytes of each tensor; of one that repeats its numbers, those of its memory."""
    for x in tree_leaves(tree):
        if isinstance(x, Tensor):
            yield min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def count(forward: Callable[[], Callable[[], None]]) -> dict[str, Counts]:
    """Count a forward pass, and the backward pass that it gives back: "forward" and "backward"."""
    found = {}
    run: Any = forward
    for name in ("forward", "backward"):
        with as_on_a_gpu(), LaunchCounter() as counter:
            run = run()
        found[name] = counter.counts
    return found


def count_layer(kind: AttentionKind, model: ModelConfig, batch: int, dtype: torch.dtype) -> dict[str, Counts]:
    """Count a mechanism over all heads of a layer in training, from queries, keys and values (B, H, L, D) on, with the
    normalisation of keys, hashing, and what the mechanism learns itself.
    """
    mechanism = build_mechanism(kind, model, model.heads).to(META, dtype)
    length, heads = model.max_length, model.heads
    shape = (batch, heads, length, head_dim(model))
    q, k, v = (torch.empty(shape, device=META, dtype=dtype, requires_grad=True) for _ in range(3))
    x = torch.empty(batch, length, model.d_model, device=META, dtype=dtype)
    samples = torch.empty(batch, device=META, dtype=torch.int64)
    wanted = torch.empty(batch, length, device=META, dtype=torch.int64)

    def forward() -> Callable[[], None]:
        keys = q[:, :0] if mechanism.shared_qk else k
        context = AttentionContext(0, RngContext(0, 0, samples, True), targets=Targets(wanted, None))
        causal = model.kind != "encoder"
        [(_, own, context)] = split_heads_by_mechanism(
            {kind: mechanism}, {kind: heads}, (q, keys, v), Padding(), causal, context
        )
        out, auxiliary, _ = mechanism(x, own, context)
        outs = [out] if auxiliary is None else [out, auxiliary]
        gradients = [torch.empty_like(each) for each in outs]
        return lambda: torch.autograd.backward(outs, gradients)

    return count(forward)


def count_step(config: Config) -> dict[str, Counts]:
    """Count the passes of one micro-batch of a pretraining run. The optimizer's step is left out."""
    model, batch = PassMemory(config, "counted").model, config.training.micro_batch
    tokens = dummy_records(config.model, batch, config.data.sequence_length, 0).to(META)
    rng = RngContext(0, 0, torch.empty(batch, device=META, dtype=torch.int64), training=True)

    def forward() -> Callable[[], None]:
        objective = model(tokens, rng)[0]
        return lambda: objective.backward()

    return count(forward)


def total(passes: dict[str, Counts]) -> Counts:
    """Both passes' counts together."""
    both = Counts()
    for counts in passes.values():
        for name in ("torch", "kernels", "moved", "flops", "transfers", "host"):
            setattr(both, name, getattr(both, name) + getattr(counts, name))
        for name, (launches, moved) in counts.by_name.items():
            so_far = both.by_name.get(name, [0, 0])
            both.by_name[name] = [so_far[0] + launches, so_far[1] + moved]
    return both


def seconds(counts: Counts, peaks: Peaks) -> float:
    """The time that follows for a GPU: bytes at its bandwidth and torch's products at its peak, one after the other, or
    the host's time to launch, if that is more. Nothing was measured.
    """
    return max(counts.moved / peaks.bandwidth + counts.flops / peaks.half, counts.launches * LAUNCH_SECONDS)


def least_bytes(kind: AttentionKind, model: ModelConfig, batch: int, dtype: torch.dtype) -> float | None:
    """Bytes that the mechanism cannot do without, both passes, as its roofline has them; None where it has none."""
    with META:
        operators = build_mechanism(kind, model, model.heads).operators(model.max_length, dtype.itemsize)
    if operators is None:
        return None
    return batch * model.max_length * sum(part.moved.forward + part.moved.backward for part in operators.values())


def report(passes: dict[str, Counts], most: int = 12) -> Iterator[str]:
    """The counts as Markdown lines, then the operations that move most."""
    yield "| pass | torch launches | kernel launches | GB moved | TFLOP of torch's products | transfers | host |"
    yield "|---|---|---|---|---|---|---|"
    both = total(passes)
    for name, c in {**passes, "both": both}.items():
        flops = f"{c.flops / 1e12:.3g}"
        yield f"| {name} | {c.torch} | {c.kernels} | {c.moved / 1e9:.2f} | {flops} | {c.transfers} | {c.host} |"
    yield ""
    times = ", ".join(
        f"{name.split('-')[0].split()[0]} {1e3 * seconds(total(passes), gpu):.3g} ms" for name, gpu in PEAKS.items()
    )
    yield f"counted, not measured: {times}"
    yield ""
    ranked = Counter({name: moved for name, (_, moved) in both.by_name.items()})
    for name, moved in ranked.most_common(most):
        yield f"{moved / 1e9:8.3f} GB {both.by_name[name][0]:6d} x {name}"
