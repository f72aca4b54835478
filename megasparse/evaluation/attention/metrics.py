"""How well a sparse pattern approximates full attention: attention utility (LHA section 3.3), imbalance of its buckets
(section 3.2), recall of the largest weights, error of the output.

Everything here holds L² weights a head: for windows of a few thousand tokens, not for training lengths.

B windows, H heads, L length, D head dim, N buckets.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megasparse.ops.dtype import at_least_fp32


def attention_weights(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """A = softmax(qkᵀ·scale) (LHA Eq. 1), (B, H, L, L) in fp32 at least, without a mask as in the paper.

    scale: D^-1/2 where None.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.softmax(at_least_fp32(q) @ at_least_fp32(k).transpose(-1, -2) * scale, dim=-1)


def same_bucket(query_codes: Tensor, key_codes: Tensor) -> Tensor:
    """The pattern of an assignment: (..., Lq, Lk) bool from codes (..., Lq) and (..., Lk)."""
    return query_codes.unsqueeze(-1) == key_codes.unsqueeze(-2)


def attention_utility(weights: Tensor, visible: Tensor) -> Tensor:
    """The attention that a pattern keeps, Σ_{visible j} A_ij, mean over the queries (Eq. 5 divided by their number).

    weights: (B, H, L, L). visible: bool, broadcast to it. Returns (B, H).
    """
    return weights.masked_fill(~visible, 0.0).sum(-1).mean(-1)


def upper_bound(weights: Tensor, keys: int | Tensor) -> Tensor:
    """The highest utility of any pattern with so many keys a query: each query's `keys` largest weights, mean over the
    queries.

    keys: a number, or one a query, (B, H, L). Returns (B, H).
    """
    total = weights.sort(dim=-1, descending=True).values.cumsum(-1)
    count = torch.as_tensor(keys, device=weights.device).expand(weights.shape[:-1])
    kept = total.gather(-1, (count.long() - 1).clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(count > 0, kept, 0.0).mean(-1)


def recall_of_top(exact: Tensor, sparse: Tensor, top: int) -> Tensor:
    """Share of each query's `top` largest exact weights that are also among the `top` largest of the sparse ones, mean
    over the queries: (B, H).

    A weight of 0 is no key: a query with fewer than `top` keys of either kind has only those.
    """
    wanted, found = _largest(exact, top), _largest(sparse, top)
    count = wanted.sum(-1)
    return torch.where(count > 0, (wanted & found).sum(-1) / count.clamp_min(1), 1.0).mean(-1)


def _largest(weights: Tensor, top: int) -> Tensor:
    """Where the `top` largest weights above 0 of each row are: bool, the shape of `weights`."""
    values, index = weights.topk(min(top, weights.shape[-1]), dim=-1)
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, index, values > 0)


def relative_error(out: Tensor, exact: Tensor) -> Tensor:
    """‖out − exact‖ / ‖exact‖ over the tokens of each head: (B, H) from (B, H, L, D)."""
    difference = (out.double() - exact.double()).norm(dim=(-1, -2))
    return difference / exact.double().norm(dim=(-1, -2)).clamp_min(torch.finfo(torch.float64).tiny)


def largest_error(out: Tensor, exact: Tensor) -> Tensor:
    """‖out − exact‖∞ / ‖exact‖∞, the largest difference of a number over the largest number, over the tokens of each
    head (YOSO's Figure 5): (B, H) from (B, H, L, D).
    """
    difference, size = ((x.double()).abs().amax((-1, -2)) for x in (out - exact, exact))
    return difference / size.clamp_min(torch.finfo(torch.float64).tiny)


class Imbalance(NamedTuple):
    """Shares of the buckets, (B, H) each.

    ratio: those with a query:key ratio outside 1:2 … 2:1, among the buckets that are not empty. size: those with more
    than twice, or less than half, the queries and keys of an even bucket, among all. largest: what of all queries and
    keys is in the largest bucket (1 if the hash has collapsed).
    """

    ratio: Tensor
    size: Tensor
    largest: Tensor


def imbalance(query_codes: Tensor, key_codes: Tensor, buckets: int) -> Imbalance:
    """The imbalance of an assignment as hashes give it, (B, H, L) each, before any balancing (LHA section 3.2)."""
    queries, keys = (_sizes(codes, buckets) for codes in (query_codes, key_codes))  # (B, H, N)
    filled = queries + keys > 0
    off = filled & ((queries > 2 * keys) | (keys > 2 * queries))
    size, total = queries + keys, query_codes.shape[-1] + key_codes.shape[-1]
    off_size = (size > 2 * total / buckets) | (2 * size < total / buckets)
    return Imbalance(off.sum(-1) / filled.sum(-1), off_size.float().mean(-1), size.amax(-1) / total)


def _sizes(codes: Tensor, buckets: int) -> Tensor:
    sizes = torch.zeros(*codes.shape[:-1], buckets, dtype=torch.int64, device=codes.device)
    return sizes.scatter_add_(-1, codes.long(), torch.ones_like(codes, dtype=torch.int64))
