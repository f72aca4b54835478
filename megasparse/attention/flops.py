"""FLOPs of a mechanism, by formula."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    """Amount of work in a forward pass and in its backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> "Flops":
        return Flops(self.forward * times, self.backward * times)


def product(operations: float) -> Flops:
    """Return the FLOPs of a matrix product: `operations` forward, and as many for each of its two gradients."""
    return Flops(operations, 2 * operations)


@dataclass(frozen=True)
class Workload:
    """Heads of one mechanism in a layer, at a sequence length."""

    heads: int
    head_dim: int
    causal: bool
    length: int

    @property
    def visible(self) -> float:
        """Mean number of visible keys per query."""
        return (self.length + 1) / 2 if self.causal else self.length

    def pairs(self, keys: float) -> Flops:
        """Return the FLOPs of scores and values: 12·H·D·(keys per query), of which 4·H·D·keys forward."""
        return product(4.0 * self.heads * self.head_dim * min(keys, self.visible))

    def band(self, window: int, shared_codes: bool) -> float:
        """Return the keys per query in a band: the bucket's last M; bidirectional, M − 1 (shared codes) or M more."""
        return window if self.causal else 2 * window - shared_codes

    def chunks(self, chunk: int) -> float:
        """Mean number of keys in a query's chunk and the previous chunk; bidirectional, also in the next chunk."""
        full, rest = divmod(self.length, chunk)
        inside = full * chunk * chunk + rest * rest
        before = chunk * max(0, self.length - chunk)
        if self.causal:
            return ((inside + self.length) / 2 + before) / self.length
        return (inside + 2 * before) / self.length

    def beyond(self, chunk: int, sinks: int) -> float:
        """Mean number of visible sinks outside a query's chunk and the neighbouring chunks."""
        return sinks * max(0, self.length - 2 * chunk) / self.length

    def clusters(self, count: int, size: int) -> float:
        """Mean number of keys per query in `count` clusters of `size` queries and keys each."""
        size = min(size, self.length)
        return count * size * ((size + 1) / 2 if self.causal else size) / self.length
