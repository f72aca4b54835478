"""Settings of bucketed attention, and its tiles by rank."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

PLACES = 64
"""Shares start at multiples of this number of sorted indices, at which every kernel starts a block of queries."""
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
        longest: Maximum length, which with `buckets` determines the smallest tiles on a CPU and so the bits; None means
            the length of the input.
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
    T). T doubles with a, so that a bucket fills at least half of its tiles. smallest, tile: first and last T, powers of
    two. back: number of keys before a in the last tiles.
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


def split_codes(codes: Tensor | Codes | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the buckets of queries, None for a single bucket, and of keys, None if they are the same."""
    return codes if isinstance(codes, tuple) else (codes, None)
