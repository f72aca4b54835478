"""The attention layer: project the input to heads, run their mechanisms, project back."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from megasparse.attention.cache import Cache
from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.initial_weights import initialise
from megasparse.attention.sequence_part import WHOLE, Edges, SequencePart
from megasparse.attention.sinks import merge
from megasparse.config.attention import MECHANISMS
from megasparse.config.schema import ModelConfig, heads_of_layer, layers_with
from megasparse.ops.normalize import Norm, unit_keys
from megasparse.ops.operator import Linear, autocast_off, device_of
from megasparse.ops.positions import Rotary

LayerCache = dict[str, Cache]
"""Caches of a layer's mechanisms by kind, and in an encoder–decoder the source's keys and values, "cross"."""


def build_mechanism(kind: str, model: ModelConfig, heads: int) -> Attention:
    """Build the mechanism named `kind` in the configuration, for `heads` heads of a layer."""
    spec = MechanismSpec(
        heads=heads,
        head_dim=head_dim(model),
        d_model=model.d_model,
        max_length=model.max_length,
        causal=model.kind != "encoder",
        layers=layers_with(model, kind),
        vocabulary=model.vocabulary,
        dropout=model.attention.dropout,
    )
    mechanism: Attention = MECHANISMS[kind](getattr(model.attention, kind), spec)
    return mechanism


def ranks_with_the_same_heads(mechanism: Attention, model: ModelConfig, ranks: int) -> int:
    """Return how many of the ranks that share a sequence compute the same heads."""
    return mechanism.part_of(SequencePart(size=ranks), mechanism.spec.heads // model.attention.head_groups).replicas


def head_dim(model: ModelConfig) -> int:
    return model.head_dim or model.d_model // model.heads


@dataclass(frozen=True)
class Padding:
    """Real tokens and document numbers of a batch, (B, L) each. key_mask: true for real tokens (integers: not 0); None
    if all tokens are real. segments: None if each sequence is one document. With sequence parallelism both cover whole
    sequences, and `part` is this rank's.
    """

    key_mask: Tensor | None = None
    segments: Tensor | None = None
    part: SequencePart = field(default_factory=lambda: WHOLE)

    def __post_init__(self) -> None:
        mask = self.key_mask
        if mask is None or mask.dtype == torch.bool:
            return
        if mask.is_floating_point():
            raise ValueError(f"key_mask is {mask.dtype}, which may be a bias: give a bool mask, true for real tokens")
        object.__setattr__(self, "key_mask", mask != 0)


class MultiHeadAttention(nn.Module):
    """Multi-head attention. All heads use one mechanism, or the heads are split among several.

    A mechanism with shared queries and keys uses no key projection: k = q/|q| (Reformer, section 2). With
    `model.key_heads` = G, each of G heads of keys and values serves H/G neighbouring heads of queries.

    Args:
        config: The section `model` of a configuration.
        layer: Number of the layer, which selects its entry of `model.attention.pattern`.
        seed: Seed of the initial weights; None leaves matrices uninitialised, for a model that initialises or loads
            them.
    """

    def __init__(self, config: ModelConfig, layer: int, seed: int | None = 0):
        super().__init__()
        self.heads = config.heads
        self.head_dim = head_dim(config)
        self.groups = config.attention.head_groups
        self.causal = config.kind != "encoder"
        self.group = config.heads // (config.key_heads or config.heads)
        self.split = heads_of_layer(config, layer)
        mechanisms = {kind: build_mechanism(kind, config, heads) for kind, heads in self.split.items()}
        rotary = config.positions.kind == "rotary" and all(mechanism.rotated for mechanism in mechanisms.values())
        scaling = config.positions.scaling
        scaled = {} if scaling is None else scaling.model_dump()
        self.rotary = Rotary(self.head_dim, config.positions.base, **scaled) if rotary else None
        self.mechanisms = nn.ModuleDict(mechanisms)
        biases = config.attention_biases or ("all" if config.style == "bert" else "none")
        biased = biases != "none"
        keyed = sum(heads for kind, heads in self.split.items() if not mechanisms[kind].shared_qk) // self.group
        self.query = projection(config.d_model, self.heads * self.head_dim, biased)
        self.key = projection(config.d_model, keyed * self.head_dim, biased) if keyed else None
        self.value = projection(config.d_model, self.heads // self.group * self.head_dim, biased)
        self.output = projection(self.heads * self.head_dim, config.d_model, biases == "all")
        self.query_norm = Norm(config.norm, self.head_dim, config.norm_eps) if config.query_key_norm else None
        self.key_norm = Norm(config.norm, self.head_dim, config.norm_eps) if config.query_key_norm and keyed else None
        if seed is not None:
            initialise(self, config, seed)

    def forward(
        self, x: Tensor, context: AttentionContext, padding: Padding, cache: LayerCache | None = None
    ) -> AttentionOutput:
        """Run the layer on a whole sequence.

        Args:
            x: (B, L, E), with sequence parallelism this rank's tokens.
            context: Layer and random state.
            padding: Real tokens and documents; `Padding()` if all tokens are real and each sequence is one document.
            cache: An empty cache to prefill (`new_cache`), or None.

        Returns:
            The layer's output (B, L, E), the sum of the auxiliary losses, and statistics named kind/name.
        """
        outs: list[Tensor] = []
        auxiliary: Tensor | None = None
        statistics: dict[str, Tensor] = {}
        for kind, inputs, local in self._project(x, context.rng.first, padding, context):
            mechanism = self.mechanism(kind)
            with autocast_off(x):
                output = mechanism(x, inputs, local)
                if cache is not None:
                    mechanism.fill_cache(x, inputs, cache[kind], local)
            outs.append(start_to_tokens(output, local.part)())
            if (loss := output.auxiliary_loss) is not None:
                assert mechanism.has_auxiliary_loss, f"{kind} returns an auxiliary loss: set its has_auxiliary_loss"
                auxiliary = loss if auxiliary is None else auxiliary + loss
            statistics |= {f"{kind}/{name}": value for name, value in output.statistics.items()}
        return AttentionOutput(self._merge(outs), auxiliary, statistics)

    def new_cache(self, batch: int, rounds: int | None, part: SequencePart = WHOLE) -> LayerCache:
        """Return an empty cache for each mechanism. part: see `Attention.new_cache`."""
        like = torch.empty(0, dtype=self.query.weight.dtype, device=device_of(self.query))
        parts = {kind: self.mechanism(kind).part_of(part, heads) for kind, heads in self.split.items()}
        return {kind: self.mechanism(kind).new_cache(batch, like, rounds, local) for kind, local in parts.items()}

    def mechanism(self, kind: str) -> Attention:
        return cast(Attention, self.mechanisms[kind])

    def decode(
        self, x: Tensor, cache: LayerCache, position: int, context: AttentionContext, padding: Padding
    ) -> Tensor:
        """Run the layer on the token at `position`, x (B, 1, E). padding.part must match the caches."""
        outs = []
        for kind, inputs, local in self._project(x, position, padding, context):
            with autocast_off(x):
                out = self.mechanism(kind).decode(x, inputs, cache[kind], position, local)
            outs.append(local.part.start_to_tokens(out)())
        return self._merge(outs)

    def _project(
        self, x: Tensor, first_position: int, padding: Padding, context: AttentionContext
    ) -> Iterator[tuple[str, AttentionInputs, AttentionContext]]:
        start = self._rotary_start(first_position, padding)
        q, k, v = self.queries(x, start), *self.keys_and_values(x, start)
        q, k, v = self.repeat(q, q[:, :0] if k is None else k, v)
        mechanisms = {kind: self.mechanism(kind) for kind in self.split}
        yield from split_heads_by_mechanism(
            mechanisms, self.split, (q, k, v), padding, self.causal, context, first_position
        )

    def _rotary_start(self, first_position: int, padding: Padding) -> int | Tensor:
        return first_position

    def queries(self, x: Tensor, first_position: int | Tensor) -> Tensor:
        """Return the normalised and rotated queries (B, H, L, D) of x (B, L, E)."""
        q = split_heads(self.query(x), self.head_dim)
        return self.rotate(q if self.query_norm is None else self.query_norm(q), first_position)

    def keys_and_values(self, x: Tensor, first_position: int | Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the normalised and rotated keys, None if all mechanisms share them with queries, and the values:
        (B, G, L, D).
        """
        v = split_heads(self.value(x), self.head_dim)
        if self.key is None:
            return None, v
        k = split_heads(self.key(x), self.head_dim)
        return self.rotate(k if self.key_norm is None else self.key_norm(k), first_position), v

    def rotate(self, x: Tensor, first_position: int | Tensor) -> Tensor:
        return x if self.rotary is None else self.rotary(x, first_position)

    @staticmethod
    def repeat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Repeat keys and values (B, H or fewer, L, D) for grouped query heads."""
        times = q.shape[1] // v.shape[1]
        return (q, k, v) if times == 1 else (q, k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))

    def _merge(self, outs: list[Tensor]) -> Tensor:
        return self.output(merge_heads(outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)))


def split_heads_by_mechanism(
    mechanisms: Mapping[str, Attention],
    split: Mapping[str, int],
    projected: tuple[Tensor, Tensor, Tensor],
    padding: Padding,
    causal: bool,
    context: AttentionContext,
    first_position: int = 0,
) -> Iterator[tuple[str, AttentionInputs, AttentionContext]]:
    """Yield each mechanism's share of a layer's heads, prepared for the mechanism, and its context.

    Args:
        split: Number of heads per mechanism.
        projected: q, k, v of all heads (B, H, L, D); k excludes heads of mechanisms with shared QK. With sequence
            parallelism, this rank's tokens, from `first_position` on; each mechanism receives all tokens of its heads
            on this rank.
    """
    all_q, all_k, all_v = projected
    first = 0
    first_key = 0
    for kind, heads in split.items():
        mechanism = mechanisms[kind]
        q = all_q[:, first : first + heads]
        v = all_v[:, first : first + heads]
        k = q
        if not mechanism.shared_qk:
            k = all_k[:, first_key : first_key + heads]
            first_key += heads
        shifted = dataclasses.replace(context, head_offset=context.head_offset + first)
        yield kind, *start_exchange(mechanism, (q, k, v), padding, causal, shifted, first_position)[1]()
        first += heads


def start_exchange(
    mechanism: Attention,
    projected: tuple[Tensor, Tensor, Tensor],
    padding: Padding,
    causal: bool,
    context: AttentionContext,
    first_position: int,
) -> tuple[Edges, Callable[[], tuple[AttentionInputs, AttentionContext]]]:
    """Start sending q, k, v (B, H, L, D) of a mechanism's heads, from `context.head_offset` on, to their ranks. Returns
    the edges of `SequencePart.start_to_heads` and a function that waits for this rank's heads.
    """
    q, k, v = projected
    heads = q.shape[1]
    part = mechanism.part_of(padding.part, heads)
    q, k = mechanism.prepare(q, k, first_position)
    edges, arrive = part.start_to_heads(*((q, v) if mechanism.shared_qk else (q, k, v)))
    offset = context.head_offset + part.head_rank * (heads // part.head_ranks)
    local = dataclasses.replace(context, head_offset=offset, rng=context.rng.at(0), part=part)

    def arrived() -> tuple[AttentionInputs, AttentionContext]:
        q, *keys, v = arrive()
        q, k = (q, *keys) if keys else unit_keys(q)
        dropout = mechanism.pair_dropout(q, local)
        return AttentionInputs(q, k, v, padding.key_mask, padding.segments, causal, dropout), local

    return edges, arrived


def start_to_tokens(output: AttentionOutput, part: SequencePart) -> Callable[[], Tensor]:
    """Start sending outputs back. Returns a function that waits for (B, H, L/S, D), all heads of this rank's tokens."""
    if output.lse is None:
        return part.start_to_tokens(output.out)
    out = merge(part.parts_to_tokens(output.out, output.lse))[0]
    return lambda: out


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Reshape (B, L, H·D) to (B, H, L, D)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Reshape (B, H, L, D) to (B, L, H·D)."""
    return x.transpose(1, 2).flatten(-2)


def projection(width_in: int, width_out: int, biased: bool) -> nn.Linear:
    """Create a Linear without drawing from torch's global generator; biases are 0."""
    linear = Linear(width_in, width_out, bias=biased, device="meta")
    linear.weight = nn.Parameter(torch.empty(width_out, width_in))  # unlike skip_init, this does not import sympy
    if biased:
        linear.bias = nn.Parameter(torch.zeros(width_out))
    return linear
