"""Settings of bucketed attention that are not tensors. M: the window's chunk."""

from dataclasses import dataclass
from typing import Literal

PLACES = 64
"""A share begins at a multiple of so many sorted places, where every kernel begins a block of queries."""


@dataclass(frozen=True)
class Window:
    """Tokens near a query in sorted order that it may see.

    kind: `band`, the last M tokens of the query's bucket (and, where attention is not causal, the next M − 1), or
    `chunk`, the query's chunk of M sorted tokens and the one before it (Reformer Eq. 5; its borders depend on later
    tokens). chunk: M, in tokens. same_bucket: tokens of other buckets are hidden. ahead: a query also sees the chunk
    after its own.
    """

    kind: Literal["band", "chunk"]
    chunk: int
    same_bucket: bool = True
    ahead: bool = False

    def __post_init__(self) -> None:
        assert self.kind == "chunk" or self.same_bucket, "a band is causal only with the same-bucket mask"
        assert self.kind == "chunk" or not self.ahead, "a band is two-sided where attention is not causal"

    @property
    def width(self) -> int:
        """The number of slots that a window spans, see layout.py."""
        return self.chunk if self.kind == "band" else 2

    def two_sided(self, causal: bool) -> bool:
        return not causal if self.kind == "band" else self.ahead


@dataclass(frozen=True)
class BucketedAttentionSpec:
    """Settings of bucketed attention.

    causal: only keys at or before the query are visible. scale: factor of q·k. exclude_self: a token sees itself only
    when it sees nothing else. count_rounds: a key visible in N rounds counts once, else N times. buckets: a number that
    all codes are below, or None; it saves passes of the sort. self_at_last: a token that sees nothing else sees itself,
    where exclude_self or key codes of their own leave it alone; else its output is 0 and its log-sum-exp −∞, for a
    merge with other keys.
    share: (g, G), only the queries of the g-th of G parts of every round's sorted order attend, or of the positions,
    where keys have codes of their own on a CPU; the others get 0 and −∞. All parts merged are the whole.
    """

    window: Window
    causal: bool
    scale: float = 1.0
    exclude_self: bool = True
    count_rounds: bool = True
    buckets: int | None = None
    self_at_last: bool = True
    share: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert self.share is None or not self.self_at_last, "who sees nothing is known when shares are merged"

    def places(self, length: int) -> range:
        """The sorted places of the queries that attend."""
        number, shares = self.share or (0, 1)
        each = -(-length // (PLACES * shares)) * PLACES
        return range(min(number * each, length), min((number + 1) * each, length))
