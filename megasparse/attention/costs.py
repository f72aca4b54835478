"""Types in which a mechanism states its costs: FLOPs, bytes moved, and the pairs of queries and keys behind them.

H heads, L length, D head dim, M window, s bytes of a number in the model's dtype.
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
class Work:
    """FLOPs and bytes moved by one operator, a token."""

    flops: Passes
    moved: Passes


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


@dataclass(frozen=True)
class Traffic:
    """Bytes a token that the operators of some heads move; size: s.

    Each input is read once in every round that gathers it, each output is written once, and everything else stays on
    the chip. A kernel that recomputes, pads or reads again is slower than this by what these cost it.
    """

    heads: int
    head_dim: int
    size: int

    @property
    def row(self) -> float:
        """A vector of every head."""
        return float(self.heads * self.head_dim * self.size)

    @property
    def number(self) -> float:
        """A position or a softmax statistic of every head."""
        return 4.0 * self.heads

    @property
    def code(self) -> float:
        """A bucket of every head."""
        return 2.0 * self.heads

    def softmax(self, rounds: int, ordered: bool) -> Passes:
        """Forward: q, k, v and, if ordered, their order in each round; out and log-sum-exp once. Backward: dout too in
        each round; log-sum-exp, and out for out·dout, once; dq, dk, dv.
        """
        order = self.number if ordered else 0.0
        once = self.row + self.number
        return Passes(rounds * (3 * self.row + order) + once, rounds * (4 * self.row + order) + once + 3 * self.row)

    def merged(self, sources: int) -> Passes:
        """Outputs of so many softmaxes, written and read once more where they become one."""
        return Passes(sources * 2 * self.row, sources * 3 * self.row)

    def sinks(self, count: int) -> Passes:
        """A softmax over `count` tokens, whose numbers all heads share, merged with another one; 0 without sinks."""
        index = 4.0 * count
        return self.softmax(1, ordered=False) + Passes(index, index) + self.merged(2) if count else Passes()

    def sort(self, orders: int) -> Work:
        """Sorting of tokens by their codes."""
        return Work(Passes(), Passes(orders * (self.code + self.number)))
