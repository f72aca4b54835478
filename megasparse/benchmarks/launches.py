"""Launches, bytes and transfers of an attention layer on a GPU, counted without one, and the report of counts.

B batch, H heads, L length, D head dim, E = H·D.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import torch

from megasparse.attention.heads import build_mechanism, head_dim
from megasparse.benchmarks.attention import outputs_of
from megasparse.benchmarks.launch_counts import META, Counts, count, total
from megasparse.config.schema import ModelConfig
from megasparse.planning.plan import GPUS, Hardware

LAUNCH_SECONDS = 5e-6
"""Assumed time of the host for one launch."""


def count_layer(kind: str, model: ModelConfig, batch: int, dtype: torch.dtype) -> dict[str, Counts]:
    """Count a mechanism over all heads of a layer in training, from queries, keys and values (B, H, L, D) on, with the
    normalisation of keys, hashing, and what the mechanism learns itself.
    """
    mechanism = build_mechanism(kind, model, model.heads).to(META, dtype)
    length = model.max_length
    shape = (batch, model.heads, length, head_dim(model))
    q, k, v = (torch.empty(shape, device=META, dtype=dtype, requires_grad=True) for _ in range(3))
    x = torch.empty(batch, length, model.d_model, device=META, dtype=dtype)
    samples = torch.empty(batch, device=META, dtype=torch.int64)
    wanted = torch.empty(batch, length, device=META, dtype=torch.int64)

    def forward() -> Callable[[], None]:
        outs = outputs_of(kind, mechanism, model, (q, k, v), x, samples, wanted)
        gradients = [torch.empty_like(each) for each in outs]
        return lambda: torch.autograd.backward(outs, gradients)

    return count(forward)


def seconds(counts: Counts, peaks: Hardware) -> float:
    """The time that follows for a GPU: bytes at its bandwidth and torch's products at its peak, one after the other, or
    the host's time to launch, if that is more. Nothing was measured.
    """
    return max(counts.moved / peaks.bandwidth + counts.flops / peaks.peak, counts.launches * LAUNCH_SECONDS)


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
        f"{name.split('-')[0].split()[0]} {1e3 * seconds(total(passes), gpu):.3g} ms" for name, gpu in GPUS.items()
    )
    yield f"counted, not measured: {times}"
    yield ""
    ranked = Counter({name: moved for name, (_, moved) in both.by_name.items()})
    for name, moved in ranked.most_common(most):
        yield f"{moved / 1e9:8.3f} GB {both.by_name[name][0]:6d} x {name}"
