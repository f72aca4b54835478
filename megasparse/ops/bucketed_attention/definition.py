"""Settings of bucketed attention, its tiles by rank, and its dense definition for tests.

The definition shares no code with the implementations: visibility follows from ranks inside buckets and from sorted
positions, pair by pair.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megasparse.ops.random import PairDropout

PLACES = 64
"""Shares start at multiples of this number of sorted indices, because every kernel starts a block of queries there."""
_SMALLEST_TILE = 8  # queries in a bucket's first tile if buckets are small


Codes = tuple[Tensor, Tensor | None]
"""Buckets of queries and of keys, (B, H, R, L) each, any integer type; None if keys share the queries' codes."""


@dataclass(frozen=True)
class Window:
    """Rule that selects a query's keys after tokens are sorted by bucket (`top_k`: see cluster_attention.py).

    Args:
        kind: `band`, the last M tokens of the query's bucket, without a causal mask also the next M − 1; or `chunk`,
            the query's chunk of M sorted tokens and the previous chunk (Reformer Eq. 5). Later tokens move borders.
        chunk: M, in tokens.
        same_bucket: Hide tokens of other buckets.
        ahead: Include the chunk after the query's.
    """

    kind: Literal["band", "chunk"]
    chunk: int
    same_bucket: bool = True
    ahead: bool = False

    def __post_init__(self) -> None:
        assert self.kind == "chunk" or self.same_bucket, "a band is causal only with the same-bucket mask"
        assert self.kind == "chunk" or not self.ahead, "a band is two-sided if attention is not causal"

    @property
    def width(self) -> int:
        """Number of slots that a window spans, see layouts.py."""
        return self.chunk if self.kind == "band" else 2

    def two_sided(self, causal: bool) -> bool:
        return not causal if self.kind == "band" else self.ahead


@dataclass(frozen=True)
class BucketedAttentionSpec:
    """Settings of bucketed attention.

    Args:
        window: Window of visible tokens.
        causal: Only keys at or before the query are visible.
        scale: Factor of q·k.
        exclude_self: A token attends to itself only if no other key is visible.
        count_rounds: Include a key that is visible in N rounds once instead of N times.
        buckets: Exclusive upper bound of all codes, or None; it saves passes of the sort.
        longest: Maximum length, which with `buckets` determines the smallest tiles on a CPU, so that results of shorter
            sequences are bit-identical; None means the length of the input.
        self_at_last: A query without a visible key attends to itself, even if hidden from itself; otherwise its output
            is 0 and its log-sum-exp −∞, for a merge with other keys.
        pair_shard: (g, G): only queries in the g-th of G parts of every round's sorted order attend (on a CPU with key
            codes, of the positions); others get 0 and −∞. Merging all parts gives the full result.
    """

    window: Window
    causal: bool
    scale: float = 1.0
    exclude_self: bool = True
    count_rounds: bool = True
    buckets: int | None = None
    longest: int | None = None
    self_at_last: bool = True
    pair_shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert self.pair_shard is None or not self.self_at_last, (
            "queries without a visible key are known only after merging all shards"
        )

    def places(self, length: int) -> range:
        """Return the sorted indices of the queries that attend."""
        shard, shards = self.pair_shard or (0, 1)
        size = -(-length // (PLACES * shards)) * PLACES
        return range(min(shard * size, length), min((shard + 1) * size, length))


class RankedTiles(NamedTuple):
    """Tiles by rank: queries whose last visible rank in a bucket is in [a, a + T), with keys of ranks [a − back, a +
    T). T doubles with a, so that a bucket fills at least half of its tiles. Tiles depend only on ranks and settings.

    smallest, tile: First and last T, powers of two. back: Number of keys before a in the last tiles.
    """

    smallest: int
    tile: int
    back: int

    @classmethod
    def of(cls, spec: BucketedAttentionSpec, length: int) -> "RankedTiles":
        chunk = spec.window.chunk
        tile = min(max(_SMALLEST_TILE, 1 << (chunk.bit_length() - 1)), 32 if chunk <= 64 else 64)
        mean = (spec.longest or length) // (spec.buckets or 1)  # mean number of tokens per bucket
        smallest = min(max(_SMALLEST_TILE, 1 << mean.bit_length() >> 1), tile)
        return cls(smallest, tile, -(-(chunk - 1) // 8) * 8)

    def start(self, rank: Tensor) -> Tensor:
        """Return a for each rank, int64; 0 for negative ranks."""
        small = torch.arange(self.tile, device=rank.device)
        small = torch.where(small < self.smallest, 0, 2 ** small.clamp_min(1).log2().long())
        return torch.where(rank < self.tile, small.take(rank.long().clamp(0, self.tile - 1)), rank & -self.tile)

    def kind(self, start: Tensor) -> Tensor:
        """Return the first a with the same tile shape."""
        return start.clamp_max(-(-self.back // self.tile) * self.tile)

    def shape(self, kind: int) -> tuple[int, int]:
        """Return T and the number of keys before a."""
        return self.tile if kind >= self.tile else max(kind, self.smallest), min(kind, self.back)


def visible(
    codes: Tensor,
    window: Window,
    causal: bool,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    key_codes: Tensor | None = None,
) -> Tensor:
    """Return (B, H, R, L, L) bool, True if key j (last) is visible to query i in round r, including i = j."""
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
        rank = (same & earlier).sum(-1)  # number of tokens in i's bucket at or before i
        shown = same & ((rank[..., :, None] - rank[..., None, :]).abs() < window.chunk)
        return shown & earlier if causal else shown
    # Sorted position: number of preceding real tokens in the order (document, bucket, position).
    key = (document[:, None, None].expand_as(codes), codes, position.expand_as(codes))
    before = torch.zeros_like(together)
    for part in reversed(key):
        left = part[..., None, :]
        right = part[..., :, None]
        before = (left < right) | ((left == right) & before)
    chunk = (before & real[:, None, None, None, :]).sum(-1) // window.chunk
    distance = chunk[..., :, None] - chunk[..., None, :]
    shown = (distance == 0) | (distance == 1)
    if window.ahead:
        shown = shown | (distance == -1)
    shown = shown & (same if window.same_bucket else together)
    return shown & earlier if causal else shown


def _visible_by_key_rank(codes: Tensor, key_codes: Tensor, chunk: int, causal: bool, together: Tensor) -> Tensor:
    """Return pairs of a query with the last M keys of its bucket at or before it and, if not causal, the next M."""
    position = torch.arange(codes.shape[-1], device=codes.device)
    between = (position[:, None] < position[None, :])[None]  # [j, j']: j before j'
    same = (codes[..., :, None] == key_codes[..., None, :]) & together
    shown = torch.zeros_like(same)
    for i in range(codes.shape[-1]):
        in_bucket = same[..., i, :]  # (B, H, R, L)
        back = in_bucket & (position <= i)
        ahead = in_bucket & (position > i)
        closer = (back[..., None, :] & between).sum(-1)  # keys of the bucket after j, up to i
        shown[..., i, :] = back & (closer < chunk)
        if not causal:
            closer = (ahead[..., None, :] & between.transpose(-1, -2)).sum(-1)
            shown[..., i, :] |= ahead & (closer < chunk)
    return shown


def _in_shard(codes: Tensor, spec: BucketedAttentionSpec, key_mask: Tensor | None, segments: Tensor | None) -> Tensor:
    """Return (B, H, R, L) bool, True for queries in the shard of the order by (document, bucket, position)."""
    order = codes.argsort(dim=-1, stable=True)
    for mask in (segments, None if key_mask is None else ~key_mask):
        if mask is not None:
            first = mask[:, None, None].expand_as(codes).gather(-1, order).to(torch.int64)
            order = order.gather(-1, first.argsort(dim=-1, stable=True))
    places = spec.places(codes.shape[-1])
    rank_in_order = order.argsort(-1)
    return (rank_in_order >= places.start) & (rank_in_order < places.stop)


def split_codes(codes: Tensor | Codes | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the buckets of queries, None for a single bucket, and the buckets of keys, None if they are the same."""
    return codes if isinstance(codes, tuple) else (codes, None)


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | Codes | None,
    spec: BucketedAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    *,
    dropout: PairDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `bucketed_attention` densely."""
    length = q.shape[2]
    of_queries, key_codes = split_codes(codes)
    if of_queries is None:
        of_queries = torch.zeros(*q.shape[:2], 1, length, dtype=torch.int64, device=q.device)
    shown = visible(of_queries, spec.window, spec.causal, key_mask, segments, key_codes)
    if spec.exclude_self:
        shown = shown & ~torch.eye(length, dtype=torch.bool, device=q.device)
    counts = shown.sum(2)  # (B, H, L, L)
    score = (q * spec.scale) @ k.transpose(-1, -2)  # (B, H, L, L)
    if spec.pair_shard is None:
        weight = (counts > 0).to(q.dtype).log() if spec.count_rounds else counts.to(q.dtype).log()
    else:  # a shard's weight of a pair is (its rounds that select the pair)/N
        in_shard = (shown & _in_shard(of_queries, spec, key_mask, segments)[..., None]).sum(2)
        weight = (in_shard.to(q.dtype) / counts.clamp_min(1) if spec.count_rounds else in_shard.to(q.dtype)).log()
        counts = in_shard
    logits = score + weight
    real = torch.ones_like(q[:, :1, :, 0], dtype=torch.bool) if key_mask is None else key_mask[:, None]
    if spec.self_at_last and (spec.exclude_self or key_codes is not None):
        self_only = (counts.sum(-1) == 0) & real
        itself = torch.eye(length, dtype=torch.bool, device=q.device) & self_only[..., None]
        logits = torch.where(itself, score, logits)
    no_visible_key = (logits == -torch.inf).all(-1)  # padding: avoid NaN gradients of a softmax over −∞
    probability = torch.softmax(logits.masked_fill(no_visible_key[..., None], 0.0), dim=-1)
    lse = torch.logsumexp(logits.masked_fill(no_visible_key[..., None], 0.0), dim=-1)
    if dropout is not None:
        probability = probability * dropout.dense(length, q.dtype)
    return (probability @ v).masked_fill(no_visible_key[..., None], 0.0), lse.masked_fill(no_visible_key, -torch.inf)
