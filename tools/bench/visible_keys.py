"""Keys that are visible to queries in the mechanisms of a decoder, computed densely from hash codes or sketches.

B batch, H heads, R rounds, S queries, L length, M chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.band import BandAttention
from megasparse.attention.full import FullAttention
from megasparse.attention.local import LocalAttention
from megasparse.attention.observation import Call
from megasparse.attention.ranked import RankedAttention, bucket_numbers
from megasparse.attention.taught_sketch import TaughtSketch
from megasparse.errors import ConfigError
from megasparse.ops.operator import at_least_fp32


class Bands:
    """The last M keys of a query's bucket, at or before it, in each round."""

    def __init__(self, queries: Tensor, keys: Tensor, width: int):
        """Rank the keys inside their buckets. queries, keys: buckets, (H, R, L) int64. width: M."""
        self.queries, self.keys, self.width = queries, keys, width
        ordered, order = keys.sort(dim=-1, stable=True)
        rank = torch.arange(keys.shape[-1], device=keys.device) - torch.searchsorted(ordered, ordered)
        self.rank = torch.empty_like(keys).scatter_(-1, order, rank)

    def shown(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the visible keys of the queries `rows` per round, (H, R, T, keys) bool up to the last query, and the
        number of keys in the query's bucket at or before it, (H, R, T).
        """
        stop = int(rows[-1]) + 1
        positions = torch.arange(stop, device=rows.device)
        same = self.queries[..., rows, None] == self.keys[..., None, :stop]
        same &= positions <= rows[:, None]
        size = same.sum(-1)
        return same & (self.rank[..., None, :stop] >= size.unsqueeze(-1) - self.width), size


@torch.no_grad()
def seen_pairs(call: Call, queries: Tensor) -> Tensor:
    """Return the visible keys of queries (S,) int64 of one sequence in evaluation: (H or 1, S, L) bool.

    Raises ConfigError for a mechanism without a set of visible keys, such as YOSO.
    """
    mechanism, positions = call.mechanism, torch.arange(call.inputs.q.shape[2], device=queries.device)
    causal = positions <= queries[:, None]
    if isinstance(mechanism, FullAttention):
        return causal[None]
    if isinstance(mechanism, LocalAttention):
        near = queries[:, None] // mechanism.chunk - positions // mechanism.chunk <= 1
        return (causal & (near | (positions < mechanism.sinks)))[None]
    if isinstance(mechanism, TaughtSketch):
        return _chosen(mechanism, call, queries, causal)
    if isinstance(mechanism, BandAttention):
        of_queries, of_keys = mechanism.band_codes(call.inputs, 0, call.context)
        keys = (of_queries if of_keys is None else of_keys).long().masked_fill(positions < mechanism.sinks, -1)
        width = mechanism.window.chunk
        band = torch.zeros(1, *causal.shape, dtype=torch.bool, device=positions.device)
        for heads, own in zip(of_queries[0].long().split(1), keys[0].split(1), strict=True):
            visible = Bands(heads, own, width).shown(queries)[0].any(1)
            band = torch.cat([band, F.pad(visible, (0, len(positions) - visible.shape[-1]))])
        near = (queries[:, None] - positions < width) & mechanism.local
        mask = causal & (band[1:] | near | (positions < mechanism.sinks))
        if not mechanism.rule["exclude_self"]:
            return mask
        own = positions == queries[:, None]
        return (mask & ~own) | (own & ~(mask & ~own).any(-1, keepdim=True))
    name = type(mechanism).__name__
    raise ConfigError("attention", f"visible keys of {name} cannot be counted", "Choose another kind")


def _chosen(mechanism: TaughtSketch, call: Call, queries: Tensor, causal: Tensor) -> Tensor:
    """Return the keys that the sketches choose, the window and the sinks."""
    config, positions = mechanism.config, torch.arange(causal.shape[1], device=causal.device)
    near = (queries[:, None] // config.chunk - positions // config.chunk <= 1) & config.local
    sketches = mechanism.sketches(call.x, call.inputs, call.context)
    index = mechanism._choose(sketches, call.inputs, call.context)[0, :, queries].long()  # (sketches, S, K)
    mask = torch.zeros(*index.shape[:2], len(positions) + 1, dtype=torch.bool, device=causal.device)
    mask.scatter_(2, index.where(index >= 0, len(positions)), True)
    mask = mask[..., :-1] | causal & (near | (positions < config.sinks))
    return mask.repeat_interleave(call.inputs.q.shape[1] // len(mask), dim=0)


def scored_pairs(call: Call, queries: Tensor) -> float:
    """Return the pairs that a sketch scores to choose the keys of queries (S,), as a fraction of the visible pairs; of
    `ranked` with the N bucket scores of each query, without those that assign keys. Without a sketch 0; full attention
    scores all.
    """
    mechanism = call.mechanism
    if not isinstance(mechanism, RankedAttention):
        return float(isinstance(mechanism, TaughtSketch | FullAttention))
    q, k = mechanism.sketches(call.x, call.inputs, call.context)
    codes, scores = bucket_numbers(k[0]), mechanism.query_buckets(q, call.context)[0]
    probes = scores[:, queries].topk(mechanism.config.probes, dim=-1).indices
    sizes = F.one_hot(codes, mechanism.config.buckets).cumsum(1)[:, queries].gather(2, probes)  # (groups, S, P)
    members = sizes.clamp_max(mechanism.config.members or codes.shape[1])
    scored = members.sum((1, 2)) + mechanism.config.buckets * len(queries)
    return float((scored / (queries + 1).sum()).mean())


def best_pairs(weight: Tensor, queries: Tensor, count: int, window: int, sinks: int) -> Tensor:
    """Return the oracle's keys (H, S, L) bool: the last `window` keys, the sinks, and the `count` other keys of largest
    weight per head. weight: full attention (H, S, L).
    """
    positions = torch.arange(weight.shape[2], device=queries.device)
    causal = positions <= queries[:, None]
    near = causal & ((queries[:, None] - positions < window) | (positions < sinks))
    best = weight.masked_fill(near | ~causal, -1.0).topk(min(count, len(positions)), dim=-1).indices
    return torch.zeros_like(weight, dtype=torch.bool).scatter_(-1, best, True) & causal | near


def weights(call: Call, queries: Tensor) -> Tensor:
    """Return full attention of the call's queries and keys, (H, S, L) in at least fp32."""
    q, k = (at_least_fp32(x[0]) for x in call.inputs[:2])
    later = torch.arange(k.shape[1], device=k.device) > queries[:, None]
    return torch.softmax((q[:, queries] @ k.transpose(-1, -2) * call.scale).masked_fill(later, -torch.inf), dim=-1)
