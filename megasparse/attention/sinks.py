"""Attention sinks (Xiao et al. 2023): the first n tokens of a document, visible to all its later tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import AttentionInputs
from megasparse.attention.sequence_part import SequencePart
from megasparse.ops.gathered_attention import gathered_attention
from megasparse.ops.local_attention import PADDING, by_document
from megasparse.ops.operator import ROWS, at_least_rows


class DocumentRanks(NamedTuple):
    """Positions of tokens among the real ones, (B or 1, L) int64 each. order: tokens sorted by (document, position),
    padding last. number: index of each token in `order`. rank: index in its document; L for padding.
    """

    order: Tensor
    number: Tensor
    rank: Tensor

    @staticmethod
    def of(inputs: AttentionInputs) -> "DocumentRanks":
        position = torch.arange(inputs.q.shape[2], device=inputs.q.device)[None]
        order, document = by_document(inputs.q, inputs.key_mask, inputs.segments)
        if order is None or document is None:
            return DocumentRanks(position, position, position)
        starts = F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
        rank = position - torch.where(starts, position, 0).cummax(-1).values
        rank = rank.masked_fill(document == PADDING, position.shape[1])
        number = torch.empty_like(order).scatter_(-1, order, position.expand_as(order))
        return DocumentRanks(order, number, rank.gather(-1, number))


def sink_index(sinks: int, inputs: AttentionInputs, *, exclude_self: bool = False, chunk: int | None = None) -> Tensor:
    """Return the sinks visible to each token: (B or 1, 1, L, n) int32 token numbers, −1 in empty slots.

    In a decoder these are at or before the token. exclude_self: omit the token itself. chunk: omit sinks in the token's
    own chunk of this many tokens and in neighbouring chunks.
    """
    order, number, rank = (x.unsqueeze(-1) for x in DocumentRanks.of(inputs))
    length = rank.shape[1]
    sink = torch.arange(sinks, device=rank.device)
    position = number - rank + sink  # index of the sinks in `order`
    token = order[..., 0].gather(-1, position.clamp(0, length - 1).flatten(1)).view(position.shape)
    of_document = rank[..., 0].gather(-1, token.flatten(1)).view(position.shape) == sink
    visible = of_document & (position < length) & (rank < length)
    if inputs.causal:
        visible = visible & (sink <= rank)
    if exclude_self:
        visible = visible & (sink != rank)
    if chunk is not None:
        visible = visible & ((number // chunk - position // chunk).abs() > 1)
    return token.masked_fill(~visible, -1)[:, None].to(torch.int32)


def sink_attention(
    sinks: int, inputs: AttentionInputs, part: SequencePart, *, scale: float, exclude_self: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute softmax attention to the sinks of `sink_index`, for `merge`: output (B, H, L, D) and log-sum-exp (B, H,
    L), 0 and −∞ for tokens without a visible sink, or of other ranks if these divide the pairs.
    """
    q, k, v = inputs.with_query_dtype()[:3]
    index = sink_index(sinks, inputs, exclude_self=exclude_self, chunk=chunk)
    if inputs.segments is not None or inputs.dropout is not None or q.dtype not in (torch.float32, torch.float64):
        out, lse = gathered_attention(q, k, v, index, scale=scale, dropout=inputs.dropout)
    else:
        out, lse = _shared_sinks(q, k, v, index, scale)
    if part.pair_shard is not None:
        lse = lse.masked_fill(~part.owned_tokens(lse.shape[2], lse.device), -torch.inf)
    return out, lse


def cached_sinks(
    sinks: range, q: Tensor, k: Tensor, v: Tensor, position: int, *, scale: float, exclude_self: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `sink_attention` of queries (B, H, Lq, D) from `position` on, bit-identical to a full pass.

    sinks: their positions. k, v: (B, H, n or more, D), from the first sink on.
    """
    sink = torch.arange(sinks.start, sinks.stop, device=q.device)
    query = torch.arange(position, position + q.shape[2], device=q.device)[:, None]
    visible = sink <= query - int(exclude_self)
    if chunk is not None:
        visible = visible & (query // chunk - sink // chunk > 1)
    index = torch.where(visible, sink - sinks.start, -1).int().expand(len(q), 1, -1, -1)
    k, v = (x.to(q.dtype) for x in (k, v))
    if q.dtype not in (torch.float32, torch.float64):
        return gathered_attention(q, k, v, index, scale=scale)
    return _shared_sinks(q, k, v, index, scale)


def _shared_sinks(q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to sinks that all queries of a row share, by products of at least 2·ROWS queries and two sinks, in which a
    query's bits do not depend on the others.
    """
    queries = q.shape[2]
    q = at_least_rows(q, 2 * ROWS)
    index = F.pad(index, (0, max(0, 2 - index.shape[3]), 0, q.shape[2] - queries), value=-1)
    shared = index.amax(2).clamp_min(0).long().unsqueeze(-1)
    keys, values = (x.gather(2, shared.expand(*x.shape[:2], -1, x.shape[3])) for x in (k, v))  # (B, H, n, D) each
    nothing = (index < 0).all(-1, keepdim=True)
    score = scale * (q @ keys.transpose(-1, -2))  # (B, H, L, n)
    score = score.masked_fill(index < 0, -torch.inf).masked_fill(nothing, 0.0)
    out = torch.softmax(score, dim=-1).masked_fill(nothing, 0.0) @ values
    lse = torch.logsumexp(score, dim=-1).masked_fill(nothing.squeeze(-1), -torch.inf)
    return out[:, :, :queries], lse[:, :, :queries]


def without_seen(index: Tensor, inputs: AttentionInputs, sinks: int, chunk: int | None) -> Tensor:
    """Return an index of keys (B, H or 1, L, K) with −1 for keys that are visible anyway: sinks and, with a chunk, the
    token's own chunk of this many tokens and the neighbouring chunks.
    """
    _, number, rank = DocumentRanks.of(inputs)
    of_key = rank_of_key = index
    if inputs.key_mask is not None or inputs.segments is not None:  # else they are the token's position
        key = index.clamp_min(0).long().flatten(1)
        of_key, rank_of_key = (x.expand(len(index), -1).gather(1, key).view(index.shape) for x in (number, rank))
    visible = rank_of_key < sinks
    if chunk is not None:
        first = (number // chunk - 1)[:, None, :, None] * chunk
        visible = visible | ((of_key >= first) & (of_key < first + 3 * chunk))
    return index.masked_fill(visible, -1)


def merge(parts: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge attention over several sets of keys into one softmax. Returns output (B, H, L, D) and log-sum-exp (B, H,
    L).

    parts: outputs and log-sum-exps, 0 and −∞ for queries without a visible key. bias: (H, 1, parts), added to the
    scores of each part's keys, or None.
    """
    outs, lses = zip(*parts, strict=True)
    lse = torch.stack(lses, dim=-1)  # (B, H, L, parts)
    lse = lse if bias is None else lse + bias
    nothing = lse.isneginf().all(-1, keepdim=True)
    lse = lse.masked_fill(nothing, 0.0)  # avoid NaN gradients of a softmax over −∞
    weight = torch.softmax(lse, dim=-1).to(outs[0].dtype)
    out = sum(part * share.unsqueeze(-1) for part, share in zip(outs, weight.unbind(-1), strict=True))
    return out, torch.logsumexp(lse, dim=-1).masked_fill(nothing.squeeze(-1), -torch.inf)
