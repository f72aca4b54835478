"""LHA's hash functions H_Q and H_K, and the buckets and bucket members that follow from their scores.

Scores are computed for one tile of tokens at a time, so that no tensor covers all tokens and all buckets. Queries and
keys are detached.

B batch, H heads, L length, D head dim, N buckets, T tokens of a tile.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, MechanismSpec
from megasparse.ops.hash_learning import ranks, tiles
from megasparse.ops.operator import at_least_rows, implementation
from megasparse.ops.random import derive, rotations

Weights = tuple[Tensor, ...]
"""Weights of one hash function: (H, D, N); for the two-layer network (H, D, D), bias (H·D), (H, D, N), bias (H·N)."""


class HashFunctions(nn.Module):
    """H_Q and H_K of every head, functions from D numbers to N scores (LHA Eq. 8).

    mlp: W2·relu(W1·x + b1) + b2 with D hidden units; linear: W·x; random: x[R; −R] for queries and keys alike (Eq. 9),
    fixed throughout a run, which is the paper's LSH baseline. The paper does not specify the hidden width and the
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
                weight = torch.zeros(shape) if len(shape) == 1 else torch.empty(shape)
                self.register_parameter(names[-1], nn.Parameter(weight))

    def forward(self, q: Tensor, context: AttentionContext) -> tuple[Weights, Weights]:
        """Return the weights of H_Q and of H_K for this rank's heads, given queries q (B, H, L, D).

        Under ZeRO 3, parameters are gathered only during this call, so it returns copies; they are small relative to
        the scores.
        """
        if self.kind == "random":
            key = derive(context.rng.seed, context.layer, "lha random hash")
            heads = range(context.head_offset, context.head_offset + q.shape[1])
            width = 2 * -(-self.buckets // 2)
            half = rotations(key, heads, 1, q.shape[3], [width], q.device)[:, 0]
            projection = torch.cat([half, -half], dim=-1)[..., : self.buckets]
            return (projection,), (projection,)
        weights: dict[str, Weights] = {}
        for side, names in self.names.items():
            parameters = [self.get_parameter(name) for name in names]
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
            scores = scores_of([at_least_rows(x) for x in parts], self.weights)
            yield tokens.start, scores[:, :, : parts[0].shape[2]]


def hash_inputs(q: Tensor, k: Tensor, joint: bool, weights: tuple[Weights, Weights]) -> tuple[HashInputs, HashInputs]:
    """Return the inputs of the query hash and of the key hash; with `joint` the same, H_Q(q_i) + H_K(k_i), for both."""
    query, key = weights
    if joint:
        joined = HashInputs((q, k), (query, key))
        return joined, joined
    return HashInputs((q,), (query,)), HashInputs((k,), (key,))


def scores_of(inputs: Sequence[Tensor], weights: Sequence[Weights]) -> Tensor:
    """Return H_Q, H_K, or H_Q + H_K: (B, H, T, N), in fp32 or wider."""
    if len(weights[0]) == 4 and implementation(inputs[0], largest_width=None) == "triton":
        return _in_one_product(inputs, weights)
    scores = [_score(x, w) for x, w in zip(inputs, weights, strict=True)]
    return scores[0] if len(scores) == 1 else scores[0] + scores[1]


@torch.no_grad()
def bucket_codes(hashed: HashInputs, buckets: int) -> Tensor:
    """Return the argmax of the scores (Eq. 8 and 18): (B, H, L), int16 if large enough, else int32. Kernels do not
    store the scores; their result differs only if the two largest scores are equal up to rounding.
    """
    if implementation(hashed.inputs[0]) == "triton":
        from megasparse.ops.hashing_kernels import learned_codes

        return learned_codes(hashed.inputs, hashed.weights)
    codes = torch.cat([scores.argmax(-1) for _, scores in hashed.tiles(buckets)], dim=-1)
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


def thresholds(hashed: HashInputs, buckets: int, size: int) -> Tensor:
    """Return the minimum score of each bucket's `size` best tokens (see `bucket_members`), (B, H, N): the mean of their
    lowest score and the next token's score, or −∞ without a next token.
    """
    best = torch.empty(0)
    for first, scores in hashed.tiles(buckets):
        score = scores.log_softmax(-1).transpose(-1, -2)  # (B, H, N, T)
        best = score if first == 0 else torch.cat([best, score], dim=-1)
        best = best.topk(min(size + 1, best.shape[-1])).values
    if best.shape[-1] <= size:
        return torch.full_like(best[..., 0], -torch.inf)
    return best[..., -2:].mean(-1)


def in_buckets(hashed: HashInputs, least: Tensor) -> Tensor:
    """Return the membership (B, H, T, N) bool of tokens in buckets, given the members' minimum scores (B, H, N)."""
    return scores_of(hashed.inputs, hashed.weights).log_softmax(-1) >= least.unsqueeze(-2)


def _smallest(x: Tensor, count: int) -> Tensor:
    return x.topk(min(count, x.shape[-1]), largest=False, sorted=False).values


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
    """Return the sum of two-layer functions, computing their second layers as one product of concatenated hidden
    layers, so that scores are written once. The bias is the weight of a constant unit 1; 7 zero rows keep alignment.
    """
    dtype = torch.promote_types(torch.promote_types(inputs[0].dtype, weights[0][0].dtype), torch.float32)
    hidden = torch.cat([_hidden(x, w, dtype) for x, w in zip(inputs, weights, strict=True)], dim=-1)
    second = torch.cat([w[2].to(dtype) for w in weights], dim=1)  # (H, D of all functions, N)
    bias = torch.stack([w[3].to(dtype) for w in weights]).sum(0).view(len(second), 1, -1)
    return F.pad(hidden, (0, 8), value=1.0) @ torch.cat([second, F.pad(bias, (0, 0, 0, 7))], dim=1)
