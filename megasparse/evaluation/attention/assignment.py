"""Assignments of queries and keys to buckets of equal size (LHA Eq. 4), to compare hashes by attention utility.

A window's N buckets take L/N queries and L/N keys each; where N does not divide L, the sizes differ by one.

B windows, H heads, L length, D head dim, N buckets.
"""

import torch
from torch import Tensor

from megasparse.attention.smyrf import asymmetric
from megasparse.ops.random import derive, normal, random_bits, rotations

Codes = tuple[Tensor, Tensor]
"""Buckets of the queries and of the keys, (B, H, L) int64 each."""


def cut(values: Tensor, buckets: int) -> Tensor:
    """Sort by a number and cut into equal pieces (Kitaev, Daras): codes of values (..., L)."""
    return values.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True) * buckets // values.shape[-1]


def balanced(scores: Tensor, sweeps: int = 60) -> Tensor:
    """Codes of scores (..., L, N): the best-scored bucket, after the boundaries between buckets have moved until all
    are equally large.

    A boundary moves by a number a bucket that is added to its scores ("adaptively set hash boundaries", LHA section
    3.3): Sinkhorn's, which gives each bucket the same expected size under softmax(scores). What rounding leaves over
    goes, the surest tokens first, to the best bucket that has room.
    """
    scores = scores.double().log_softmax(-1)
    offset = torch.zeros_like(scores[..., :1, :])
    for _ in range(sweeps):
        share = (scores + offset).log_softmax(-1).logsumexp(-2, keepdim=True)
        offset = offset - share + share.mean(-1, keepdim=True)
    return _fill((scores + offset).softmax(-1))


def _fill(scores: Tensor) -> Tensor:
    """Every token asks its best bucket that has not refused it yet; a full bucket keeps the tokens that score highest.

    scores: (..., L, N), not negative. Returns (..., L).
    """
    length, buckets = scores.shape[-2:]
    capacity = (torch.arange(buckets, device=scores.device) + 1) * length // buckets
    capacity = capacity.diff(prepend=capacity.new_zeros(1))  # (N,)
    refused = torch.zeros_like(scores, dtype=torch.bool)
    while True:
        codes = scores.masked_fill(refused, -1.0).argmax(-1, keepdim=True)  # (..., L, 1)
        asked = torch.zeros_like(refused).scatter_(-1, codes, True)
        rank = torch.where(asked, scores, -1.0).argsort(dim=-2, descending=True, stable=True).argsort(dim=-2)
        over = asked & (rank >= capacity)
        if not over.any():
            return codes.squeeze(-1)
        refused |= over


def random_codes(q: Tensor, buckets: int, key: int) -> Codes:
    """Buckets drawn at random, queries and keys apart: utility 1/N in expectation."""
    batch, heads, length, _ = q.shape
    rows = torch.arange(batch * heads, device=q.device)
    bits = [random_bits(derive(key, side), rows, length).view(batch, heads, length) for side in ("queries", "keys")]
    return cut(bits[0], buckets), cut(bits[1], buckets)


def lsh_scores(x: Tensor, buckets: int, key: int, first: int = 0) -> Tensor:
    """[xR; −xR] of angular LSH, whose argmax is the bucket (LHA Eq. 9): (B, H, L, N). A rotation a head and a window.

    first: number of the first window.
    """
    matrices = rotations(key, range(x.shape[1]), first + x.shape[0], x.shape[-1], [buckets], x.device)[:, first:]
    rotated = torch.einsum("bhld,hbdn->bhln", x.float(), matrices)
    return torch.cat([rotated, -rotated], dim=-1)


def smyrf_values(q: Tensor, k: Tensor, key: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """The numbers by which SMYRF sorts queries and keys, (B, H, L) each: random projections of F(q) and G(k) (LHA Eq. 3
    and 10; offset and width of E2LSH change no order). A line a head and a window; first: number of the first window.
    """
    batch, heads, _, width = q.shape
    rows = (torch.arange(batch, device=q.device) + first).unsqueeze(1) * (1 << 16) + torch.arange(
        heads, device=q.device
    )
    line = normal(key, rows, width + 2).unsqueeze(-1)  # (B, H, D + 2, 1)
    queries, keys = asymmetric(q.float(), k.float())
    return (queries @ line).squeeze(-1), (keys @ line).squeeze(-1)
