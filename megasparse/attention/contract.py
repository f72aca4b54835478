"""The contract of attention mechanisms. B batch, L length, H heads, D head dim, E width of the layer's input."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.errors import ConfigError
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, bucketed_attention
from megasparse.ops.random import PairDropout, RngContext


class AttentionInputs(NamedTuple):
    """Queries, keys and values of one layer. q: (B, H, Lq, D). k, v: (B, H, Lk, D); with shared QK, k is q/|q|.

    key_mask: (B, Lk) bool, true for real tokens, or None. segments: (B, L) document numbers, or None. dropout: of the
    probabilities, or None.
    Where ranks share sequences: whole ones, of this rank's heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    segments: Tensor | None
    causal: bool
    dropout: PairDropout | None = None

    def of_one_dtype(self) -> "AttentionInputs":
        """With k and v in the dtype of q; torch.autocast leaves some in bf16 and some in fp32."""
        return self._replace(k=self.k.to(self.q.dtype), v=self.v.to(self.q.dtype))

    def in_buckets(
        self, codes: Tensor | None, spec: BucketedAttentionSpec, key_codes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`bucketed_attention` of these."""
        q, k, v, key_mask, segments, _, dropout = self
        return bucketed_attention(q, k, v, codes, spec, key_mask, segments, key_codes, dropout=dropout)


class AttentionOutput(NamedTuple):
    """The result of a mechanism. out: (B, H, Lq, D). auxiliary_loss: scalar to minimise with the task's, or None.
    statistics: name -> detached scalar. lse: (B, H, Lq), where ranks that have the same heads share out the pairs, of
    those that are this rank's; None where `out` is whole for the tokens that it answers for.
    """

    out: Tensor
    auxiliary_loss: Tensor | None
    statistics: dict[str, Tensor]
    lse: Tensor | None = None


class RecomputeCache:
    """Decisions of a layer's forward that its recomputation must not take again.

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
        """From now on, `keep` returns the values kept so far, in their order."""
        self._next = 0


class Targets(NamedTuple):
    """Targets of a model in a training step, for mechanisms that learn from it themselves (Smart Bird's sketch).

    values: int64, (B, L) a token for each position, (B,) a label for each sequence, or, with `answer`, (B, T) the
    tokens that another stack predicts from each sequence. counted: bool, the values that count, or None for all.
    Where ranks share sequences: of the tokens that are here, but of an answer all.
    """

    values: Tensor
    counted: Tensor | None
    answer: bool = False


@dataclass
class AttentionContext:
    """Circumstances of one call: the layer, the global number of its first head, and what its draws depend on.

    recompute: the decisions of this forward pass. targets: in training only. part: this rank's part of the sequences
    and of the mechanism's heads; parameters and buffers that have a row per head are cut by `part.local_part`. tokens:
    (B, L) int64 of the whole sequences, the newest token that each position knows, in a decoder the one before it, −1
    where there is none; None in a model that reads no tokens.
    """

    layer: int
    rng: RngContext
    head_offset: int = 0
    recompute: RecomputeCache = field(default_factory=RecomputeCache)
    targets: Targets | None = None
    part: SequencePart = field(default_factory=lambda: WHOLE)
    tokens: Tensor | None = None


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
        inside = full * chunk * chunk + rest * rest
        before = chunk * max(0, self.length - chunk)
        if self.causal:
            return ((inside + self.length) / 2 + before) / self.length
        return (inside + 2 * before) / self.length

    def beyond(self, chunk: int, sinks: int) -> float:
        """Mean number of sinks that a query sees beside those in its own chunk and its neighbours."""
        return sinks * max(0, self.length - 2 * chunk) / self.length

    def clusters(self, count: int, size: int) -> float:
        """Mean number of keys a query sees in `count` clusters of `size` queries and keys each."""
        size = min(size, self.length)
        return count * size * ((size + 1) / 2 if self.causal else size) / self.length


class CachedTokens(NamedTuple):
    """Tokens of a cache, of which the newest `number` are queries. rank: (B or 1, L), numbers among the real tokens.
    order: (B or 1, L), the tokens by rank. real: (B, L) bool, or None where all are.
    """

    number: int
    rank: Tensor
    order: Tensor
    real: Tensor | None

    @staticmethod
    def of(length: int, number: int, real: Tensor | None, device: torch.device) -> "CachedTokens":
        if real is None:
            position = torch.arange(length, device=device)[None]
            return CachedTokens(number, position, position, None)
        order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        return CachedTokens(number, real.cumsum(1) - 1, order, real)

    def at(self, ranks: Tensor) -> Tensor:
        """Return the tokens of ranks (B or 1, n, m), −1 for negative ranks."""
        tokens = self.order.gather(1, ranks.clamp_min(0).flatten(1)).view(ranks.shape)
        return tokens.masked_fill(ranks < 0, -1)

    def near(self, chunk: int | None, sinks: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of each query's chunk of positions and the chunk before, and the first tokens: (B or 1, n,
        m), −1 at empty places; and the rank of the first token in these chunks, (B or 1, n, 1).
        """
        rank = self.rank[:, -self.number :, None]
        start, numbers = rank + 1, torch.arange(sinks, device=rank.device)
        near = rank[..., :0]
        if chunk is not None:
            start = (rank // chunk - 1).clamp_min(0) * chunk
            near = start + torch.arange(2 * chunk, device=rank.device)
            near = near.masked_fill(near > rank, -1)
        first = numbers.masked_fill(numbers >= start, -1)
        return self.at(torch.cat([near, first], dim=-1)), start


class Buckets(NamedTuple):
    """The bucket of every query and key: (B, H, L), of R rounds (B, R·H, L). number: how many buckets there are."""

    queries: Tensor
    keys: Tensor
    number: int


@dataclass(frozen=True)
class MechanismSpec:
    """A mechanism's part of a layer, and the model around it."""

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
    dropout: float = 0.0
    """Rate of dropout of attention probabilities, in training."""

    def on_rank(self, part: SequencePart) -> "MechanismSpec":
        """That of the heads which are on this rank."""
        return replace(self, heads=self.heads // part.shares)

    def workload(self, length: int) -> Workload:
        """These heads at a sequence length, as FLOPs are counted of them."""
        return Workload(self.heads, self.head_dim, self.causal, length)


class Attention(nn.Module, ABC):
    """One mechanism on some heads of a layer, built from its configuration section and its spec. Abstract base class.

    A subclass must define `forward`. It describes its costs, decoding and updates per step in optional methods; calling
    one that it does not define is an error with the method's name.

    `leak` is None if the mechanism is strictly causal: with inputs.causal, replacing tokens from t on changes no output
    before t. Put parameters that decoding also reads into submodules and call these, because ZeRO 3 gathers weights
    when a module is called. Callers disable torch.autocast; the dtype of the heads sets the precision.
    """

    config: Any
    """The section, of the class that is registered with the mechanism."""

    shared_qk: bool = False
    """True if its keys are q/|q|."""
    reads_tokens: bool = False
    """True if it hashes the tokens themselves, see AttentionContext.tokens."""
    task_weight: float = 1.0
    """Weight of the task's loss beside the auxiliary loss (LHA's convex combination)."""
    auxiliary_weight: float = 1.0
    """Weight of the mechanism's own loss, which `learn` returns divided among the layers."""
    leak: str | None = None
    """Why a later token can move an earlier output, for a mechanism that keeps a paper's leaking window; else None."""
    normalises: bool = False
    """True if each output is scaled to length 1, so that it is not linear in the values."""
    shares_pairs: bool = False
    """True if ranks that have the same heads share out their pairs of queries and keys (`context.part.share`), when
    `forward` returns a log-sum-exp too. Otherwise each of them computes these heads whole.
    """

    def __init__(self, config: Any, spec: MechanismSpec):
        super().__init__()
        self.config, self.spec = config, spec
        self.heads_together: int = config.heads_together

    @abstractmethod
    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        """Attend to all tokens. x: (B, L, E), the layer's input, which learned hashes and sketches read; if ranks
        share sequences, that of this rank's tokens.

        The auxiliary loss comes already weighted, as the part of it that is added to the model's objective.
        """

    def part_of(self, part: SequencePart, heads: int) -> SequencePart:
        """Return the part of sequences, and of so many of these heads, that a rank has inside attention."""
        return part.of_heads(heads // self.heads_together)

    def prepare(self, q: Tensor, k: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the queries and keys (B, H, L, D) that it attends by, of the positions from `first` on."""
        return q, k

    def after_step(self, applied: bool, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Update state that the optimizer does not own, once per step. applied: True if its gradients were finite.

        sum_over_ranks: sums a tensor over the ranks; all of them call it, or none.
        """

    def start_from_pretrained(self) -> None:
        """Set parameters so that pretrained values pass unchanged, before fine-tuning in a pretrained model."""

    def word_weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return weights that can start from word vectors: tables of tokens (V, n), and projections (d, E) of the
        layer's input, which can start as the vectors' principal directions.
        """
        return [], []

    def learn(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the auxiliary loss of a training pass, weighted as in `forward`, and its statistics, without attention
        itself.
        """
        raise self._lacks("learns nothing of its own", "learn")

    def teaching_rate(self) -> float | None:
        """Return Adam's learning rate for teaching the choice of keys by `learn` in a model that else stays as it is;
        None if the mechanism does not learn so.
        """
        return None

    def rounds(self, rng: RngContext) -> int:
        """Return the hash rounds (YOSO: hashes) of a pass: those of the context, or of the settings."""
        section = self.config
        return rng.rounds or (getattr(section, section.rounds_key) if rng.training else section.rounds_in_evaluation)

    def pair_dropout(self, q: Tensor, context: AttentionContext) -> PairDropout | None:
        """Return the dropout of the probabilities of the queries q (B, H, L, D) of this rank's heads; None without."""
        rng, first = context.rng, context.head_offset
        if not rng.training or self.spec.dropout == 0.0:
            return None
        key, rows = rng.key(context.layer, "attention probability dropout"), rng.rows(q.shape[2], q.device)
        return PairDropout.of(self.spec.dropout, key, rows, range(first, first + q.shape[1]))

    # Decoding with a cache, of causal mechanisms

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> Any:
        """Return an empty `full.Cache` for `batch` sequences, on the device and in the dtype of `like`.

        part: that of the heads. Raises ConfigError for a mechanism that cannot decode token by token.
        """
        raise self._lacks("cannot decode token by token: it has no cache", "new_cache, fill_cache and decode")

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: Any, context: AttentionContext) -> None:
        """Prefill an empty cache. `forward` has already computed the outputs."""
        raise self._lacks("cannot take a prompt into a cache", "fill_cache")

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: Any, position: int, context: AttentionContext
    ) -> Tensor:
        """Append the one new token at `position` to the cache, and return its output (B, H, 1, D). x: (B, 1, E)."""
        raise self._lacks("cannot decode from a cache", "decode")

    # Decoding several tokens from a cache of all keys and values

    def index(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> tuple[Tensor | None, Any]:
        """Return what later queries choose the keys of these tokens by, (B, n, w), and what `choose` needs of their
        queries; None for a choice by positions alone.
        """
        return None, None

    def choose(self, queries: Any, index: Tensor | None, tokens: CachedTokens) -> Tensor | None:
        """Return the keys that the newest n tokens attend to, (B or 1, H or a divisor of it, n, K) token numbers, −1 at
        empty places; None for a mechanism without such a choice. index: (B, L, w), of all tokens.
        """
        return None

    # Costs at a sequence length, a token, of these heads without their projections

    def flops(self, length: int) -> Passes:
        """Return the FLOPs by formula, with every window full. Raises ConfigError if they are not known."""
        raise self._lacks("has no count of its FLOPs", "flops")

    # What evaluation compares

    def without_additions(self) -> "Attention":
        """Return the mechanism without what it adds to attention, such as a convolution of the values."""
        return self

    def exact(self) -> "Attention | None":
        """Return the mechanism that this one approximates, or None for full attention of the same queries and keys."""
        return None

    def buckets_of(self, inputs: AttentionInputs, context: AttentionContext) -> Buckets | None:
        """Return the bucket of every query and key, or None for a mechanism that does not hash."""
        return None

    def _lacks(self, problem: str, methods: str) -> ConfigError:
        name = type(self).__name__
        hint = f"Choose another mechanism for this, or implement {name}.{methods}"
        return ConfigError("model.attention.pattern", f"{name} {problem}", hint)
