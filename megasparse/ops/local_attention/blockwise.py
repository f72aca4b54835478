"""Local attention with relative positions, a few chunks at a time, recomputed in the backward: linear memory.

B batch, H heads, L length, D head dim, C chunk, W chunks a sequence, S chunks of keys that a chunk of queries meets: 2,
or 3 where attention is not causal, E = (S + 1)·C − 1 distances.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.blocks import at_most
from megasparse.ops.local_attention.layout import PADDING, by_document
from megasparse.ops.local_attention.specification import LocalAttentionSpec
from megasparse.ops.random import PairDropout
from megasparse.ops.tiled import tiled

_SCORE_ELEMENTS = 1 << 20  # scores in a tile: 4 MB of fp32


def distances(chunk: int, causal: bool) -> range:
    """The distances i − j of a chunk's queries and keys, in the order of `relative_local_attention`'s vectors."""
    return range(2 * chunk - 1, -chunk if causal else -2 * chunk, -1)


@without_autocast
def relative_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor,
    w: Tensor,
    spec: LocalAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    dropout: PairDropout | None = None,
) -> Tensor:
    """Computes `operator.relative_local_attention` in tiles of chunks, in fp32 at least."""
    batch, heads, length, _ = q.shape
    order, document = by_document(q, key_mask, segments)
    if order is not None:
        q, k, v = (_take(x, order) for x in (q, k, v))
    if document is None:
        document = torch.zeros(batch, length, dtype=torch.int32, device=q.device)
    chunk, span = spec.chunk, 2 if spec.causal else 3
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
        mixed, numbers = dropout.queries, dropout.keys(length).expand(batch, -1)
        if order is not None:
            mixed, numbers = mixed.gather(2, order[:, None].expand_as(mixed)), numbers.gather(1, order)
        inputs += [
            F.pad(mixed, (0, whole)).unflatten(2, (chunks, chunk)).transpose(1, 2),
            F.pad(numbers, around).unfold(1, span * chunk, chunk),
        ]
    attend = partial(_attend, spec=spec, dropout=dropout)
    tiles = -(-batch * heads * chunks * chunk * r.shape[1] // at_most(_SCORE_ELEMENTS))
    out = tiled(attend, inputs, [r, u, w], tiles)  # (B, W, H, C, D)
    out = out.transpose(1, 2).flatten(2, 3)[:, :, :length]
    return out if order is None else _take(out, order.argsort(dim=-1))


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of x (B, H, L, D) in the given order (B, L)."""
    return x.gather(2, order[:, None, :, None].expand_as(x))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_query: Tensor,
    of_key: Tensor,
    *others: Tensor,
    spec: LocalAttentionSpec,
    dropout: PairDropout | None,
) -> Tensor:
    """Some chunks of queries. q: (B, W, H, C, D). k, v: (B, W, H, D, S·C). of_query: (B, W, C), of_key: (B, W, S·C).
    others: with dropout the mixed numbers of queries and keys; r, u and w.
    """
    *numbers, r, u, w = others
    dtype = torch.promote_types(q.dtype, torch.float32)
    wide, bias, chunk = q.to(dtype), [x.to(dtype)[:, None] for x in (u, w)], q.shape[3]
    score = (wide + bias[0]) @ k.to(dtype)
    score = spec.scale * (score + _skew((wide + bias[1]) @ r.to(dtype).transpose(1, 2), score.shape[-1]))
    seen = (of_query[..., :, None] == of_key[..., None, :]) & (of_key != PADDING)[..., None, :]  # (B, W, C, S·C)
    if spec.causal:
        place = torch.arange(score.shape[-1], device=q.device)
        seen = seen & (place <= place[:chunk, None] + chunk)
    score = score.masked_fill(~seen[:, :, None], -torch.inf)
    highest = score.detach().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
    weight = torch.exp(score - highest)
    total = weight.sum(dim=-1, keepdim=True)
    weight = weight / total.masked_fill(total == 0, 1.0)  # padding sees nothing
    if dropout is not None:
        weight = weight * dropout.factors(numbers[0].unsqueeze(-1), numbers[1][:, :, None, None], dtype)
    return (weight @ v.to(dtype).transpose(-1, -2)).to(q.dtype)


def _skew(x: Tensor, keys: int) -> Tensor:
    """Turn x (..., C, E) by distance into (..., C, S·C) by key: [a, b] of the result is x[a, b − a + C − 1]."""
    chunk, count = x.shape[-2:]
    rows = x.flatten(-2)[..., chunk - 1 : chunk - 1 + chunk * (count - 1)]
    return rows.unflatten(-1, (chunk, count - 1))[..., :keys] if chunk > 1 else x
