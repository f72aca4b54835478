"""Hash, then rank: buckets find candidate keys, a sketch ranks them, exact softmax attention reads the best.

Learned hashes as in LHA propose, a narrow sketch as in Smart Bird scores, and the K best keys enter one softmax with a
window and sinks. P probes, M newest members per bucket, T queries per tile, C candidates per query.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, AttentionInputs, MechanismSpec
from megasparse.attention.far_attention import SAMPLES, imbalance
from megasparse.attention.flops import Flops
from megasparse.attention.taught_sketch import SketchSection, TaughtSketch, repeated_masks
from megasparse.config.attention import mechanism
from megasparse.config.schema import ModelConfig
from megasparse.config.section import Positive
from megasparse.errors import ConfigError
from megasparse.ops.operator import counted, without_autocast
from megasparse.ops.sketch import gathered_products, rounded_ranks

_TILE = {"cpu": 1 << 14, "cuda": 1 << 23}
"""Candidates of a tile of queries; on a CPU their vectors fit its cache."""
_BEST = 128
"""Keys of each sampled query that its buckets learn to contain."""
_CODES = 256
"""Bf16 represents integers up to this one, so a bucket's number is stored as two."""
_GAIN = 4.0
"""Factor of the bucket scores: their weights learn as fast as the sketch's by the same steps of Adam."""


class RankedAttentionConfig(SketchSection):
    keys: Positive = 128
    """K, best keys of each query. Those in the window or the sinks are included once."""
    sketch_dim: Positive = 32
    """Width d of the sketch that ranks the candidates."""
    buckets: Annotated[Positive, Field(le=_CODES**2)] = 64
    """N, buckets of keys."""
    probes: Positive = 8
    """P, buckets that a query searches. P/N of the pairs are scored if buckets are equally large; queries prefer large
    ones, so learned buckets score up to twice as many."""
    members: Positive | None = None
    """M, newest keys of each bucket that a query scores; null for all. With a bound, work per query is constant."""
    local: bool = True
    """Attend to a window, too: the token's own chunk of positions and the chunk before it, in an encoder also the chunk
    after it. Each key is included once."""

    def check(self, key: str, model: "ModelConfig") -> None:
        if self.probes > self.buckets:
            problem = f"{self.probes} is more than the {self.buckets} buckets"
            raise ConfigError(f"{key}.probes", problem, "Set it to at most buckets")
        super().check(key, model)


@mechanism("ranked", RankedAttentionConfig)
class RankedAttention(TaughtSketch):
    """Softmax attention to the K best of the keys in a query's P buckets, ranked by a sketch.

    With q′ = W_q·q and k′ = W_k·k, of the heads that share a sketch: a key is in bucket argmax_b (c_b·k′ + γ_b). A
    query searches the P buckets with the largest e_b·q′ + ε_b, and reads the K keys in them with the largest q′·k′/√d,
    earlier positions first among equals. Only keys at or before the query take part, so the choice is strictly causal.

    Two losses train it: the divergence of the sketch from the heads' full attention, and `bucket_loss`.
    """

    # With larger weights one bucket gets almost all probability, so gradients vanish.
    initial_deviations = dict.fromkeys(("query_buckets.weight", "key_buckets.weight"), 0.02)

    def __init__(self, config: RankedAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.index_width += 2
        self.query_buckets, self.key_buckets = (
            BucketScores(self.groups, config.sketch_dim, config.buckets) for _ in range(2)
        )

    def teaching_rate(self, parameter: str, progress: float = 0.0) -> float | None:
        """Return a falling rate of buckets, which follow a sketch that changes."""
        return 1e-2 * (1 - 0.9 * progress) if "buckets" in parameter else super().teaching_rate(parameter)

    def sketches(
        self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, exactly: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Append the key's bucket // 256 and % 256 to the d numbers of exact keys."""
        q, k = super().sketches(x, inputs, context, exactly)
        if not exactly:
            return q, k
        codes = self.key_buckets(self.unpacked(k), context).argmax(-1, keepdim=True)
        return q, torch.cat([k, codes // _CODES, codes % _CODES], dim=-1)

    def _sketch_loss(
        self, q: Tensor, k: Tensor, shares: Tensor, far: Tensor, real: Sequence[Any], context: AttentionContext
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, statistics = super()._sketch_loss(q, k, shares, far, real, context)
        least = shares.topk(min(_BEST, k.shape[2]), dim=-1).values[..., -1:]
        scores = self.query_buckets(q.detach(), context), self.key_buckets(k.detach(), context)
        missed = bucket_loss(*scores, shares.where(shares >= least, 0.0), real)
        return loss + missed, {**statistics, "bucket_loss": missed.detach()}

    @torch.no_grad()
    def _choose(
        self, sketches: tuple[Tensor, Tensor], inputs: AttentionInputs, context: AttentionContext, first_query: int = 0
    ) -> Tensor:
        config = self.config
        count = sketches[0].shape[1]
        probes = self.query_buckets(sketches[0], context).topk(config.probes, dim=-1).indices.flatten(0, 1)
        q, k = (x.flatten(0, 1) for x in sketches)  # (B·S, Lq or L, d or d + 2)
        codes = bucket_numbers(k)
        k = self.unpacked(k[..., :-2])
        spec = RankingSpec(config.buckets, config.members, config.keys, inputs.causal)
        chosen = ranked_keys(q, k, probes, codes, spec, *repeated_masks(inputs, count), first_query)
        return chosen.unflatten(0, (-1, count))

    def _sketch_flops(self, length: int, visible: float) -> Flops:
        """Count the scores of candidates instead of all keys, and of the buckets; in training also of the buckets of
        samples, and their cross-entropy with all keys.
        """
        config = self.config
        sampled = min(SAMPLES, length) / length
        candidates = mean_candidates(visible, length, config.probes, config.buckets, config.members)
        learned = config.buckets * (config.sketch_dim * (1 + sampled) + visible * sampled)
        scores = config.sketch_dim * (candidates - visible + 2 * config.buckets)
        return super()._sketch_flops(length, visible) + Flops(scores + learned, learned) * (2.0 * self.groups)


def bucket_numbers(k: Tensor) -> Tensor:
    """Return the buckets (...) int64 of indexed keys (..., d + 2), see `RankedAttention.sketches`."""
    high, low = k[..., -2:].long().unbind(-1)
    return high * _CODES + low


class BucketScores(nn.Module):
    """Linear scores of N buckets for each group of heads, of sketched vectors of width d."""

    def __init__(self, groups: int, width: int, buckets: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups * buckets, width))
        self.bias = nn.Parameter(torch.zeros(groups * buckets))

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Score the buckets of x (B, groups here, L, d): (B, groups, L, N)."""
        weight, bias = (
            context.part.local_part(part, 0).unflatten(0, (x.shape[1], -1)).to(x.dtype)
            for part in (self.weight, self.bias)
        )
        return _GAIN * (x @ weight.mT + bias.unsqueeze(1))


def bucket_loss(query_scores: Tensor, key_scores: Tensor, shares: Tensor, real: Sequence[Any]) -> Tensor:
    """Return −Σ_ij a_ij Σ_b P'_j(b)·log P_i(b) / Σ_ij a_ij, the cross-entropy of a query's softmax P over buckets with
    the buckets P' of its keys, plus, per group, the divergence of the mean P from the uniform distribution and,
    with twice the weight, of P'. Mean over groups, scalar.

    Unlike `collision_loss`, it is not small already if the query meets one of its keys.

    Args:
        query_scores: (B, G, S, N), scores of sampled queries.
        key_scores: (B, G, L, N).
        shares: (B, G, S, L), attention a_ij.
        real: (B, S) and (B, L) bool, real queries and keys, or None if no token is padding.
    """
    of_query = torch.log_softmax(query_scores, dim=-1)
    of_key = torch.softmax(key_scores, dim=-1)
    total = shares.sum((0, 2, 3), keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
    missed = -((shares / total).to(of_key.dtype) @ of_key * of_query).sum((0, 2, 3))
    uneven = imbalance(of_query.exp(), real[0]) + 2 * imbalance(of_key, real[1])
    return (missed + uneven).mean()


@dataclass(frozen=True)
class RankingSpec:
    """Settings of `ranked_keys`. buckets: N. members: M, the newest keys of a bucket that a query scores; None for all.
    count: K.
    """

    buckets: int
    members: int | None
    count: int
    causal: bool


@without_autocast
@torch.no_grad()
def ranked_keys(
    q: Tensor, k: Tensor, probes: Tensor, codes: Tensor, spec: RankingSpec, key_mask: Tensor | None = None,
    segments: Tensor | None = None, first_query: int = 0,
) -> Tensor:  # fmt: skip
    """Choose for each query the K keys with the largest q·k/√d among those in its buckets.

    Products are rounded to multiples of 1/256 and earlier positions come first among equals, as in
    `ops.sketch.chosen_keys`.

    Args:
        q: (B, Lq, d), queries from position `first_query` on.
        k: (B, L, d).
        probes: (B, Lq, P) int64, the buckets that each query searches.
        codes: (B, L) int64, the bucket of each key.
        spec: N, M, K and causality.
        key_mask: (B, L) bool, true for real tokens.
        segments: (B, L) document numbers; documents never attend to each other.

    Returns:
        (B, Lq, K) int32 positions, best first; the query's own if its buckets contain no key; −1 if fewer than K keys
        take part.
    """
    batch, queries, width = q.shape
    length = k.shape[1]
    device = q.device
    buckets = spec.buckets
    chosen = torch.full((batch * queries, spec.count), -1, dtype=torch.int32, device=device)
    if segments is not None and not q.is_meta:  # a bucket per document
        of_queries = segments[:, first_query : first_query + queries, None]
        codes = codes + buckets * segments
        probes = probes + buckets * of_queries
        buckets *= 1 + int(segments.max())
    if key_mask is not None:
        codes = codes.masked_fill(~key_mask, buckets)
    order = codes.argsort(dim=1, stable=True)  # by bucket, then by position
    slots = codes.gather(1, order) * length + order  # (B, L), ascending
    positions = first_query + torch.arange(queries, device=device)
    ends = (positions + 1).unsqueeze(-1) if spec.causal else length
    first, last = (torch.searchsorted(slots, (probes * length + end).flatten(1)).view_as(probes) for end in (0, ends))
    if spec.members is not None:
        first = torch.maximum(first, last - spec.members)
    sums = (last - first).cumsum(-1)  # (B, Lq, P)
    by_number = sums[..., -1].flatten().argsort()  # tiles of queries with about equally many candidates
    sums, starts = (x.flatten(0, 1)[by_number] for x in (sums, last - sums))
    q = q.flatten(0, 1)[by_number]  # (B·Lq, d)
    k = k.flatten(0, 1)  # (B·L, d)
    order = order.flatten()
    for tile, most, times in _tiles(sums, spec, length, queries, first_query):
        with counted(times):
            rows = by_number[tile]
            total = sums[tile]
            offset = (rows // queries * length).unsqueeze(-1)  # of the query's sequence
            number = torch.arange(most, device=device).expand(len(tile), -1).contiguous()
            probe = torch.searchsorted(total, number, right=True).clamp_max_(total.shape[-1] - 1)
            hidden = number >= total[:, -1:]
            slot = number + starts[tile].gather(1, probe)
            key = order[slot.clamp_max_(length - 1) + offset]  # (T, C)
            ranks = rounded_ranks(gathered_products(q[tile], k, key + offset), width, key)
            best, rank = ranks.masked_fill_(hidden, -torch.inf).topk(min(spec.count, ranks.shape[-1]), dim=-1)
            tokens = key.gather(1, rank).masked_fill(best == -torch.inf, -1)
            chosen[rows, : tokens.shape[-1]] = tokens.to(torch.int32)
    chosen = chosen.unflatten(0, (batch, queries))  # (B, Lq, K)
    chosen[..., 0] = torch.where(chosen[..., 0] < 0, positions, chosen[..., 0])
    return chosen if key_mask is None else chosen.masked_fill(~key_mask[:, positions, None], -1)


def _tiles(
    sums: Tensor, spec: RankingSpec, length: int, queries: int, first_query: int
) -> Iterator[tuple[Tensor, int, float]]:
    """Yield the rows of `sums` (B·Lq, P) in each tile, their largest number of candidates, and 1. Values decide the
    sizes, which meta tensors lack: of these yield the first of equal tiles, and their number.
    """
    rows = torch.arange(len(sums), device=sums.device)
    if not sums.is_meta:
        for tile in rows.split(max(1, _TILE[sums.device.type] // max(1, int(sums.max())))):
            yield tile, max(1, int(sums[tile].max())), 1.0
        return
    visible = first_query + (queries + 1) / 2 if spec.causal else length
    most = math.ceil(mean_candidates(visible, length, sums.shape[-1], spec.buckets, spec.members))
    tile = rows[: max(1, _TILE["cuda"] // most)]
    yield tile, most, len(rows) / len(tile)


def mean_candidates(visible: float, length: int, probes: int, buckets: int, members: int | None) -> float:
    """Return the assumed mean number of a query's candidates, 2·P/N of the visible keys, as learned buckets are
    unequal, or M per bucket.
    """
    return min(visible, 2 * visible * probes / buckets, probes * (members or length))
