"""LHA's hash functions H_Q and H_K: buckets, the best tokens of each bucket, and the divergence that trains them.

Every one of them reads the scores of one tile of tokens after another, so that no tensor holds all tokens with all
buckets. Queries and keys come without gradient.

B batch, H heads, L length, D head dim, N buckets, T tokens of a tile.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megasparse.attention.contract import AttentionContext, MechanismSpec
from megasparse.ops.attention_utility import tiles
from megasparse.ops.backend import implementation
from megasparse.ops.hash_learning import divergence as bucket_divergence
from megasparse.ops.hash_learning import ranks
from megasparse.ops.random import derive, rotations

T = TypeVar("T")
Weights = tuple[Tensor, ...]
"""Weights of one hash function: (H, D, N); for the two-layer network (H, D, D), its bias (H·D), (H, D, N), its bias
(H·N).
"""


class Sides(NamedTuple):
    """Inputs of a hash, with their function: queries, or keys, or both with their scores added (the joint hash)."""

    inputs: tuple[Tensor, ...]
    """(B, H, L, D) each."""
    weights: tuple[Weights, ...]


class HashFunctions(nn.Module):
    """H_Q and H_K of every head, functions from D numbers to N scores (LHA Eq. 8).

    mlp: W2·relu(W1·x + b1) + b2 with D hidden units; linear: W·x; random: x[R; −R] for queries and keys alike (Eq. 9),
    the same throughout a run, which is the paper's LSH baseline. The paper leaves open the hidden width and the
    nonlinearity.
    """

    def __init__(self, kind: str, spec: MechanismSpec, buckets: int):
        super().__init__()
        self.kind, self.buckets = kind, buckets
        heads, dim = spec.heads, spec.head_dim
        shapes = {"mlp": [(heads, dim, dim), (heads * dim,), (heads, dim, buckets), (heads * buckets,)]}
        shapes["linear"], shapes["random"] = [(heads, dim, buckets)], []
        self.names: dict[str, list[str]] = {"query": [], "key": []}
        for side, names in self.names.items():
            for number, shape in enumerate(shapes[kind]):
                names.append(f"{side}_{'bias' if len(shape) == 1 else 'weight'}{number // 2 + 1}")
                made = torch.zeros(shape) if len(shape) == 1 else torch.empty(shape)
                self.register_parameter(names[-1], nn.Parameter(made))

    def forward(self, job: Callable[[Weights, Weights], T], q: Tensor, context: AttentionContext) -> T:
        """`job` of the weights of H_Q and of H_K, which under ZeRO 3 are gathered only during a call."""
        if self.kind == "random":
            key = derive(context.rng.seed, context.layer, "lha random hash")
            heads = range(context.head_offset, context.head_offset + q.shape[1])
            width = 2 * -(-self.buckets // 2)
            half = rotations(key, heads, 1, q.shape[3], [width], q.device)[:, 0]
            projection = torch.cat([half, -half], dim=-1)[..., : self.buckets]
            return job((projection,), (projection,))
        query, key_ = (
            tuple(context.part.own(self.get_parameter(name), 0) for name in self.names[side])
            for side in ("query", "key")
        )
        return job(query, key_)


def _code_dtype(buckets: int) -> torch.dtype:
    return torch.int16 if buckets <= 1 << 15 else torch.int32


@torch.no_grad()
def bucket_codes(sides: Sides, buckets: int) -> Tensor:
    """Return the argmax of the scores (Eq. 8 and 18): (B, H, L), int16 where that is enough. Kernels keep the scores to
    themselves, and differ only where the two largest are equal up to rounding.
    """
    if implementation(sides.inputs[0]) == "triton":
        from megasparse.ops.hashing.gpu import learned_codes

        return learned_codes(sides.inputs, sides.weights)
    codes = [scores_of(inputs, sides.weights).argmax(-1) for _, inputs in _in_tiles(sides, buckets)]
    return torch.cat(codes, dim=-1).to(_code_dtype(buckets))


@torch.no_grad()
def bucket_members(sides: Sides, buckets: int, size: int) -> Tensor:
    """The `size` tokens with the highest scores in each bucket, softmax over a token's buckets (section 4.4), of equals
    the earlier ones: (B, H, N, min(size, L)) int64 in order.
    """
    best = torch.empty(0)
    for tokens, inputs in _in_tiles(sides, buckets):
        rank = ranks(scores_of(inputs, sides.weights), tokens.start)
        rank = _smallest(rank, size)
        best = rank if tokens.start == 0 else _smallest(torch.cat([best, rank], dim=-1), size)
    return (best & 0xFFFFFFFF).sort(-1).values


def _smallest(x: Tensor, count: int) -> Tensor:
    return x.topk(min(count, x.shape[-1]), largest=False, sorted=False).values


def thresholds(sides: Sides, buckets: int, size: int) -> Tensor:
    """What the `size` tokens with the highest scores in each bucket, as in `bucket_members`, score at least, halfway
    to the next token's; −∞ where there are no more: (B, H, N).
    """
    best = torch.empty(0)
    for tokens, inputs in _in_tiles(sides, buckets):
        score = _normalized(inputs, sides.weights).transpose(-1, -2)  # (B, H, N, T)
        best = score if tokens.start == 0 else torch.cat([best, score], dim=-1)
        best = best.topk(min(size + 1, best.shape[-1])).values
    if best.shape[-1] <= size:
        return torch.full_like(best[..., 0], -torch.inf)
    return best[..., -2:].mean(-1)


def in_buckets(sides: Sides, least: Tensor) -> Tensor:
    """Whether each token is in each bucket, by what its members score at least, (B, H, N): (B, H, T, N) bool."""
    return _normalized(sides.inputs, sides.weights) >= least.unsqueeze(-2)


def _normalized(inputs: Sequence[Tensor], weights: Sequence[Weights]) -> Tensor:
    return scores_of(inputs, weights).log_softmax(-1)


class Example(NamedTuple):
    """A tile of tokens, as in `Sides.inputs`, the utilities (B, H, T, N) that their hash has to predict, their buckets
    (B, H, T), and how many tokens each of them stands for.
    """

    inputs: tuple[Tensor, ...]
    utility: Tensor
    codes: Tensor
    weight: float = 1.0


def divergence(examples: Iterable[Example], weights: tuple[Weights, ...]) -> Tensor:
    """Σ KL(ψ ‖ softmax(H)) over all examples' tokens and heads (Eq. 13); Σ ψ[bucket], the utility of their buckets; and
    Σ ψ·ln ψ, the negative entropy of their utilities (Figure 4): (3,).

    A token whose ψ is 0 adds nothing. Only the first has a gradient, that of the weights.
    """
    flat = [w for side in weights for w in side]
    learn = torch.is_grad_enabled() and any(w.requires_grad for w in flat)
    sums: Tensor = _Divergence.apply(examples, len(weights), learn, *flat)
    return sums


class _Divergence(torch.autograd.Function):
    """The gradient is made with the loss, tile by tile: neither scores nor targets are kept, or made twice."""

    @staticmethod
    def forward(ctx: Any, examples: Iterable[Example], sides: int, learn: bool, *weights: Tensor) -> Tensor:
        wide = [w.detach().to(torch.promote_types(w.dtype, torch.float32)).requires_grad_(learn) for w in weights]
        each = len(wide) // sides
        grouped = [tuple(wide[i * each : (i + 1) * each]) for i in range(sides)]
        sums = torch.zeros(3, dtype=torch.float64, device=weights[0].device)
        grads = [torch.zeros_like(w, requires_grad=False) for w in wide]
        for inputs, utility, codes, weight in examples:
            with torch.set_grad_enabled(learn):
                scores = scores_of(inputs, grouped)
            total, kept, information, error = bucket_divergence(scores.detach(), utility, codes, weight, learn)
            sums[0] += total
            sums[1] += kept
            sums[2] += information
            if error is not None:
                for total, grad in zip(grads, torch.autograd.grad(scores, wide, error.to(scores.dtype)), strict=True):
                    total += grad
        ctx.save_for_backward(*grads)
        ctx.dtypes = [w.dtype for w in weights]
        return sums.to(wide[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads = [(grad_outputs[0][0] * g).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return None, None, None, *grads


def _in_tiles(sides: Sides, buckets: int) -> Iterable[tuple[slice, tuple[Tensor, ...]]]:
    for tokens in tiles(sides.inputs[0], buckets):
        yield tokens, tuple(x[:, :, tokens] for x in sides.inputs)


def scores_of(inputs: Sequence[Tensor], weights: Sequence[Weights]) -> Tensor:
    """H_Q, H_K, or H_Q + H_K: (B, H, T, N), in fp32 at least."""
    if len(weights[0]) == 4 and implementation(inputs[0], largest_width=None) == "triton":
        return _in_one_product(inputs, weights)
    each = [_score(x, w) for x, w in zip(inputs, weights, strict=True)]
    return each[0] if len(each) == 1 else each[0] + each[1]


def _hidden(x: Tensor, weights: Weights, dtype: torch.dtype) -> Tensor:
    first, bias = (w.to(dtype) for w in weights[:2])
    return torch.relu(x.to(dtype) @ first + bias.view(-1, 1, first.shape[2]))


def _score(x: Tensor, weights: Weights) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(x.dtype, weights[0].dtype), torch.float32)
    if len(weights) == 1:
        return x.to(dtype) @ weights[0].to(dtype)
    second, bias = (w.to(dtype) for w in weights[2:])
    return _hidden(x, weights, dtype) @ second + bias.view(-1, 1, second.shape[2])


def _in_one_product(inputs: Sequence[Tensor], weights: Sequence[Weights]) -> Tensor:
    """The sum of two-layer functions, whose second layers are one product with hidden layers side by side, and with the
    biases as the weights of a hidden unit that is 1: scores are written once. The other 7 keep rows aligned.
    """
    dtype = torch.promote_types(torch.promote_types(inputs[0].dtype, weights[0][0].dtype), torch.float32)
    hidden = torch.cat([_hidden(x, w, dtype) for x, w in zip(inputs, weights, strict=True)], dim=-1)
    second = torch.cat([w[2].to(dtype) for w in weights], dim=1)  # (H, D of all functions, N)
    bias = torch.stack([w[3].to(dtype) for w in weights]).sum(0).view(len(second), 1, -1)
    return F.pad(hidden, (0, 8), value=1.0) @ torch.cat([second, F.pad(bias, (0, 0, 0, 7))], dim=1)
