"""Attention sinks (Xiao et al. 2023): the first n tokens of a document, which every later token of it sees.

B batch, H heads, L length, D head dim, n sinks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import AttentionInputs
from megasparse.ops.local_attention.layout import PADDING, by_document


class Places(NamedTuple):
    """Where tokens stand among the real ones, (B or 1, L) int64 each. order: the tokens by (document, position),
    padding last. number: each one's place in it. rank: how many of its document's tokens precede each; L of padding.
    """

    order: Tensor
    number: Tensor
    rank: Tensor

    @staticmethod
    def of(inputs: AttentionInputs) -> "Places":
        place = torch.arange(inputs.q.shape[2], device=inputs.q.device)[None]
        order, document = by_document(inputs.q, inputs.key_mask, inputs.segments)
        if order is None or document is None:
            return Places(place, place, place)
        starts = F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
        rank = place - torch.where(starts, place, 0).cummax(-1).values
        rank = rank.masked_fill(document == PADDING, place.shape[1])
        number = torch.empty_like(order).scatter_(-1, order, place.expand_as(order))
        return Places(order, number, rank.gather(-1, number))


def sink_index(sinks: int, inputs: AttentionInputs, *, exclude_self: bool = False, chunk: int | None = None) -> Tensor:
    """The sinks that each token sees: (B or 1, 1, L, n) int32 token numbers, −1 at empty places.

    In a decoder a token sees those at or before it. exclude_self: without itself. chunk: without those that it sees in
    its own chunk of so many tokens or in a neighbouring one.
    """
    order, number, rank = (x.unsqueeze(-1) for x in Places.of(inputs))
    length, which = rank.shape[1], torch.arange(sinks, device=rank.device)
    place = number - rank + which  # of the sinks in the order
    token = order[..., 0].gather(-1, place.clamp(0, length - 1).flatten(1)).view(place.shape)
    of_document = rank[..., 0].gather(-1, token.flatten(1)).view(place.shape) == which
    seen = of_document & (place < length) & (rank < length)
    if inputs.causal:
        seen = seen & (which <= rank)
    if exclude_self:
        seen = seen & (which != rank)
    if chunk is not None:
        seen = seen & ((number // chunk - place // chunk).abs() > 1)
    return token.masked_fill(~seen, -1)[:, None].to(torch.int32)


def merge(parts: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of several: its output (B, H, L, D), and which queries no part shows a key, (B, H, L).

    parts: outputs (B, H, L, D), 0 where nothing is seen, and log-sum-exps (B, H, L), −∞ there. bias: (H, 1, parts),
    added to the scores of each part's keys, or None.
    """
    outs, lses = zip(*parts, strict=True)
    lse = torch.stack(lses, dim=-1)  # (B, H, L, parts)
    lse = lse if bias is None else lse + bias
    nothing = lse.isneginf().all(-1, keepdim=True)
    lse = lse.masked_fill(nothing, 0.0)  # kept out of the softmax, whose gradient would be NaN
    weight = torch.softmax(lse, dim=-1).to(outs[0].dtype)
    out = sum(part * share.unsqueeze(-1) for part, share in zip(outs, weight.unbind(-1), strict=True))
    return out, nothing.squeeze(-1)
