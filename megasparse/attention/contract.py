"""What an attention mechanism is. B batch, L length, H heads, D head dim, E width of the layer's input."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.ops.autocast import without_autocast
from megasparse.ops.random import RngContext


class AttentionInputs(NamedTuple):
    """Queries, keys and values of one layer. q: (B, H, Lq, D). k, v: (B, H, Lk, D); with shared QK, k is q/|q|.

    key_mask: (B, Lk) bool, true for real tokens, or None. segments: (B, L) document numbers, or None.
    Where ranks share sequences: whole ones, of this rank's heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    segments: Tensor | None
    causal: bool

    def of_one_dtype(self) -> "AttentionInputs":
        """With k and v in the dtype of q; torch.autocast leaves some in bf16 and some in fp32."""
        return self._replace(k=self.k.to(self.q.dtype), v=self.v.to(self.q.dtype))


class AttentionOutput(NamedTuple):
    """out: (B, H, Lq, D). auxiliary_loss: scalar to minimise with the task's, or None. statistics: name -> detached
    scalar.
    """

    out: Tensor
    auxiliary_loss: Tensor | None
    statistics: dict[str, Tensor]


class RecomputeCache:
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


class Targets(NamedTuple):
    """What a training step asks the model to tell, for mechanisms that learn from it themselves (Smart Bird's sketch).

    values: int64, (B, L) a token for each position, (B,) a label for each sequence, or, with `answer`, (B, T) the
    tokens that another stack tells of each sequence. counted: bool, the values that count, or None for all.
    """

    values: Tensor
    counted: Tensor | None
    answer: bool = False


@dataclass
class AttentionContext:
    """Where a call stands: the layer, the global number of its first head, and what its draws depend on.

    targets: in training only, else None; of the tokens that are here. part: of the sequences, and of the mechanism's
    heads, that are here. What the mechanism has a head, a parameter or a buffer, it takes by `part.own`.
    """

    layer: int
    rng: RngContext
    head_offset: int = 0
    recompute: RecomputeCache = field(default_factory=RecomputeCache)
    targets: Targets | None = None
    part: SequencePart = WHOLE


@dataclass(frozen=True)
class MechanismSpec:
    """Where a mechanism stands in a model: what it is built for."""

    heads: int
    """Its own heads, which may be a part of the layer's; all of them, where ranks share them out."""
    head_dim: int
    d_model: int
    """Width of the layer's input x."""
    max_length: int
    causal: bool
    layers: int = 1
    """Number of layers that hold this mechanism, over which auxiliary losses are averaged."""
    vocabulary: int = 256


class Attention(nn.Module, ABC):
    """One mechanism over some heads of a layer, built from its section of the configuration and its spec.

    Strictly causal (`leak` is None): with inputs.causal, replacing tokens from t on changes no output before t.
    Parameters that decoding reads too live in submodules that are called (ZeRO 3 gathers weights at a module's call).
    """

    causal: bool = True
    """Whether decoders can have it."""
    shared_qk: bool = False
    """Whether its keys are q/|q|."""
    adds_positions: bool = False
    """Whether sinusoidal positions are added to its queries and keys in each layer."""
    task_weight: float = 1.0
    """Weight of the task's loss beside the auxiliary loss (LHA's convex combination)."""
    leak: str | None = None
    """Why a later token can move an earlier output, for a mechanism that keeps a paper's leaking window; else None."""

    def __init_subclass__(cls, **settings: Any) -> None:
        """A mechanism chooses its precision by the dtype of its heads, under torch.autocast too."""
        super().__init_subclass__(**settings)
        for name in ("forward", "fill_cache", "decode"):
            if name in vars(cls):
                setattr(cls, name, without_autocast(vars(cls)[name]))

    @abstractmethod
    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        """x: (B, L, E), the layer's input, which learned hashes and sketches read; where ranks share sequences that of
        the tokens that are here.

        The auxiliary loss comes already weighted, as the part of it that is added to the model's objective.
        """

    def new_cache(self, batch: int, like: Tensor, rounds: int | None) -> Any:
        """An empty decoding cache for `batch` sequences, on the device and in the dtype of `like`; causal ones only.

        Its `select(rows)` makes it that of the sequences `rows`, (n,) int64 indices into the batch, repeats allowed.
        """
        raise NotImplementedError

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: Any, context: AttentionContext) -> None:
        """Takes a whole prompt into an empty cache; `forward` gave its outputs."""
        raise NotImplementedError

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: Any, position: int, context: AttentionContext
    ) -> Tensor:
        """The output (B, H, 1, D) of the one new token at `position`, which is taken into the cache. x: (B, 1, E)."""
        raise NotImplementedError
