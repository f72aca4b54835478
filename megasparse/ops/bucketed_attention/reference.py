"""The definition of bucketed attention, dense, to test against.

It shares no code with the blockwise path: visibility is counted from ranks inside buckets and from sorted positions,
pair by pair. B batch, H heads, R rounds, L length, D head dim, M chunk.
"""

import torch
from torch import Tensor

from megasparse.ops.bucketed_attention.specification import BucketedAttentionSpec, Window
from megasparse.ops.random import PairDropout


def visible(
    codes: Tensor,
    window: Window,
    causal: bool,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    key_codes: Tensor | None = None,
) -> Tensor:
    """(B, H, R, L, L) bool: whether round r shows key j (last) to query i. Self is visible here."""
    batch, heads, rounds, length = codes.shape
    real = torch.ones(batch, length, dtype=torch.bool, device=codes.device) if key_mask is None else key_mask
    document = torch.zeros(batch, length, dtype=torch.int64, device=codes.device) if segments is None else segments
    position = torch.arange(length, device=codes.device)
    earlier = position[None, :] <= position[:, None]  # [i, j]: j at or before i
    together = document[:, :, None] == document[:, None, :]
    together = together & real[:, :, None] & real[:, None, :]
    together = together[:, None, None].expand(batch, heads, rounds, length, length)
    if key_codes is not None:
        return _visible_by_key_rank(codes, key_codes, window.chunk, causal, together)
    same = (codes[..., :, None] == codes[..., None, :]) & together
    if window.kind == "band":
        rank = (same & earlier).sum(-1)  # tokens of i's bucket at or before i
        seen = same & ((rank[..., :, None] - rank[..., None, :]).abs() < window.chunk)
        return seen & earlier if causal else seen
    # Sorted position: how many real tokens come before in the order (document, bucket, position).
    key = (document[:, None, None].expand_as(codes), codes, position.expand_as(codes))
    before = torch.zeros_like(together)
    for part in reversed(key):
        left, right = part[..., None, :], part[..., :, None]
        before = (left < right) | ((left == right) & before)
    chunk = (before & real[:, None, None, None, :]).sum(-1) // window.chunk
    distance = chunk[..., :, None] - chunk[..., None, :]
    seen = (distance == 0) | (distance == 1)
    if window.ahead:
        seen = seen | (distance == -1)
    seen = seen & (same if window.same_bucket else together)
    return seen & earlier if causal else seen


def _visible_by_key_rank(codes: Tensor, key_codes: Tensor, chunk: int, causal: bool, together: Tensor) -> Tensor:
    """Pairs of a query with the last M keys of its bucket at or before it and, where not causal, the M after it."""
    position = torch.arange(codes.shape[-1], device=codes.device)
    between = (position[:, None] < position[None, :])[None]  # [j, j']: j before j'
    same = (codes[..., :, None] == key_codes[..., None, :]) & together
    near = torch.zeros_like(same)
    for i in range(codes.shape[-1]):
        mine = same[..., i, :]  # (B, H, R, L)
        back, ahead = mine & (position <= i), mine & (position > i)
        closer = (back[..., None, :] & between).sum(-1)  # keys of the bucket after j, up to i
        near[..., i, :] = back & (closer < chunk)
        if not causal:
            closer = (ahead[..., None, :] & between.transpose(-1, -2)).sum(-1)
            near[..., i, :] |= ahead & (closer < chunk)
    return near


def _in_share(codes: Tensor, spec: BucketedAttentionSpec, key_mask: Tensor | None, segments: Tensor | None) -> Tensor:
    """(B, H, R, L) bool: whether a query stands in the share of its round's order by (document, bucket, position),
    padding last.
    """
    order = codes.argsort(dim=-1, stable=True)
    for mask in (segments, None if key_mask is None else ~key_mask):
        if mask is not None:
            first = mask[:, None, None].expand_as(codes).gather(-1, order).to(torch.int64)
            order = order.gather(-1, first.argsort(dim=-1, stable=True))
    places = spec.places(codes.shape[-1])
    place = order.argsort(-1)
    return (place >= places.start) & (place < places.stop)


def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    spec: BucketedAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    key_codes: Tensor | None = None,
    dropout: PairDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out_i = Σ_r Σ_j exp(q_i·k_j·scale − log N_ij − lse_i) v_j over the keys j visible in round r (Reformer
    Eq. 2–6, appendix A).

    Arguments and result are those of `operator.bucketed_attention`. With exclude_self or key_codes a token that sees
    nothing gets its own value, and its own score as lse (spec.self_at_last).
    """
    length = q.shape[2]
    if codes is None:
        codes = torch.zeros(*q.shape[:2], 1, length, dtype=torch.int64, device=q.device)
    seen = visible(codes, spec.window, spec.causal, key_mask, segments, key_codes)
    if spec.exclude_self:
        seen = seen & ~torch.eye(length, dtype=torch.bool, device=q.device)
    counts = seen.sum(2)  # (B, H, L, L)
    score = (q * spec.scale) @ k.transpose(-1, -2)
    if spec.share is None:
        weight = (counts > 0).to(q.dtype).log() if spec.count_rounds else counts.to(q.dtype).log()
    else:  # of a pair that N rounds show, a share has as many Nths as it has rounds
        own = (seen & _in_share(codes, spec, key_mask, segments)[..., None]).sum(2)
        weight = (own.to(q.dtype) / counts.clamp_min(1) if spec.count_rounds else own.to(q.dtype)).log()
        counts = own
    logits = score + weight
    real = torch.ones_like(q[:, :1, :, 0], dtype=torch.bool) if key_mask is None else key_mask[:, None]
    if spec.self_at_last and (spec.exclude_self or key_codes is not None):
        alone = (counts.sum(-1) == 0) & real
        own = torch.eye(length, dtype=torch.bool, device=q.device) & alone[..., None]
        logits = torch.where(own, score, logits)
    blind = (logits == -torch.inf).all(-1)  # padding: kept out of the softmax, whose gradient would be NaN
    probability = torch.softmax(logits.masked_fill(blind[..., None], 0.0), dim=-1)
    lse = torch.logsumexp(logits.masked_fill(blind[..., None], 0.0), dim=-1)
    if dropout is not None:
        probability = probability * dropout.dense(length, q.dtype)
    return (probability @ v).masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
