"""Smart Bird (Wu et al. 2021): a narrow single-head sketch of the attention selects the keys that queries attend to.

B batch, H heads, L length, D head dim, E width of the layer's input, d width of the sketch, K keys, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    Cache,
    CachedTokens,
    IndexedTokens,
    MechanismSpec,
    Passes,
    Targets,
    product,
)
from megasparse.attention.far_attention import SAMPLES, drawn_positions, far_attention, far_pairs, sketch_divergence
from megasparse.attention.full import KeyValueCache
from megasparse.attention.local import cached_window
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.attention.sinks import DocumentRanks, merge, sink_index, without_seen
from megasparse.config.attention import MechanismSection, heads_of_layer, mechanism
from megasparse.config.section import Count, Positive
from megasparse.errors import ConfigError
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.gathered_attention import gathered_attention
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.positions import sinusoids
from megasparse.ops.sketch import KeyChoiceSpec, Noise, chosen_keys, exact_projection, sketched_attention
from megasparse.ops.tiled import tiled

if TYPE_CHECKING:
    from megasparse.config.schema import ModelConfig


ASKED = {"token": "one token per position", "pooled": "one label per sequence", "answer": "the tokens of an answer"}
"""Descriptions of a sketch's targets, by objective."""


def check_sketch(config: Any, kind: str, key: str, model: "ModelConfig") -> None:
    """Raise ConfigError unless `sketch_heads` divides the heads of this kind in every layer of `model`, and signs fill
    bytes.
    """
    count = config.sketch_heads
    if config.sketch_signs and config.sketch_dim % 8:
        problem = f"{config.sketch_dim} is not a multiple of 8, but sketch_signs = true packs bits into bytes"
        raise ConfigError(f"{key}.sketch_dim", problem, "Set it to 64, for example")
    for layer in range(len(model.attention.pattern)):
        if (heads := heads_of_layer(model, layer).get(kind, 0)) % count:
            problem = f"{count} does not divide the {heads} heads of a layer"
            raise ConfigError(f"{key}.sketch_heads", problem, "Set it to a divisor")


@dataclass
class SketchCache(Cache):
    """Keys and values of the heads, and the concatenated keys of all sketches, (B, capacity, sketches·d) in float64."""

    heads: KeyValueCache
    sketch: Tensor


class SmartBirdAttentionConfig(MechanismSection):
    keys: Positive = 20
    """K, number of keys per query."""
    sketch_dim: Positive = 4
    """Width d of the single-head sketch."""
    sketch: Literal["attention", "transformer", "heads"] = "attention"
    """`attention`: one narrow attention over the layer's input. `transformer`: a Transformer layer of width
    `sketch_dim` over separate token embeddings, with sinusoidal positions (Eq. 1). `heads`: one sketch for every
    `sketch_heads` heads, from their queries and keys after rotation."""
    sketch_heads: Positive = 1
    """With heads only: number of neighbouring heads that share a sketch and its selected keys."""
    sketch_signs: bool = False
    """With heads only: compare the signs of the d numbers, by the Hamming distance of d bits, a multiple of 8."""
    evaluation: Literal["top_k", "draws"] = "top_k"
    """In evaluation, select the K largest weights, the same keys for all heads, or draw per head as in training."""
    sampling: Literal["inverse_log_squared", "inverse_log", "raw", "top_k", "random"] = "inverse_log_squared"
    """Function from a sketched weight to a sampling score (the paper's Figure 4)."""
    objective: Literal["token", "pooled", "answer", "attention"] = "token"
    """Training objective of the sketch: `token`, each position's target (language modelling, masked tokens); `pooled`,
    the sequence's label, from an attention-pooled vector (the paper); `answer`, in the encoder of an encoder–decoder,
    the set of target tokens, from the same vector; `attention`, the full attention of its heads to keys beyond the
    window and the sinks, from 256 queries per step."""
    labels: Positive | None = None
    """With pooled only: number of labels."""
    local: bool = False
    """Add a local window in the same softmax: a token's chunk of positions and the previous chunk, in an encoder also
    the next. A key in both is included once."""
    chunk: Positive = 64
    """With local only: positions per chunk."""
    sinks: Count = 0
    """First tokens of each document that all later ones (in an encoder all) attend to, in the same softmax, each
    once."""

    def check(self, key: str, model: "ModelConfig") -> None:
        if (self.objective == "pooled") != (self.labels is not None):
            labels = "null" if self.labels is None else self.labels
            problem = f'{labels} does not match objective = "{self.objective}"'
            raise ConfigError(f"{key}.labels", problem, 'Set the number of labels with "pooled", else null')
        if self.sketch == "heads" and self.objective != "attention":
            problem = f'"{self.objective}" is predicted from values, but sketch = "heads" uses only queries and keys'
            raise ConfigError(f"{key}.objective", problem, 'Set it to "attention"')
        if self.sketch == "transformer" and self.objective == "attention":
            problem = '"transformer" is trained on prediction targets, not on attention'
            raise ConfigError(f"{key}.sketch", problem, 'Set it to "heads" or "attention", or change objective')
        if self.sketch_heads > 1 and self.sketch != "heads":
            problem = f'{self.sketch_heads} heads share a sketch, but with sketch = "{self.sketch}" all heads do'
            raise ConfigError(f"{key}.sketch_heads", problem, 'Set it to 1, or sketch to "heads"')
        if self.sketch_signs and self.sketch != "heads":
            problem = f'true needs sketch = "heads", not "{self.sketch}"'
            raise ConfigError(f"{key}.sketch_signs", problem, "Set it to false")
        check_sketch(self, "smart_bird", key, model)

    @property
    def joined(self) -> str | None:
        return None if self.sketch == "heads" else 'all heads share one sketch, unless sketch = "heads"'

    @property
    def heads_together(self) -> int:
        return self.sketch_heads

    @property
    def predicts(self) -> Literal["token", "pooled", "answer"] | None:
        return None if self.objective == "attention" else self.objective

    def with_labels(self, labels: int) -> "SmartBirdAttentionConfig":
        if self.predicts is None:
            return self
        return self.model_copy(update={"objective": "pooled", "labels": labels})


@mechanism("smart_bird", SmartBirdAttentionConfig)
class SmartBirdAttention(Attention):
    """Softmax attention of each query to K keys that a narrow attention, the sketch, selects (Smart Bird Eq. 1 to 3).

    The sketch computes weights α_ij and scores p_ij = (1/log α_ij)². In training each head draws s_ij ~ U(0, p_ij) and
    takes the K keys with the largest s_ij. In evaluation all heads take the K largest p_ij, with ties to earlier keys;
    with evaluation = "draws" or sampling = "random" they draw as in training. A query with at most K visible keys
    attends to all of them. A causal sketch normalises α_i over j <= i, so later tokens never change a selection. An
    optional window (as in local attention) and sinks join the selected keys in one softmax, each key once.

    A selection is not differentiable, so a separate loss trains the sketch: to predict the task's targets, or with
    objective = "attention" the heads' full attention. The sketch reads the layer's detached input; with sketch =
    "transformer" separate token embeddings, with "heads" the queries and keys of `sketch_heads` heads.
    """

    def __init__(self, config: SmartBirdAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        window = Window("chunk", min(config.chunk, spec.max_length), ahead=not spec.causal)
        self.near = BucketedAttentionSpec(window, spec.causal, spec.head_dim**-0.5, exclude_self=False)
        self.reads_tokens = config.sketch == "transformer"
        self.width = config.sketch_dim if self.reads_tokens else spec.d_model
        self.query: Any
        self.key: Any
        self.groups, self.index_width = 1, config.sketch_dim // (8 if config.sketch_signs else 1)
        if config.sketch == "heads":
            wide = config.sketch_heads * spec.head_dim
            self.groups = spec.heads // config.sketch_heads
            self.query, self.key = (HeadProjection(self.groups, wide, config.sketch_dim) for _ in range(2))
        else:
            self.query, self.key = (Projection(self.width, config.sketch_dim) for _ in range(2))
        if config.objective != "attention":
            self.value = Projection(self.width, config.sketch_dim)
        self.embedding = SketchEmbedding(spec, self.width) if self.reads_tokens else None
        self.layer = SketchLayer(self.width) if self.reads_tokens else None
        self.objective: nn.Module
        if config.objective == "token":
            self.objective = TokenObjective(config.sketch_dim, spec.vocabulary)
        elif config.objective != "attention":
            self.objective = PooledObjective(config.sketch_dim, config.labels or spec.vocabulary)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        x = self._read(x, inputs, context)
        loss: Tensor | None = None
        statistics: dict[str, Tensor] = {}
        if self.config.objective == "attention" and context.rng.training:
            loss, statistics = self.learn(x, inputs, context)
        elif self.config.objective != "attention" and context.targets is not None:
            loss = self._objective(x, inputs, context.targets, context.part)
            statistics["sketch_loss"] = loss.detach()
            loss = loss * (1.0 / self.spec.layers)
        index = context.recompute.keep(lambda: self._choose(self.sketches(x, inputs, context), inputs, context))
        return AttentionOutput(self._attend(inputs, index, context.repeats), loss, statistics)

    def _attend(self, inputs: AttentionInputs, index: Tensor, repeats: int) -> Tensor:
        """Attend to the selected keys, the sinks and the window."""
        sinks, chunk = self.config.sinks, self.near.window.chunk if self.config.local else None
        if sinks or chunk:
            index = without_seen(index, inputs, sinks, chunk)
        if sinks:
            first = sink_index(sinks, inputs, chunk=chunk)
            index = torch.cat([index, first.expand(*index.shape[:2], -1, -1)], dim=-1)
        k, v = (x[:, ::repeats] for x in (inputs.k, inputs.v))
        chosen = gathered_attention(inputs.q, k, v, index, scale=self.near.scale, dropout=inputs.dropout)
        return chosen[0] if chunk is None else merge([inputs.in_buckets(None, self.near), chosen])[0]

    def learn(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the auxiliary loss of sketches that learn attention, and its statistics: the divergence of each sketch
        from the mean attention of its heads, averaged over sketches. x: (B, L, E).
        """
        key = context.rng.key(context.layer, "sketch sample")
        queries = drawn_positions(key, inputs.q.shape[2], SAMPLES, inputs.q.device)
        size = self.near.window.chunk
        near = (lambda q, k: (k // size <= q // size + 1) & (k // size + 1 >= q // size)) if self.config.local else None
        far = far_pairs(inputs, queries, self.config.sinks, near)
        q, k = self.sketches(x.detach(), inputs, context, exactly=False)
        shares = far_attention(inputs, queries, far, self.near.scale).unflatten(1, (q.shape[1], -1)).mean(2)
        if self.groups == 1 and context.part.size > 1:
            shares = context.part.sum(shares) / context.part.size
        real = None if inputs.key_mask is None else inputs.key_mask[:, queries], inputs.key_mask
        loss, statistics = self._sketch_loss(q[:, :, queries], k, shares, far, real, context)
        return loss * (1.0 / self.spec.layers), statistics

    def _sketch_loss(
        self, q: Tensor, k: Tensor, shares: Tensor, far: Tensor, real: Sequence[Any], context: AttentionContext
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and statistics of sampled queries q (B, S, samples, d), keys k (B, S, L, d), and shares of
        attention (B, S, samples, L), 0 unless `far` (B or 1, samples, L). real: masks of queries and keys, or None.
        """
        sketches = zip(q.unbind(1), k.unbind(1), shares.unbind(1), strict=True)
        loss = torch.stack([sketch_divergence(*of_group, far, real[0]) for of_group in sketches]).mean()
        return loss, {"sketch_loss": loss.detach()}

    def teaching_rate(self, parameter: str, progress: float = 0.0) -> float | None:
        return 3e-3 if self.config.objective == "attention" else None

    def sketches(
        self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, exactly: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of this rank's S sketches, for the tokens in `inputs`: (B, S, L, d) each. Exact
        keys are rounded to the dtype of x, as replaced models cache them.
        """
        rounding = x.dtype
        if self.config.sketch == "heads":
            q, k = inputs.q.detach(), inputs.k.detach()
            q, k = self.query(q, context.part, exactly), self.key(k, context.part, exactly)
        else:
            x = x if exactly else at_least_fp32(x)  # `exact_projection` widens its input itself
            q, k = (self._whole(project(x, exactly), context.part).unsqueeze(1) for project in (self.query, self.key))
        if not self.config.sketch_signs:
            return q, k.to(rounding).to(k.dtype) if exactly else k
        if exactly:
            return signs(q), (k >= 0).unflatten(-1, (-1, 8)).to(k.dtype) @ _powers(k)
        q, k = (x.tanh() + (signs(x) - x.tanh()).detach() for x in (q / 2, k / 2))  # straight-through gradients
        return q, k

    def unpacked(self, k: Tensor) -> Tensor:
        """Return the vectors of indexed keys, of packed bits ±1: (..., d)."""
        if not self.config.sketch_signs:
            return k
        return signs(k.unsqueeze(-1).div(_powers(k), rounding_mode="floor") % 2 - 0.5).flatten(-2)

    def _objective(self, x: Tensor, inputs: AttentionInputs, targets: Targets, part: SequencePart) -> Tensor:
        """Return the sketch's loss. With sequence parallelism, every rank computes the whole loss."""
        target = "answer" if targets.answer else "token" if targets.values.dim() == 2 else "pooled"
        if target != self.config.objective:
            problem = f'"{self.config.objective}" does not match this task, which needs {ASKED[target]}'
            raise ConfigError("model.attention.smart_bird.objective", problem, f'Set it to "{target}"')
        q, k, v = (self._whole(project(x), part) for project in (self.query, self.key, self.value))
        h, _ = _sketch(q, k, v, inputs)
        if self.layer is not None:
            h = self.layer(x, h)
        if target == "token":
            counted = None if targets.counted is None else part.gather(targets.counted, 1)
            targets = Targets(part.gather(targets.values, 1), counted)
        return self.objective(h, targets, inputs.key_mask)

    def _read(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, position: int = 0) -> Tensor:
        """Return the sketch's detached input: the layer's input for this rank's tokens, or token embeddings of the
        whole sequences, in decoding only of the token at `position`.
        """
        if self.embedding is None:
            return x.detach()
        if context.tokens is None:
            problem = '"transformer" embeds tokens, but this model has none'
            raise ConfigError("model.attention.smart_bird.sketch", problem, 'Set it to "attention"')
        tokens, numbers = context.tokens, DocumentRanks.of(inputs).rank.clamp_max(self.spec.max_length - 1) + position
        if inputs.causal:  # nothing precedes a document's first token
            tokens = tokens.masked_fill(numbers == 0, -1)
        return self.embedding(tokens, numbers)

    def word_weights(self) -> tuple[list[Tensor], list[Tensor]]:
        if self.config.objective == "attention":
            return [], []  # trained on attention, not on words
        if self.embedding is not None:
            return [self.embedding.weight], []
        return [], [part.weight for part in (self.query, self.key, self.value)]

    def _whole(self, x: Tensor, part: SequencePart) -> Tensor:
        return x if self.reads_tokens else part.gather(x, 1)

    def flops(self, length: int) -> Passes:
        work = self.spec.workload(length)
        window = work.pairs(work.chunks(self.near.window.chunk)) * self.config.local
        return work.pairs(self.config.keys + self.config.sinks) + window + self._sketch_flops(length, work.visible)

    def _sketch_flops(self, length: int, visible: float) -> Passes:
        """One sketch for all heads: 12·d per key, 2·d more for the selection, its projections of a detached input (4
        per weight), the rest of its layer, and its objective's output over the vocabulary. Sketches that learn
        attention: 2·d per key for the selection, two projections, and for a sample of the queries the detached scores
        of all heads and the scores of the sketches.
        """
        wide, width = self.config.sketch_dim, self.width
        if self.config.objective == "attention":
            heads, dim, sampled = self.spec.heads, self.spec.head_dim, min(SAMPLES, length) / length
            width = heads * dim if self.config.sketch == "heads" else width
            scores = (Passes(2.0 * visible) + product(2.0 * visible * sampled)) * (wide * self.groups)
            return Passes(4.0 * width, 4.0 * width) * wide + scores + Passes(2.0 * dim * heads * visible * sampled)
        outputs = self.spec.vocabulary if self.config.objective == "token" else 0
        attended = product(4.0 * visible) + Passes(2.0 * visible)
        layer = 9 * width if self.layer is not None else 0
        return (attended + Passes(6.0 * width, 6.0 * width) + product(2.0 * (outputs + layer))) * wide

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> SketchCache:
        capacity, groups = self.spec.max_length, self.groups if self.groups == 1 else self.groups // part.shares
        sketch = like.new_zeros(batch, capacity, groups * self.index_width, dtype=torch.float64)
        return SketchCache(KeyValueCache.empty(batch, self.spec.on_rank(part), capacity, like), sketch)

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: SketchCache, context: AttentionContext) -> None:
        self._store(cache, self.index(x, inputs, context), 0)

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: SketchCache, position: int, context: AttentionContext
    ) -> Tensor:
        newest = self.index(x, inputs, context, position)
        self._store(cache, newest, position)
        tokens = CachedTokens.of(position + 1, 1, None, x.device)
        chosen = self.choose(newest, cache.sketch[:, : position + 1], tokens)
        q, k, v, scale = inputs.q, cache.heads.k, cache.heads.v, self.near.scale
        if not self.config.local:
            return gathered_attention(q, k, v, chosen, scale=scale)[0]
        # Round the window and the other keys separately, as `_attend`: another rounding flips keys of later layers.
        sizes = [chosen.shape[-1] - 2 * self.near.window.chunk - self.config.sinks, 2 * self.near.window.chunk]
        keys, _, sinks = chosen.split([*sizes, self.config.sinks], dim=-1)
        chosen = torch.cat([keys, sinks], dim=-1)
        near = cached_window(q, k, v, k.shape[2], position, self.near)
        return merge([near, gathered_attention(q, k, v, chosen, scale=scale)])[0]

    def _store(self, cache: SketchCache, newest: IndexedTokens, position: int) -> None:
        """Store the newest tokens, from `position` on."""
        cache.heads.put(newest.inputs.k, newest.inputs.v, position)
        assert newest.entries is not None
        cache.sketch[:, position : position + newest.entries.shape[1]] = newest.entries

    def index(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, position: int = 0) -> IndexedTokens:
        x = self._read(x, inputs, context, position)
        queries, keys = self.sketches(x, inputs, context)
        return IndexedTokens(inputs, context, keys.transpose(1, 2).flatten(2), queries)

    def choose(self, newest: IndexedTokens, index: Tensor | None, tokens: CachedTokens) -> Tensor:
        assert index is not None and newest.queries is not None
        keys = index.unflatten(2, (newest.queries.shape[1], -1)).transpose(1, 2)  # (B, S, L, d)
        masked = newest.inputs._replace(key_mask=tokens.real)
        chosen = self._choose((newest.queries, keys), masked, newest.context, index.shape[1] - tokens.number)
        sinks, chunk = self.config.sinks, self.near.window.chunk if self.config.local else None
        extra, start = tokens.near(chunk, sinks)
        rank = chosen
        if tokens.real is not None:
            position = chosen.clamp_min(0).long().flatten(1)
            rank = tokens.rank.expand(len(chosen), -1).gather(1, position).view(chosen.shape)
        chosen = chosen.masked_fill((rank < sinks) | (rank >= start[:, None]), -1)
        return torch.cat([chosen, extra[:, None].expand(*chosen.shape[:2], -1, -1)], dim=-1)

    @torch.no_grad()
    def _choose(
        self, sketches: tuple[Tensor, Tensor], inputs: AttentionInputs, context: AttentionContext, first_query: int = 0
    ) -> Tensor:
        """Return the keys of queries from position `first_query` on, (B, sketches, Lq, K), or (B, H, Lq, K) if heads
        draw. sketches: their queries (B, S, Lq, d) and all keys.
        """
        sampling, rng, masks = self.config.sampling, context.rng, (inputs.key_mask, inputs.segments)
        sketches = sketches[0], self.unpacked(sketches[1])
        spec = KeyChoiceSpec(self.config.keys, inputs.causal, sampling)
        if not (sampling == "random" or (sampling != "top_k" and (rng.training or self.config.evaluation == "draws"))):
            (q, k), count = (x.flatten(0, 1) for x in sketches), sketches[0].shape[1]
            real, documents = (None if x is None else x.repeat_interleave(count, dim=0) for x in masks)
            chosen = chosen_keys(q, k, spec, None, None, real, documents, first_query)
            return chosen.unflatten(0, (-1, count)).squeeze(2)
        heads, indices = inputs.q.shape[1] // sketches[0].shape[1], []
        for number, (q, k) in enumerate(zip(*(x.unbind(1) for x in sketches), strict=True)):
            lse, first = None, context.head_offset + number * heads
            rows = rng.rows(first_query + q.shape[1], q.device)[:, first_query:]
            noise = Noise(rng.key(context.layer, "sampled keys"), range(first, first + heads), rows)
            if sampling.startswith("inverse_log"):
                queries = F.pad(q, (0, 0, first_query, 0)) if first_query else q  # padding rows are never read
                lse = _sketch(queries.float(), k.float(), k.float(), inputs)[1][:, first_query:]
            indices.append(chosen_keys(q, k, spec, noise, lse, *masks, first_query))
        return indices[0] if len(indices) == 1 else torch.cat(indices, dim=1)


def signs(x: Tensor) -> Tensor:
    """Return 1 for numbers >= 0 and -1 for others."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def _powers(like: Tensor) -> Tensor:
    """Return the values of the 8 bits of a number in an index. Every dtype represents integers up to 256."""
    return 2.0 ** torch.arange(8, dtype=like.dtype, device=like.device)


class Projection(nn.Module):
    """Linear map of x (B, L, E) -> (B, L, d) in the dtype of x, or exactly: see `exact_projection`."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))

    def forward(self, x: Tensor, exactly: bool = False) -> Tensor:
        return exact_projection(x, self.weight) if exactly else F.linear(x, self.weight.to(x.dtype))


class HeadProjection(nn.Module):
    """Linear map to d numbers of the concatenated queries or keys of G neighbouring heads, per group of heads."""

    def __init__(self, groups: int, width_in: int, width_out: int):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * width_out, width_in))

    def forward(self, x: Tensor, part: SequencePart, exactly: bool = False) -> Tensor:
        """Project this rank's heads x (B, H, L, D) to (B, G, L, d); see `exact_projection`."""
        weights = part.local_part(self.weight, 0).unflatten(0, (self.groups // part.shares, -1))
        grouped = x.unflatten(1, (len(weights), -1)).transpose(2, 3).flatten(3)  # (B, G, L, W)
        if exactly:
            return exact_projection(grouped, weights)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return grouped.to(dtype) @ weights.to(dtype).mT


class SketchEmbedding(nn.Module):
    """Token embeddings plus sinusoidal positions, (B, L, d) in fp32 or wider; token −1 gives only the position."""

    def __init__(self, spec: MechanismSpec, width: int):
        super().__init__()
        self.weight, self.longest = nn.Parameter(torch.empty(spec.vocabulary, width)), spec.max_length

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        """Embed tokens. tokens, numbers: (B, L) int64 token ids and positions."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        embedded = F.embedding(tokens.clamp_min(0), self.weight).to(dtype) * (tokens >= 0).unsqueeze(-1)
        table = sinusoids(0, self.longest, self.weight.shape[1], tokens.device)
        return embedded + F.embedding(numbers, table)


class SketchLayer(nn.Module):
    """Transformer layer around an attention of width d (Vaswani et al. 2017): LN(x + W·a), then LN(y + W2·relu(W1·y))
    with 4d hidden units.
    """

    def __init__(self, width: int):
        super().__init__()
        self.merge = Projection(width, width)
        self.hidden, self.back = Projection(width, 4 * width), Projection(4 * width, width)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(2))

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run the layer. x: (B, L, d), the attention's input. attended: (B, L, d), its output."""
        x = self._norm(0, x + self.merge(attended))
        return self._norm(1, x + self.back(torch.relu(self.hidden(x))))

    def _norm(self, number: int, x: Tensor) -> Tensor:
        scale, shift = (weights[number].to(x.dtype) for weights in (self.scales, self.shifts))
        return F.layer_norm(x, x.shape[-1:], scale, shift)


def _sketch(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    return sketched_attention(q, k, v, causal=inputs.causal, key_mask=inputs.key_mask, segments=inputs.segments)


_LOGIT_ELEMENTS = 1 << 22  # logits of the token objective in memory at a time


class TokenObjective(nn.Module):
    """Objective of a sketch without labels: each position's output h_i predicts the model's target at that position
    (the next or the masked token). Mean nats per counted position.
    """

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, h: Tensor, targets: Targets, key_mask: Tensor | None) -> Tensor:
        """Compute the loss of the sketch's predictions. h: (B, L, d) in fp32 or wider."""
        counted = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
        for mask in (targets.counted, key_mask):
            if mask is not None:
                counted = counted & mask
        counted_targets = targets.values.masked_fill(~counted, 0)

        def score(counted_targets: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            logits = F.linear(h, weight.to(h.dtype), bias.to(h.dtype))  # (B, T, V)
            return F.cross_entropy(logits.transpose(1, 2), counted_targets, reduction="none")

        tiles = -(-counted.numel() * len(self.weight) // _LOGIT_ELEMENTS)
        nats = tiled(score, (counted_targets, h), (self.weight, self.bias), tiles)  # (B, L)
        return torch.where(counted, nats, 0.0).sum() / counted.sum().clamp_min(1)


class PooledObjective(nn.Module):
    """Objective of a sketch with labels: its outputs h_i, pooled by attention Σ_i softmax_i(u·h_i) h_i, predict the
    label (section 3.1) or, not in the paper, every token of the answer. Mean nats per label or counted token.
    """

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.pool = nn.Parameter(torch.empty(1, width))
        self.weight = nn.Parameter(torch.empty(labels, width))
        self.bias = nn.Parameter(torch.zeros(labels))

    def forward(self, h: Tensor, targets: Targets, key_mask: Tensor | None) -> Tensor:
        """Compute the loss of the sketch's predictions. h: (B, L, d) in fp32 or wider. targets.values: (B,) labels, or
        (B, T) tokens.
        """
        score = F.linear(h, self.pool.to(h.dtype)).squeeze(-1)  # (B, L)
        if key_mask is not None:
            score = score.masked_fill(~key_mask, torch.finfo(h.dtype).min)
        pooled = (torch.softmax(score, dim=-1).unsqueeze(-1) * h).sum(1)  # (B, d)
        logits = F.linear(pooled, self.weight.to(h.dtype), self.bias.to(h.dtype))
        if targets.values.dim() == 1:
            return F.cross_entropy(logits, targets.values)
        counted = torch.ones_like(targets.values, dtype=torch.bool) if targets.counted is None else targets.counted
        nats = -torch.log_softmax(logits, dim=-1).gather(1, targets.values.masked_fill(~counted, 0))  # (B, T)
        return torch.where(counted, nats, 0.0).sum() / counted.sum().clamp_min(1)
