"""Attention in chunks with relative positions (Transformer-XL), a few chunks at a time, recomputed in the backward.

C chunk, W chunks per sequence, S chunks of keys per chunk of queries: 2, or 3 if attention is not causal, E = (S + 1)·C
− 1 distances.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.operator import operator, wide_dtype
from megasparse.ops.random import PairDropout
from megasparse.ops.tiled import tiled

PADDING = -1
"""Document number of padding and of empty slots."""
_LAST = torch.iinfo(torch.int32).max  # document number of padding during sorting
_SCORE_ELEMENTS = 1 << 20  # scores per tile on a CPU: 4 MB of fp32, near its cache
_SCORE_ELEMENTS_ON_GPU = 1 << 25  # 128 MB


class RelativeVectors(NamedTuple):
    """Vectors of relative positions. r: (H, E, D), one for each of `distances`. u, w: (H, D), added to queries."""

    r: Tensor
    u: Tensor
    w: Tensor


@dataclass(frozen=True)
class LocalAttentionSpec:
    """Settings of local attention with relative positions. chunk: C, in tokens. scale: factor of the scores."""

    chunk: int
    causal: bool
    scale: float


def distances(chunk: int, causal: bool) -> range:
    """Return the distances i − j of a chunk's queries and keys, in the order of `RelativeVectors.r`."""
    return range(2 * chunk - 1, -chunk if causal else -2 * chunk, -1)


@operator(kernels=False, cast=2)
def relative_local_attention(
    q: Tensor, k: Tensor, v: Tensor, relative: RelativeVectors, spec: LocalAttentionSpec,
    key_mask: Tensor | None = None, segments: Tensor | None = None, *, dropout: PairDropout | None = None,
) -> Tensor:  # fmt: skip
    """Compute softmax_j(((q_i + u)·k_j + (q_i + w)·r_{i−j})·scale) v_j over the keys j in i's chunk and the previous
    one, and if not causal the next one (Dai et al. 2019, Transformer-XL, section 3.3).

    Chunks and distances count real tokens in the order of (document, position).

    Args:
        q, k, v: (B, H, L, D).
        key_mask, segments, dropout: As in `bucketed_attention`.

    Returns:
        (B, H, L, D) in q's dtype; padding gets 0. Softmax in fp32 or wider.
    """
    batch, heads, length, _ = q.shape
    order, document = by_document(q, key_mask, segments)
    if order is not None:
        q, k, v = (_take(x, order) for x in (q, k, v))
    if document is None:
        document = torch.zeros(batch, length, dtype=torch.int32, device=q.device)
    chunk = spec.chunk
    span = 2 if spec.causal else 3
    chunks = -(-length // chunk)
    whole = chunks * chunk - length
    around = (chunk, whole + (span - 2) * chunk)
    queries = F.pad(q, (0, 0, 0, whole)).unflatten(2, (chunks, chunk)).transpose(1, 2)  # (B, W, H, C, D)
    # (B, W, H, D, S·C): overlapping views
    keys, values = (F.pad(x, (0, 0, *around)).unfold(2, span * chunk, chunk).transpose(1, 2) for x in (k, v))
    of_query = F.pad(document, (0, whole), value=PADDING).unflatten(1, (chunks, chunk))  # (B, W, C)
    of_key = F.pad(document, around, value=PADDING).unfold(1, span * chunk, chunk)  # (B, W, S·C)
    inputs = [queries, keys, values, of_query, of_key]
    if dropout is not None:  # mixed numbers of queries (B, W, H, C) and keys (B, W, S·C)
        mixed = dropout.queries
        numbers = dropout.keys(length).expand(batch, -1)
        if order is not None:
            mixed = mixed.gather(2, order[:, None].expand_as(mixed))
            numbers = numbers.gather(1, order)
        inputs += [
            F.pad(mixed, (0, whole)).unflatten(2, (chunks, chunk)).transpose(1, 2),
            F.pad(numbers, around).unfold(1, span * chunk, chunk),
        ]
    most = _SCORE_ELEMENTS if q.device.type == "cpu" else _SCORE_ELEMENTS_ON_GPU
    tiles = -(-batch * heads * chunks * chunk * relative.r.shape[1] // most)
    out = tiled(partial(_attend, spec=spec, dropout=dropout), inputs, relative, tiles)  # (B, W, H, C, D)
    out = out.transpose(1, 2).flatten(2, 3)[:, :, :length]  # (B, H, L, D)
    return out if order is None else _take(out, order.argsort(dim=-1))


def by_document(q: Tensor, key_mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the indices that sort tokens of q (B, H, L, D) by (document, position), padding last, (B, L) int64, and
    the sorted documents, (B, L) int32; None and None for one document without padding.
    """
    if key_mask is None and segments is None:
        return None, None
    if segments is None:
        document = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int32, device=q.device)
    else:
        document = segments.to(torch.int32)
    if key_mask is not None:
        document = document.masked_fill(~key_mask, _LAST)
    document, order = torch.sort(document, dim=-1, stable=True)
    return order, document.masked_fill(document == _LAST, PADDING)


def _take(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(2, order[:, None, :, None].expand_as(x))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, of_query: Tensor, of_key: Tensor, *others: Tensor, spec: LocalAttentionSpec,
    dropout: PairDropout | None,
) -> Tensor:  # fmt: skip
    """Attend from the queries of some chunks. others: with dropout mixed numbers of queries and keys; r, u, w."""
    *numbers, r, u, w = others
    dtype = wide_dtype(q)
    wide = q.to(dtype)
    bias = [x.to(dtype)[:, None] for x in (u, w)]
    chunk = q.shape[3]
    score = (wide + bias[0]) @ k.to(dtype)  # (B, W, H, C, S·C)
    score = spec.scale * (score + _skew((wide + bias[1]) @ r.to(dtype).transpose(1, 2), score.shape[-1]))
    visible = (of_query[..., :, None] == of_key[..., None, :]) & (of_key != PADDING)[..., None, :]  # (B, W, C, S·C)
    if spec.causal:
        slot = torch.arange(score.shape[-1], device=q.device)
        visible = visible & (slot <= slot[:chunk, None] + chunk)
    score = score.masked_fill(~visible[:, :, None], -torch.inf)
    highest = score.detach().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
    weight = torch.exp(score - highest)
    total = weight.sum(dim=-1, keepdim=True)
    weight = weight / total.masked_fill(total == 0, 1.0)  # nothing is visible to padding
    if dropout is not None:
        weight = weight * dropout.factors(numbers[0].unsqueeze(-1), numbers[1][:, :, None, None], dtype)
    return (weight @ v.to(dtype).transpose(-1, -2)).to(q.dtype)


def _skew(x: Tensor, keys: int) -> Tensor:
    """Convert x (..., C, E) by distance to (..., C, S·C) by key: [a, b] of the result is x[a, b − a + C − 1]."""
    chunk, count = x.shape[-2:]
    rows = x.flatten(-2)[..., chunk - 1 : chunk - 1 + chunk * (count - 1)]  # (..., C·(E − 1))
    return rows.unflatten(-1, (chunk, count - 1))[..., :keys] if chunk > 1 else x
