"""Types in which a mechanism states its FLOPs: those of passes, and the pairs of queries and keys behind them.

H heads, L length, D head dim, M window.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Passes:
    """An amount of work in a forward pass and in its backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __sub__(self, other: "Passes") -> "Passes":
        return self + other * -1.0

    def __mul__(self, times: float) -> "Passes":
        return Passes(self.forward * times, self.backward * times)


def product(operations: float) -> Passes:
    """FLOPs of a matrix product that takes so many operations forward; its two gradients take as many each."""
    return Passes(operations, 2 * operations)


@dataclass(frozen=True)
class Workload:
    """The heads of one mechanism in a layer, at a sequence length."""

    heads: int
    head_dim: int
    causal: bool
    length: int

    @property
    def visible(self) -> float:
        """Mean number of keys that a query may see."""
        return (self.length + 1) / 2 if self.causal else self.length

    def pairs(self, keys: float) -> Passes:
        """FLOPs of scores and values: 12·H·D·(keys a query sees), 4 of them forward."""
        return product(4.0 * self.heads * self.head_dim * min(keys, self.visible))

    def band(self, window: int, shared_codes: bool) -> float:
        """Keys in a band: the last M of the bucket. Both ways M − 1 more where queries and keys share codes, else M."""
        return window if self.causal else 2 * window - shared_codes

    def chunks(self, chunk: int) -> float:
        """Mean number of keys in a query's own chunk and the one before; both ways in the one after too."""
        full, rest = divmod(self.length, chunk)
        own = full * chunk * chunk + rest * rest
        before = chunk * max(0, self.length - chunk)
        if self.causal:
            return ((own + self.length) / 2 + before) / self.length
        return (own + 2 * before) / self.length

    def beyond(self, chunk: int, sinks: int) -> float:
        """Mean number of sinks that a query sees beside those in its own chunk and its neighbours."""
        return sinks * max(0, self.length - 2 * chunk) / self.length

    def clusters(self, count: int, size: int) -> float:
        """Mean number of keys a query sees in `count` clusters of `size` queries and keys each."""
        size = min(size, self.length)
        return count * size * ((size + 1) / 2 if self.causal else size) / self.length
