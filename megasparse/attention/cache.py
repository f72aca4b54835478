"""Decoding state of mechanisms: keys and values of earlier tokens, and positions among the tokens of a cache."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megasparse.attention.spec import MechanismSpec

R = TypeVar("R")


@dataclass
class Cache:
    """Decoding state: tensors whose first dimension is the batch, and nested caches. Others do not depend on it."""

    def count_bytes(self) -> int:
        """Return the bytes of the tensors."""
        parts = vars(self).values()
        return sum(
            x.nbytes if isinstance(x, Tensor) else x.count_bytes() for x in parts if isinstance(x, Tensor | Cache)
        )

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, (n,) indices into the batch; repeats allowed. In place."""
        for name, x in vars(self).items():
            if isinstance(x, Cache):
                x.select(rows)
            elif isinstance(x, Tensor):
                setattr(self, name, x[rows])


@dataclass
class KeyValueCache(Cache):
    """Keys and values (B, H, capacity, D) of the tokens before the current position; later slots are unused."""

    k: Tensor
    v: Tensor

    @staticmethod
    def empty(batch: int, spec: MechanismSpec, capacity: int, like: Tensor) -> "KeyValueCache":
        return KeyValueCache(*(like.new_zeros(batch, spec.heads, capacity, spec.head_dim) for _ in range(2)))

    def put(self, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Store the tokens from position `first` on: (B, H, n, D) each."""
        self.k[:, :, first : first + k.shape[2]] = k
        self.v[:, :, first : first + v.shape[2]] = v


@dataclass(frozen=True)
class CachedTokens:
    """Tokens of a KV cache, of which the newest `number` are queries. rank: (B or 1, L), index of a token among the
    real ones. order: (B or 1, L), tokens by rank. real: (B, L) bool, or None if all are.
    """

    number: int
    rank: Tensor
    order: Tensor
    real: Tensor | None
    _values: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: tuple[object, ...], compute: Callable[[], R]) -> R:
        """Return a value that several layers share, computed by the first one."""
        if key not in self._values:
            self._values[key] = compute()
        return cast(R, self._values[key])

    @staticmethod
    def of(length: int, number: int, real: Tensor | None, device: torch.device) -> "CachedTokens":
        if real is None:
            position = torch.arange(length, device=device)[None]
            return CachedTokens(number, position, position, None)
        order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        return CachedTokens(number, real.cumsum(1) - 1, order, real)

    def at(self, ranks: Tensor) -> Tensor:
        """Return the tokens of ranks (B or 1, n, m), −1 for negative ranks."""
        if self.real is None:
            return ranks
        tokens = self.order.gather(1, ranks.clamp_min(0).flatten(1)).view(ranks.shape)
        return tokens.masked_fill(ranks < 0, -1)

    def window_and_sinks(self, chunk: int | None, sinks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens in each query's chunk and the previous chunk, and the first tokens, (B or 1, 1, n, m) each,
        −1 in empty slots; and the rank of the first token of these chunks, (B or 1, 1, n, 1).
        """

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            rank = self.rank[:, -self.number :, None]
            start = rank + 1
            numbers = torch.arange(sinks, device=rank.device)
            window = rank[..., :0]
            if chunk is not None:
                start = (rank // chunk - 1).clamp_min(0) * chunk
                window = start + torch.arange(2 * chunk, device=rank.device)
                window = window.masked_fill(window > rank, -1)
            first = numbers.masked_fill(numbers >= start, -1)
            return self.at(window)[:, None], self.at(first)[:, None], start[:, None]

        return self.once(("window", chunk, sinks), compute)
