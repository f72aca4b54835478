"""Interface of attention mechanisms.

Letters in all files: B batch, L length (Lq queries, Lk keys), H heads, D head dim, R rounds, N buckets, M chunk, E
width of the layer's input, K keys per query, d width of a sketch, S sampled queries, n tokens of a document, W
clusters, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from megasparse.attention.cache import Cache, CachedTokens
from megasparse.attention.flops import Flops
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.attention.spec import MechanismSpec
from megasparse.errors import ConfigError
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Codes, bucketed_attention
from megasparse.ops.random import Key, PairDropout, RngContext

R = TypeVar("R")
PrefixKeys = Callable[[int, int], Sequence[Tensor]]
"""Function that returns the keys and values (B, H, m, D) of the positions start … stop − 1, and their index if any."""


class AttentionInputs(NamedTuple):
    """Queries, keys and values of one layer; with sequence parallelism, whole sequences for this rank's heads.

    q: (B, H, Lq, D). k, v: (B, H, Lk, D); with shared QK, k is q/|q|. key_mask: (B, Lk) bool, true for real tokens, or
    None. segments: (B, L) document numbers, or None. dropout: dropout of the attention probabilities, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    segments: Tensor | None
    causal: bool
    dropout: PairDropout | None = None

    def with_query_dtype(self) -> "AttentionInputs":
        """Cast k and v to the dtype of q; torch.autocast leaves some tensors in bf16 and some in fp32."""
        return self._replace(k=self.k.to(self.q.dtype), v=self.v.to(self.q.dtype))

    def in_buckets(self, codes: Tensor | Codes | None, spec: BucketedAttentionSpec) -> tuple[Tensor, Tensor]:
        """Call `bucketed_attention` on these inputs."""
        q, k, v, key_mask, segments, _, dropout = self
        return bucketed_attention(q, k, v, codes, spec, key_mask, segments, dropout=dropout)

    def without_padding(self, x: Tensor) -> Tensor:
        """Return x (B, H, L, ...) with padding set to 0."""
        return x if self.key_mask is None else x.masked_fill(~self.key_mask[:, None, :, None], 0.0)

    def continues(self) -> Tensor:
        """Return (B or 1, L) bool, true for real tokens that follow one of the same document."""
        continues = (torch.arange(self.q.shape[2], device=self.q.device) > 0)[None]
        if self.segments is not None:
            continues = continues & (self.segments == self.segments.roll(1, 1))
        if self.key_mask is not None:
            continues = continues & self.key_mask & self.key_mask.roll(1, 1)
        return continues


class AttentionOutput(NamedTuple):
    """Result of a mechanism. out: (B, H, Lq, D). auxiliary_loss: scalar to minimise with the task loss, or None.
    statistics: name -> detached scalar. lse: (B, H, Lq), log-sum-exp over this rank's keys if ranks with the same heads
    divide the query-key pairs; None if `out` is complete.
    """

    out: Tensor
    auxiliary_loss: Tensor | None = None
    statistics: Mapping[str, Tensor] = MappingProxyType({})
    lse: Tensor | None = None


class RecomputeCache:
    """Decisions of a layer's forward pass, replayed when the layer is recomputed: a reversible backward restores its
    input only up to rounding, which could flip a code.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._next: int | None = None

    def keep(self, decide: Callable[[], R]) -> R:
        """Return `decide()` in the forward pass, and the recorded value in the replay."""
        if self._next is None:
            value = decide()
            self._values.append(value)
            return value
        self._next += 1
        return cast(R, self._values[self._next - 1])

    def replay(self) -> None:
        """Make later calls of `keep` return the recorded values in order."""
        self._next = 0


class Targets(NamedTuple):
    """Training targets, for mechanisms that learn from them directly (Smart Bird's sketch).

    values: int64: (B, L) a token for each position, (B,) sequence labels, or, with `answer`, (B, T) target tokens of
    the other stack. counted: bool, values that enter the loss; None for all. With sequence parallelism, values cover
    this rank's tokens; an answer is complete.
    """

    values: Tensor
    counted: Tensor | None
    answer: bool = False


@dataclass
class AttentionContext:
    """Arguments of one call besides the tensors: the layer, the global index of its first head, and the random state.

    recompute: decisions of this forward pass. targets: in training only. part: this rank's part of the sequences and
    heads; slice parameters and buffers with one row per head by `part.local_part`. tokens: (B, L) int64 of the
    whole sequences, in a decoder the token before each position, −1 at the first one (in an encoder the position's
    own); None in a model that reads no tokens. repeats: number of neighbouring heads with equal keys and values.
    """

    layer: int
    rng: RngContext
    head_offset: int = 0
    recompute: RecomputeCache = field(default_factory=RecomputeCache)
    targets: Targets | None = None
    part: SequencePart = field(default_factory=lambda: WHOLE)
    tokens: Tensor | None = None
    repeats: int = 1

    def heads(self, count: int) -> range:
        """Return the global indices of the first `count` heads."""
        return range(self.head_offset, self.head_offset + count)

    def key(self, purpose: str) -> Key:
        """Derive the key of a purpose's random draws in this layer and step."""
        return self.rng.key(self.layer, purpose)


class IndexedTokens(NamedTuple):
    """The newest n tokens of a cache. entries: (B, n, w), by which later queries choose keys. queries: data by which
    these tokens choose. Both are None if the choice depends only on positions.
    """

    inputs: AttentionInputs
    context: AttentionContext
    entries: Tensor | None = None
    queries: Tensor | None = None


class Buckets(NamedTuple):
    """Bucket codes of queries and keys: (B, H, L), with R rounds (B, R·H, L). number: count of buckets."""

    queries: Tensor
    keys: Tensor
    number: int


class Attention(nn.Module, ABC):
    """Abstract base class of a mechanism, built from its configuration section and its spec.

    A subclass must define `forward`; calling an optional method that it lacks raises an error that names it.

    `leak` is None if the mechanism is strictly causal: with inputs.causal, replacing tokens from t on changes no output
    before t. Put parameters that decoding also reads into submodules and call these, because ZeRO 3 gathers weights
    when a module is called. Callers disable torch.autocast; the dtype of q, k and v sets the precision.

    Decoding has two interfaces. `decode` gives the bits of `forward` on a CPU, on which decompression depends: it sums
    a token's keys in the tiles of the whole pass, from a cache made for this. `choose` names keys in a cache that
    transformers owns, crops, reorders and offloads, for several new tokens and with padding, equal up to rounding.
    """

    config: Any
    """Configuration section, an instance of the class registered with the mechanism."""

    shared_qk: bool = False
    """True if the keys are q/|q|."""
    changes_keys: bool = False
    """True if `prepare` changes the keys."""
    reads_tokens: bool = False
    """True if the mechanism hashes token ids, see AttentionContext.tokens."""
    rotated: bool = True
    """True if rotary positions rotate its queries and keys. If False, its layers use none."""
    task_weight: float = 1.0
    """Weight of the task loss relative to the auxiliary loss (LHA's convex combination)."""
    has_auxiliary_loss: bool = False
    """True if training passes return an auxiliary loss, a mean over a micro-batch: results depend on its size."""
    initial_deviations: ClassVar[Mapping[str, float]] = {}
    """Name of a matrix of the mechanism -> standard deviation of its initial weights; of others it is 1/√fan-in."""
    auxiliary_weight: float = 1.0
    """Weight of the auxiliary loss; `learn` divides it among the layers."""
    leak: str | None = None
    """Reason why a later token can change an earlier output (a paper's non-causal window); None if it cannot."""
    computed_by_document: bool = False
    """True if a later separator or padding before tokens changes the rounding of earlier outputs, because the size of
    products depends on documents."""
    normalises: bool = False
    """True if each output is scaled to length 1 and therefore not linear in the values."""
    shares_pairs: bool = False
    """True if ranks with the same heads divide the query-key pairs (`context.part.pair_shard`); `forward` then also
    returns a log-sum-exp. If False, each of these ranks computes its heads in full.
    """

    def __init__(self, config: Any, spec: MechanismSpec):
        super().__init__()
        self.config = config
        self.spec = spec
        self.heads_together: int = config.heads_together

    @abstractmethod
    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        """Attend to all tokens. x: (B, L, E), the layer's input, which learned hashes and sketches read; with sequence
        parallelism, only this rank's tokens.

        The auxiliary loss is already weighted: it is the term that is added to the model's objective.
        """

    def attends_prefix(self, group: int, ranks: int) -> bool:
        """Return True if `attend_prefix` is defined: a tile of queries needs only the keys, values and `index_keys` of
        its prefix. group: heads per key head. ranks: number of ranks that share a sequence.
        """
        return False

    def attend_prefix(
        self, q: Tensor, keys: PrefixKeys, position: int, document: int, context: AttentionContext
    ) -> Tensor:
        """Attend causally from queries (B, H, n, D) of a key head, at positions from `position` on, in the document
        that starts at token `document`. context: its `part` selects the key head.
        """
        raise self._lacks("cannot attend from a tile of queries", "attend_prefix")

    def index_keys(self, k: Tensor, context: AttentionContext) -> Tensor | None:
        """Return data (B, S, n, w) by which `attend_prefix` chooses among keys (B, H, n, D), or None."""
        return None

    def sampled_queries(self, length: int, context: AttentionContext, device: torch.device) -> Tensor | None:
        """Return the positions of the queries that `learn` reads in a training pass; None if there is no such loss."""
        return None

    def part_of(self, part: SequencePart, heads: int) -> SequencePart:
        """Return a rank's part of the sequences and of `heads` heads, inside attention."""
        return part.of_heads(heads // self.heads_together)

    def prepare(self, q: Tensor, k: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the queries and keys (B, H, L, D) to attend with, for positions from `first` on."""
        return q, k

    def after_step(self, applied: bool, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Update state that the optimizer does not own, once per step. applied: True if the gradients were finite.
        sum_over_ranks: all-reduces a tensor; either all ranks call it or none.
        """

    def start_from_pretrained(self) -> None:
        """Set parameters so that pretrained values pass unchanged, before fine-tuning in a pretrained model."""

    def word_weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return weights to initialise from word vectors: token tables (V, n), and projections (d, E) of the layer's
        input, which can start as the vectors' principal directions.
        """
        return [], []

    def learn(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the auxiliary loss of a training pass, as in `forward`, and its statistics, without attention."""
        raise self._lacks("has nothing to learn", "learn")

    def teaching_rate(self, parameter: str, progress: float = 0.0) -> float | None:
        """Return Adam's learning rate of a parameter for teaching the choice of keys by `learn`; None if not supported.
        progress: completed fraction of the passes.
        """
        return None

    def selection_gap(self, inputs: AttentionInputs, context: AttentionContext) -> float:
        """Return the relative error of queries and keys below which they select the same keys, so that `forward` and
        decoding differ by rounding only: ∞ if they select no keys; 0 if unknown.
        """
        return 0.0

    def rounds(self, rng: RngContext) -> int:
        """Return the number of hash rounds (YOSO: hashes) per pass."""
        return rng.rounds or cast(int, self.config.hash_rounds(rng.training))

    def pair_dropout(self, q: Tensor, context: AttentionContext) -> PairDropout | None:
        """Return the dropout of the probabilities of this rank's queries q (B, H, L, D); None if the rate is 0."""
        if not context.rng.training or self.spec.dropout == 0.0:
            return None
        rows = context.rng.rows(q.shape[2], q.device)
        key = context.key("attention probability dropout")
        return PairDropout.of(self.spec.dropout, key, rows, context.heads(q.shape[1]))

    # Decoding of causal mechanisms token by token, from a cache of their own

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> Cache:
        """Return an empty cache for `batch` sequences, on the device and in the dtype of `like`.

        part: the rank's part of the heads. Raises ConfigError if the mechanism cannot decode token by token.
        """
        raise self._lacks("cannot decode token by token: it lacks a KV cache", "new_cache, fill_cache and decode")

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: Any, context: AttentionContext) -> None:
        """Prefill an empty cache. `forward` has already computed the outputs."""
        raise self._lacks("cannot prefill a cache", "fill_cache")

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: Any, position: int, context: AttentionContext
    ) -> Tensor:
        """Append the new token at `position` to the cache and return its output (B, H, 1, D). x: (B, 1, E)."""
        raise self._lacks("cannot decode from a cache", "decode")

    # Decoding several tokens with a cache of all keys and values (hub/replaced_layer.py)

    def index(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> IndexedTokens:
        """Index the newest n tokens. x: (B, n, E). inputs: their queries and keys."""
        return IndexedTokens(inputs, context)

    def choose(self, newest: IndexedTokens, index: Tensor | None, tokens: CachedTokens) -> tuple[Tensor, ...] | None:
        """Return the keys that the newest n tokens attend to, (B or 1, H or a divisor of H, n, K) token numbers, −1 in
        empty slots: a tensor for each part of the softmax that `forward` rounds separately. None if the mechanism does
        not choose keys. index: (B, L, w), the entries of all tokens.
        """
        return None

    def skipped(self, position: int) -> slice:
        """Return tokens that do not change outputs from `position` on, without padding, if `choose` returns None."""
        return slice(0, 0)

    # Costs per token of these heads at a sequence length, without projections

    def flops(self, length: int) -> Flops:
        """Return the FLOPs by formula, with full windows. Raises ConfigError if the mechanism does not define them."""
        raise self._lacks("does not define its FLOPs", "flops")

    # Variants for evaluation

    def without_additions(self) -> "Attention":
        """Return the mechanism without additions such as a convolution of the values."""
        return self

    def exact(self) -> "Attention | None":
        """Return the mechanism that this one approximates, or None for full attention of the same queries and keys."""
        return None

    def buckets_of(self, inputs: AttentionInputs, context: AttentionContext) -> Buckets | None:
        """Return the bucket of every query and key, or None if the mechanism does not hash."""
        return None

    def _lacks(self, problem: str, methods: str) -> ConfigError:
        name = type(self).__name__
        hint = f"Choose another mechanism for this, or implement {name}.{methods}"
        return ConfigError("model.attention.pattern", f"{name} {problem}", hint)
