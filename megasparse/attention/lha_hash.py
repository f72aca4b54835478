"""LHA's hash functions H_Q and H_K, and the buckets and bucket members that follow from their scores, computed for one
tile of T tokens at a time. Queries and keys are detached.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, MechanismSpec
from megasparse.ops.hash_learning import ranks, tiles
from megasparse.ops.operator import at_least_fp32, at_least_rows, implementation, wide_dtype
from megasparse.ops.random import derive, rotations

Weights = tuple[Tensor, ...]
"""Weights of one hash function: (H, D, N); for the two-layer network (H, D, D), bias (H·D), (H, D, N), bias (H·N), or,
for several networks `merged`, W inputs and hidden units, (1, H, W, W), (1, H, W, N)."""
_CONSTANTS = 8  # keeps rows aligned


class HashFunctions(nn.Module):
    """H_Q and H_K of every head, functions from D numbers to N scores (LHA Eq. 8).

    mlp: W2·relu(W1·x + b1) + b2 with D hidden units (not specified in the paper); linear: W·x; random: x[R; −R] for
    queries and keys alike (Eq. 9), fixed throughout a run, the paper's LSH baseline.
    """

    def __init__(self, kind: str, spec: MechanismSpec, buckets: int):
        super().__init__()
        self.kind = kind
        self.buckets = buckets
        heads = spec.heads
        dim = spec.head_dim
        shapes = {"mlp": [(heads, dim, dim), (heads * dim,), (heads, dim, buckets), (heads * buckets,)]}
        shapes |= {"linear": [(heads, dim, buckets)], "random": []}
        self.names: dict[str, list[str]] = {"query": [], "key": []}
        for side, names in self.names.items():
            for number, shape in enumerate(shapes[kind]):
                names.append(f"{side}_{'bias' if len(shape) == 1 else 'weight'}{number // 2 + 1}")
                weight = torch.zeros(shape) if len(shape) == 1 else torch.empty(shape)
                self.register_parameter(names[-1], nn.Parameter(weight))

    def forward(self, q: Tensor, context: AttentionContext) -> tuple[Weights, Weights]:
        """Return the weights of H_Q and of H_K for this rank's heads, given queries q (B, H, L, D), as copies: under
        ZeRO 3, parameters are gathered only during this call.
        """
        if self.kind == "random":
            key = derive(context.rng.seed, context.layer, "lha random hash")
            width = 2 * -(-self.buckets // 2)
            half = rotations(key, context.heads(q.shape[1]), 1, q.shape[3], [width], q.device)[:, 0]
            projection = torch.cat([half, -half], dim=-1)[..., : self.buckets]
            return (projection,), (projection,)
        weights: dict[str, Weights] = {}
        for side, names in self.names.items():
            parameters: list[Tensor] = [getattr(self, name) for name in names]  # tensors in a functional call
            parts = [context.part.local_part(p.clone() if hasattr(p, "ds_tensor") else p, 0) for p in parameters]
            weights[side] = tuple(parts)
        return weights["query"], weights["key"]


class HashInputs(NamedTuple):
    """Vectors and the functions that hash them: queries, or keys, or both with added scores (the joint hash)."""

    inputs: tuple[Tensor, ...]
    """(B, H, L, D) each."""
    weights: tuple[Weights, ...]

    def tiles(self, buckets: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first token and the scores (B, H, T, N) of each tile."""
        for tokens in tiles(self.inputs[0], buckets):
            parts = [x[:, :, tokens] for x in self.inputs]
            rows = [at_least_rows(x) for x in parts]
            yield tokens.start, scores_of(rows, self.weights)[:, :, : parts[0].shape[2]]


def hash_inputs(
    q: Tensor, k: Tensor, joint: bool, functions: Sequence[tuple[Weights, ...]]
) -> tuple[HashInputs, HashInputs]:
    """Return the inputs of the query hash and of the key hash; with `joint` the same, H_Q(q_i) + H_K(k_i), for both."""
    inputs: list[tuple[Tensor, ...]] = [(q, k)] if joint else [(q,), (k,)]
    if len(functions[0][0]) == 2:  # merged
        inputs = [(F.pad(at_least_fp32(torch.cat(x, dim=-1)), (0, _CONSTANTS), value=1.0),) for x in inputs]
    return HashInputs(inputs[0], functions[0]), HashInputs(inputs[-1], functions[-1])


def hash_functions(weights: tuple[Weights, Weights], joint: bool) -> list[tuple[Weights, ...]]:
    """Return the functions of the query hash and of the key hash, given the weights of H_Q and H_K."""
    return [weights, weights] if joint else [weights[:1], weights[1:]]


@torch.no_grad()
def merged(functions: Sequence[Weights]) -> Weights:
    """Return the sum of two-layer functions as one of their concatenated inputs, which takes fewer operations.
    _CONSTANTS inputs and hidden units are 1; a bias is the weight of one of them.
    """
    heads, dim, buckets = functions[0][2].shape
    width = dim * len(functions) + _CONSTANTS
    dtype = wide_dtype(functions[0][0])
    both = torch.zeros(1, heads, width, width + buckets, dtype=dtype, device=functions[0][0].device)
    layers = both.split((width, buckets), dim=-1)
    layers[0].diagonal(dim1=-2, dim2=-1)[..., -_CONSTANTS:].fill_(1.0)
    for part, weight in zip(merged_parts(layers, len(functions)), chain.from_iterable(functions), strict=True):
        part.copy_(weight.reshape(part.shape))
    return layers


def merged_parts(layers: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the weights of `count` merged functions as views of `merged` weights or gradients."""
    first, last = layers
    parts: list[Tensor] = []
    dim = (last.shape[-2] - _CONSTANTS) // count
    for number in range(count):
        units = slice(number * dim, (number + 1) * dim)
        bias = count * dim + number
        parts += [first[..., units, units], first[..., bias, units], last[..., units, :], last[..., bias, :]]
    return parts


def scores_of(inputs: Sequence[Tensor], weights: Sequence[Weights]) -> Tensor:
    """Return H_Q, H_K, or H_Q + H_K: (B, H, T, N), in fp32 or wider."""
    scores = [_score(x, w) for x, w in zip(inputs, weights, strict=True)]
    return scores[0] if len(scores) == 1 else scores[0] + scores[1]


@torch.no_grad()
def bucket_codes(hashed: HashInputs, buckets: int) -> Tensor:
    """Return the argmax of the scores (Eq. 8 and 18): (B, H, L), int16 if large enough, else int32. Kernels do not
    store the scores; results differ only if the two largest are equal up to rounding.
    """
    if implementation(hashed.inputs[0]) == "triton":
        from megasparse.ops.hashing_kernels import learned_codes

        return learned_codes(hashed.inputs, hashed.weights)
    codes = torch.cat([scores.argmax(-1) for _, scores in hashed.tiles(buckets)], dim=-1)  # (B, H, L)
    return codes.to(torch.int16 if buckets <= 1 << 15 else torch.int32)


@torch.no_grad()
def bucket_members(hashed: HashInputs, buckets: int, size: int) -> Tensor:
    """Return the `size` tokens with the highest scores in each bucket, by softmax over a token's buckets (section 4.4):
    (B, H, N, min(size, L)) int64, ascending. Ties go to the earlier token.
    """
    best = torch.empty(0)
    for first, scores in hashed.tiles(buckets):
        rank = _smallest(ranks(scores, first), size)
        best = rank if first == 0 else _smallest(torch.cat([best, rank], dim=-1), size)
    return (best & 0xFFFFFFFF).sort(-1).values


def in_buckets(hashed: HashInputs, buckets: int, size: int, first: int, count: int) -> Tensor:
    """Return the membership of the first `count` tokens in buckets, (B, H, count, N), 1 or 0 in fp32 or wider.

    The tokens from number `first` on determine the minimum score of members: the mean of the lowest score of the `size`
    best tokens (see `bucket_members`) and the next token's, or −∞ without one.
    """
    best = torch.empty(0)
    early = []
    for start, scores in hashed.tiles(buckets):
        score = scores.log_softmax(-1)
        del scores  # before the next tile is computed
        early += [score[:, :, : count - start]] if start < count else []
        score = score[:, :, max(0, first - start) :].transpose(-1, -2)  # (B, H, N, T)
        best = score if start == 0 else torch.cat([best, score], dim=-1)
        best = best.topk(min(size + 1, best.shape[-1])).values
    least = best[..., -2:].mean(-1) if best.shape[-1] > size else torch.full_like(best[..., 0], -torch.inf)
    inside = [score.ge_(least.unsqueeze(-2)) for score in early]
    return inside[0] if len(inside) == 1 else torch.cat(inside, dim=2)


def in_largest(hashed: HashInputs, buckets: int, count: int) -> Tensor:
    """Return `in_buckets` for the bucket of each token's highest score (Eq. 11)."""
    tokens = hashed._replace(inputs=tuple(x[:, :, :count] for x in hashed.inputs))
    inside = [F.one_hot(scores.argmax(-1), buckets).to(scores.dtype) for _, scores in tokens.tiles(buckets)]
    return torch.cat(inside, dim=2)


def _smallest(x: Tensor, count: int) -> Tensor:
    return x.topk(min(count, x.shape[-1]), largest=False, sorted=False).values


def _score(x: Tensor, weights: Weights) -> Tensor:
    dtype = torch.promote_types(x.dtype, wide_dtype(weights[0]))
    x = x.to(dtype)
    wide = [w.to(dtype) for w in weights]
    if len(wide) == 1:
        return x @ wide[0]
    if len(wide) == 2:
        return torch.relu(x @ wide[0]) @ wide[1]
    first = wide[0]
    second = wide[2]
    hidden = torch.relu(x @ first + wide[1].view(-1, 1, first.shape[2]))  # (B, H, T, D)
    return hidden @ second + wide[3].view(-1, 1, second.shape[2])
