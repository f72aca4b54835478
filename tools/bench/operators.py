"""Operators with kernels and random inputs, compared with blockwise torch: outputs and gradients in float64 for
differentiable operators, integers and draws. Kernels run twice, in memory filled with NaN.

B batch, H heads, L length, D head dim, R rounds, M window.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.operator import VARIABLE, Implementation

Outputs = Sequence[Tensor]
BARS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 3e-2), torch.float16: (1e-2, 3e-2)}
"""Dtype -> largest relative errors of outputs and of gradients, by norms."""
AGREEMENT = 0.998
"""Least fraction of equal codes and choices, because scores that are equal up to rounding may be ordered either way."""


@dataclass(frozen=True)
class Problem:
    """Random inputs of an operator, with B = 1 and H = 2."""

    length: int
    head_dim: int
    device: torch.device

    def normal(self, *shape: int) -> Tensor:
        """Return float64 numbers that depend only on the shape."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.float64, device=self.device)
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device)

    def integers(self, below: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(below)
        return torch.randint(below, shape, generator=generator).to(self.device)

    def heads(self, count: int = 3) -> list[Tensor]:
        """Return `count` different tensors (1, 2, L, D)."""
        return list(self.normal(count, 1, 2, self.length, self.head_dim))

    def padding(self) -> Tensor:
        """Return a mask (1, L) bool in which the last eighth is padding."""
        return (torch.arange(self.length, device=self.device) < self.length - self.length // 8)[None]

    def documents(self) -> Tensor:
        """Return document numbers (1, L) of three documents."""
        return (torch.arange(self.length, device=self.device) * 3 // self.length)[None]


Make = Callable[[Problem], tuple[list[Tensor], Callable[..., Outputs]]]
SMOOTH: dict[str, Make] = {}
"""Differentiable operators -> inputs in float64, and a function of them that returns the outputs."""
EXACT: dict[str, tuple[Callable[[Problem], Callable[[], Tensor]], float]] = {}
"""Operators of integers and draws -> a function that returns them, and the least fraction that must be equal."""


def smooth(make: Make) -> Make:
    SMOOTH[make.__name__] = make
    return make


def exact(least: float = 1.0) -> Callable[[Any], Any]:
    def add(make: Callable[[Problem], Callable[[], Tensor]]) -> Any:
        EXACT[make.__name__] = make, least
        return make

    return add


@smooth
def bucketed_attention(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    """LSH in a decoder: two rounds, a band of 128."""
    from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention

    codes = p.integers(max(2, p.length // 64), 1, 2, 2, p.length).to(torch.int16)
    spec = BucketedAttentionSpec(Window("band", 128), causal=True, scale=p.head_dim**-0.5)
    return p.heads(), lambda q, k, v: bucketed_attention(q, k, v, codes, spec)


@smooth
def bucketed_attention_of_separate_codes(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    """LHA in an encoder with padding and documents, at most 1,027 tokens because its definition loops over queries."""
    from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention

    p = Problem(min(p.length, 1027), p.head_dim, p.device)
    codes = p.integers(max(2, p.length // 64), 2, 1, 2, 1, p.length).to(torch.int16)
    spec = BucketedAttentionSpec(Window("band", 64), False, p.head_dim**-0.5, exclude_self=False)
    masks = p.padding(), p.documents()
    return p.heads(), lambda q, k, v: bucketed_attention(q, k, v, (codes[0], codes[1]), spec, *masks)


@smooth
def bucketed_attention_of_small_buckets(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    """N-gram attention: buckets of four tokens shared by the heads; queries may be without visible keys."""
    from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention

    codes = p.integers(max(2, p.length // 4), 1, 1, 1, p.length).to(torch.int16)
    spec = BucketedAttentionSpec(Window("band", 63), True, p.head_dim**-0.5, self_at_last=False)
    return p.heads(), lambda q, k, v: bucketed_attention(q, k, v, codes.expand(-1, q.shape[1], -1, -1), spec)


@smooth
def windows_of_positions(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    """Local attention in a decoder, within documents."""
    from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention

    spec = BucketedAttentionSpec(Window("chunk", 128), True, p.head_dim**-0.5, exclude_self=False)
    return p.heads(), lambda q, k, v: bucketed_attention(q, k, v, None, spec, None, p.documents())


@smooth
def relative_local_attention(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.local_attention import LocalAttentionSpec, RelativeVectors, distances, relative_local_attention

    spec = LocalAttentionSpec(64, True, p.head_dim**-0.5)
    r, u, w = p.normal(2, len(distances(64, True)), p.head_dim), p.normal(2, p.head_dim), p.normal(2, p.head_dim)
    return [*p.heads(), r, u, w], lambda q, k, v, *relative: [
        relative_local_attention(q, k, v, RelativeVectors(*relative), spec)
    ]


@smooth
def gathered_attention(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.gathered_attention import gathered_attention

    index = p.integers(p.length + 1, 1, 2, p.length, 20) - 1
    return p.heads(), lambda q, k, v: gathered_attention(q, k, v, index, scale=p.head_dim**-0.5)


@smooth
def hash_table_attention(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    """YOSO in a decoder: four hashes, buckets of 64 tokens."""
    from megasparse.ops.hash_table_attention import HashTableAttentionSpec, hash_table_attention

    bits = max(1, (p.length // 64).bit_length())
    codes = p.integers(1 << bits, 2, 1, 2, 4, p.length).to(torch.int16)
    spec = HashTableAttentionSpec(bits, True)
    q, k, v = p.heads()
    heads = [torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), v]
    return heads, lambda q, k, v: hash_table_attention(q, k, v, codes[0], codes[1], spec)[:1]


@smooth
def sketched_attention(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.sketch import sketched_attention

    return list(p.normal(3, 1, p.length, 4)), lambda q, k, v: sketched_attention(q, k, v, causal=True)


@smooth
def cross_entropy(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.cross_entropy import token_scores

    words = min(30522, 8 * p.length)
    targets = p.integers(words, min(p.length, 1027))
    return [p.normal(len(targets), words)], lambda logits: [token_scores(logits, targets, 0.1)[:, [0, 2]]]


@smooth
def layer_norm(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.normalize import layer_norm

    return [p.normal(1, p.length, 1024), p.normal(1024), p.normal(1024)], lambda x, weight, bias: [
        layer_norm(x, weight, bias, 1e-5)
    ]


@smooth
def unit_keys(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.normalize import unit_keys

    return p.heads(1), lambda q: unit_keys(q)


@exact(AGREEMENT)
def angular_hash(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.hashing import angular_hash

    x, rotations = p.heads(1)[0].float(), p.normal(2, 2, p.head_dim, 32).float()
    return lambda: angular_hash(x, rotations, [64])


@exact(AGREEMENT)
def sign_codes(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.hashing import sign_codes

    return lambda: sign_codes(p.heads(1)[0].float(), 1234, range(2), 32, 9, "hadamard")


@exact(AGREEMENT)
def hash_learning(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.hash_learning import ranks

    scores = p.normal(1, 2, p.length, 16).float()
    return lambda: ranks(scores, 0).argsort(-1)  # the order, because the ranks contain rounding errors of a logarithm


@exact(AGREEMENT)
def chosen_keys(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.sketch import KeyChoiceSpec, chosen_keys

    q, k = p.normal(2, 1, p.length, 4).float()
    return lambda: chosen_keys(q, k, KeyChoiceSpec(20, True, "top_k"), None)


@exact()
def counting_sort(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.counting_sort import counting_sort

    return lambda: counting_sort(p.integers(1 << 12, 4, p.length).to(torch.int16), 12)


@exact()
def random_bits(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.random import random_bits

    return lambda: random_bits(1234, torch.arange(p.length, device=p.device) << 20, 192)


@exact()
def dropout(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.random import dropout

    rows = torch.arange(p.length, device=p.device)[None]
    return lambda: dropout(p.normal(1, p.length, 192).float(), 0.1, 1234, rows)


def check_smooth(name: str, p: Problem, dtype: torch.dtype) -> tuple[bool, float, str]:
    """Compare an operator's outputs and gradients with blockwise torch in float64. Return the verdict, the largest
    relative error, and the problem.
    """
    inputs, call = SMOOTH[name](p)
    inputs = [x.to(dtype) for x in inputs]
    with implementation("blockwise"):
        expected = with_gradients(call, [x.double() for x in inputs])
    with implementation("triton"), poisoned_memory():
        result, repeated = (with_gradients(call, inputs) for _ in range(2))
    if not all(torch.equal(a, b) for a, b in zip(result, repeated, strict=True)):
        return False, float("nan"), "two runs differ"
    bars, outputs, worst = BARS[dtype], len(result) - len(inputs), 0.0
    for number, (a, b) in enumerate(zip(result, expected, strict=True)):
        finite = b > -torch.inf
        if not torch.equal(a > -torch.inf, finite):
            return False, float("nan"), f"output {number} is −∞ elsewhere"
        error = ((a[finite].double() - b[finite]).norm() / b[finite].norm().clamp_min(1e-30)).item()
        worst = max(worst, error)
        if not error <= bars[number >= outputs]:
            label = f"output {number}" if number < outputs else f"the gradient of input {number - outputs}"
            return False, error, f"{label} is {error:.2g} off"
    return True, worst, ""


def check_exact(name: str, p: Problem) -> tuple[bool, float, str]:
    """Compare integers or draws with blockwise torch. Return the verdict, the differing fraction, and the problem."""
    make, least = EXACT[name]
    with implementation("blockwise"):
        expected = make(p)()
    with implementation("triton"), poisoned_memory():
        result, repeated = make(p)(), make(p)()
    if not torch.equal(result, repeated):
        return False, float("nan"), "two runs differ"
    equal = (result == expected).double().mean().item()
    return equal >= least, 1 - equal, "" if equal >= least else f"{1 - equal:.2g} of them differ"


def with_gradients(call: Callable[..., Outputs], inputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of the inputs for fixed random gradients of the outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outs = list(call(*leaves))
    generator = torch.Generator().manual_seed(7)
    directions = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outs]
    directions = [d.masked_fill(out == -torch.inf, 0.0) for d, out in zip(directions, outs, strict=True)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, directions)]


@contextmanager
def implementation(name: Implementation) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill memory allocated in the context with NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about nondeterministic operations
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
