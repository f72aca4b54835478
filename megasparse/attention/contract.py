"""What an attention mechanism is. B batch, L length, H heads, D head dim, E width of the layer's input."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from megasparse.ops.random import Draws


class Heads(NamedTuple):
    """Queries, keys and values of one layer. q: (B, H, Lq, D). k, v: (B, H, Lk, D); with shared QK, k is q/|q|.

    key_mask: (B, Lk) bool, true for real tokens, or None. segments: (B, L) document numbers, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    segments: Tensor | None
    causal: bool


class AttentionOutput(NamedTuple):
    """out: (B, H, Lq, D). auxiliary_loss: scalar to minimise with the task's, or None. statistics: name -> detached
    scalar.
    """

    out: Tensor
    auxiliary_loss: Tensor | None
    statistics: dict[str, Tensor]


class Memory:
    """What a layer's forward decided and its recomputation must not decide again.

    A reversible backward rebuilds the layer's input only up to the last bits, so a hash of it can flip: the first pass
    records the codes, the recomputation replays them. It belongs to one forward pass (to its autograd context), never
    to a module.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._next: int | None = None

    def keep(self, decide: Callable[[], Any]) -> Any:
        """`decide()` the first time, the same value in the replay."""
        if self._next is None:
            self._kept.append(decide())
            return self._kept[-1]
        self._next += 1
        return self._kept[self._next - 1]

    def replay(self) -> None:
        self._next = 0


@dataclass
class AttentionContext:
    """Where a call stands: the layer, the global number of its first head, and what its draws depend on."""

    layer: int
    draws: Draws
    head_offset: int = 0
    memory: Memory = field(default_factory=Memory)


class Attention(nn.Module, ABC):
    """One mechanism over some heads of a layer.

    Strictly causal (`leak` is None): with heads.causal, replacing tokens from t on changes no output before t.
    """

    shared_qk: bool = False
    leak: str | None = None
    """Why a later token can move an earlier output, for a mechanism that keeps a paper's leaking window; else None."""

    @abstractmethod
    def forward(self, x: Tensor, heads: Heads, context: AttentionContext) -> AttentionOutput:
        """x: (B, L, E), the layer's input, which learned hashes and sketches read."""

    @abstractmethod
    def new_cache(self, batch: int, heads: int, head_dim: int, like: Tensor, rounds: int | None) -> Any:
        """An empty decoding cache on the device and in the dtype of `like`."""

    @abstractmethod
    def fill_cache(self, heads: Heads, cache: Any, context: AttentionContext) -> None:
        """Takes a whole prompt into an empty cache."""

    @abstractmethod
    def decode(self, heads: Heads, cache: Any, position: int, context: AttentionContext) -> Tensor:
        """The output (B, H, 1, D) of the one new token at `position`, which is taken into the cache."""
