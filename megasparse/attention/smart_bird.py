"""Smart Bird (Wu et al. 2021): a narrow single-head sketch of the attention says which few keys each query attends to.

B batch, H heads, L length, D head dim, E width of the layer's input, d width of the sketch, K keys, V vocabulary.
"""

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
    CachedTokens,
    MechanismSpec,
    Passes,
    Targets,
    product,
)
from megasparse.attention.far_attention import SAMPLES, drawn_positions, far_attention, far_pairs, sketch_divergence
from megasparse.attention.full import Cache, KeyValueCache
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


ASKED = {"token": "a token a position", "pooled": "a label a sequence", "answer": "the tokens of an answer"}
"""Targets of a sketch, by its objective."""


@dataclass
class SketchCache(Cache):
    """The heads' keys and values, and the keys of all sketches side by side, (B, capacity, sketches·d) in float64."""

    heads: KeyValueCache
    sketch: Tensor


class SmartBirdAttentionConfig(MechanismSection):
    keys: Positive = 20
    """K, keys a query attends to."""
    sketch_dim: Positive = 4
    """Width d of the single-head sketch."""
    sketch: Literal["attention", "transformer", "heads"] = "attention"
    """`attention`: one narrow attention on the layer's input. `transformer`: a Transformer layer of `sketch_dim` on
    embeddings of tokens of its own, with sinusoidal positions (Eq. 1). `heads`: one for every `sketch_heads` heads, on
    their own queries and keys, as they are after the rotation."""
    sketch_heads: Positive = 1
    """With heads only: neighbouring heads that share a sketch, and the keys that it picks."""
    evaluation: Literal["top_k", "draws"] = "top_k"
    """Evaluation takes the K largest weights, the same keys for all heads, or draws by head as training does."""
    sampling: Literal["inverse_log_squared", "inverse_log", "raw", "top_k", "random"] = "inverse_log_squared"
    """Function from a sketched weight to a sampling score (the paper's Figure 4)."""
    objective: Literal["token", "pooled", "answer", "attention"] = "token"
    """Objective of the sketch itself: `token`, each position's target (language modelling, masked tokens); `pooled`,
    the sequence's label, from an attention-pooled vector (the paper); `answer`, in the encoder of an encoder–decoder,
    which tokens the target has, from the same vector; `attention`, the full attention of its heads to what is beyond
    the window and the sinks, from 256 queries a step.
    """
    labels: Positive | None = None
    """With pooled only: number of labels."""
    local: bool = False
    """A window beside the chosen keys, in the same softmax, a key in both once: a token's own chunk of positions and
    the chunk before, in an encoder also the chunk after."""
    chunk: Positive = 64
    """With local only: positions a chunk."""
    sinks: Count = 0
    """First tokens of each document that every later one sees (in an encoder every one), in the same softmax, each
    once."""

    def check(self, key: str, model: "ModelConfig") -> None:
        if (self.objective == "pooled") != (self.labels is not None):
            labels = "null" if self.labels is None else self.labels
            problem = f'{labels} does not fit objective = "{self.objective}"'
            raise ConfigError(f"{key}.labels", problem, 'Give the number of labels with "pooled", null with others')
        if self.sketch == "heads" and self.objective != "attention":
            problem = f'"{self.objective}" is predicted from values, but sketch = "heads" has queries and keys alone'
            raise ConfigError(f"{key}.objective", problem, 'Set it to "attention"')
        if self.sketch == "transformer" and self.objective == "attention":
            problem = '"transformer" is trained by what it predicts, not by attention'
            raise ConfigError(f"{key}.sketch", problem, 'Set it to "heads" or "attention", or change objective')
        if self.sketch_heads > 1 and self.sketch != "heads":
            problem = f'{self.sketch_heads} heads share a sketch, but with sketch = "{self.sketch}" all of a layer do'
            raise ConfigError(f"{key}.sketch_heads", problem, 'Set it to 1, or sketch to "heads"')
        for layer in range(len(model.attention.pattern)):
            if (heads := heads_of_layer(model, layer).get("smart_bird", 0)) % self.sketch_heads:
                problem = f"{self.sketch_heads} does not divide the {heads} heads of a layer"
                raise ConfigError(f"{key}.sketch_heads", problem, "Set it to a divisor")

    @property
    def joined(self) -> str | None:
        return None if self.sketch == "heads" else 'all have one sketch, unless sketch = "heads"'

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
    takes the K keys with the largest s_ij. In evaluation all heads take the K largest p_ij, earlier keys first if
    equal; with evaluation = "draws" or sampling = "random" they draw as in training. A query with at most K visible
    keys attends to all of them. A causal sketch normalises α_i over j <= i, so later tokens never change a selection.
    An optional window (as in local attention) and sinks join the selected keys in one softmax, each key once.

    A selection is not differentiable, so the task's loss does not reach the sketch. A separate loss trains it: it
    predicts the task's targets, or with objective = "attention" the heads' full attention. The sketch reads the layer's
    detached input; "transformer" reads its own token embeddings, "heads" queries and keys of `sketch_heads` heads.
    """

    def __init__(self, config: SmartBirdAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        window = Window("chunk", min(config.chunk, spec.max_length), ahead=not spec.causal)
        self.near = BucketedAttentionSpec(window, spec.causal, spec.head_dim**-0.5, exclude_self=False)
        self.reads_tokens = config.sketch == "transformer"
        self.width = config.sketch_dim if self.reads_tokens else spec.d_model
        self.query: Any
        self.key: Any
        self.groups = 1
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
        return AttentionOutput(self._attend(inputs, index), loss, statistics)

    def _attend(self, inputs: AttentionInputs, index: Tensor) -> Tensor:
        """Attention to the chosen keys, the sinks and the window."""
        sinks, chunk = self.config.sinks, self.near.window.chunk if self.config.local else None
        if sinks or chunk:
            index = without_seen(index, inputs, sinks, chunk)
        if sinks:
            first = sink_index(sinks, inputs, chunk=chunk)
            index = torch.cat([index, first.expand(*index.shape[:2], -1, -1)], dim=-1)
        index = _by_head(index, inputs.q.shape[1])
        chosen = gathered_attention(*inputs[:3], index, scale=self.near.scale, dropout=inputs.dropout)
        return chosen[0] if chunk is None else merge([inputs.in_buckets(None, self.near), chosen])[0]

    def learn(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> tuple[Tensor, dict[str, Tensor]]:
        """The auxiliary loss of a training pass where sketches learn attention, and its statistics: the divergence of
        each from the mean attention of its heads, mean over sketches. x: (B, L, E).
        """
        key = context.rng.key(context.layer, "sketch sample")
        queries = drawn_positions(key, inputs.q.shape[2], SAMPLES, inputs.q.device)
        chunk = self.near.window.chunk
        far = far_pairs(
            inputs, queries, self.config.sinks,
            (lambda q, k: (q // chunk - k // chunk).abs() <= 1) if self.config.local else None,
        )  # fmt: skip
        sketches, losses = self.sketches(x.detach(), inputs, context, exactly=False), []
        shares = far_attention(inputs, queries, far, self.near.scale).unflatten(1, (len(sketches), -1)).mean(2)
        if self.groups == 1 and context.part.size > 1:
            shares = context.part.sum(shares) / context.part.size
        for number, (q, k) in enumerate(sketches):
            losses.append(sketch_divergence(q[:, queries], k, shares[:, number], far))
        loss = torch.stack(losses).mean()
        return loss * (1.0 / self.spec.layers), {"sketch_loss": loss.detach()}

    def teaching_rate(self) -> float | None:
        return 3e-3 if self.config.objective == "attention" else None

    def sketches(
        self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, exactly: bool = True
    ) -> list[tuple[Tensor, Tensor]]:
        """Queries and keys of each sketch whose heads are here, of the tokens in `inputs`: (B, L, d) each."""
        if self.config.sketch == "heads":
            q, k = inputs.q.detach(), inputs.k.detach()
            return list(zip(self.query(q, context.part, exactly), self.key(k, context.part, exactly), strict=True))
        x = x if exactly else at_least_fp32(x)  # an exact projection widens what it reads itself
        q, k = (self._whole(project(x, exactly), context.part) for project in (self.query, self.key))
        return [(q, k)]

    def _objective(self, x: Tensor, inputs: AttentionInputs, targets: Targets, part: SequencePart) -> Tensor:
        """The sketch's own loss. Where ranks share sequences, each has the whole loss, from the projections of all."""
        target = "answer" if targets.answer else "token" if targets.values.dim() == 2 else "pooled"
        if target != self.config.objective:
            problem = f'"{self.config.objective}" does not fit this task, which asks for {ASKED[target]}'
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
        """The input of the sketch, which the task's loss does not reach: the layer's, of the tokens that are here, or
        embeddings of the whole sequences, in decoding of the token at `position`.
        """
        if self.embedding is None:
            return x.detach()
        if context.tokens is None:
            problem = '"transformer" embeds tokens, but this model reads none'
            raise ConfigError("model.attention.smart_bird.sketch", problem, 'Set it to "attention"')
        tokens, numbers = context.tokens, DocumentRanks.of(inputs).rank.clamp_max(self.spec.max_length - 1) + position
        if inputs.causal:  # a decoder's first token knows none of its document
            tokens = tokens.masked_fill(numbers == 0, -1)
        return self.embedding(tokens, numbers)

    def word_weights(self) -> tuple[list[Tensor], list[Tensor]]:
        if self.config.objective == "attention":
            return [], []  # learned from heads and layers as they are, not from words
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
        """The sketch, one of all heads: 12·d a key, 2·d more to choose by, its projections of an input without gradient
        (4 a weight), the rest of its layer, and its objective's output over the vocabulary. Sketches that learn
        attention: 2·d a key to choose by, their two projections, and for a sample of the queries the scores of all
        heads, without gradient, and of the sketches.
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
        sketch = like.new_zeros(batch, capacity, groups * self.config.sketch_dim, dtype=torch.float64)
        return SketchCache(KeyValueCache.empty(batch, self.spec.on_rank(part), capacity, like), sketch)

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: SketchCache, context: AttentionContext) -> None:
        cache.heads.put(inputs.k, inputs.v)
        cache.sketch[:, : inputs.k.shape[2]] = self.index(x, inputs, context)[0]

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: SketchCache, position: int, context: AttentionContext
    ) -> Tensor:
        cache.heads.put(inputs.k, inputs.v, position)
        cache.sketch[:, position : position + 1], queries = self.index(x, inputs, context, position)
        tokens = CachedTokens.of(position + 1, 1, None, x.device)
        chosen = _by_head(self.choose(queries, cache.sketch[:, : position + 1], tokens), inputs.q.shape[1])
        return gathered_attention(inputs.q, cache.heads.k, cache.heads.v, chosen, scale=self.near.scale)[0]

    def index(
        self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, position: int = 0
    ) -> tuple[Tensor, Any]:
        x = self._read(x, inputs, context, position)
        queries, keys = zip(*self.sketches(x, inputs, context), strict=True)
        return torch.cat(keys, dim=-1), (queries, inputs, context)

    def choose(self, queries: Any, index: Tensor | None, tokens: CachedTokens) -> Tensor:
        assert index is not None
        sketched, inputs, context = queries
        pairs = list(zip(sketched, index.split(self.config.sketch_dim, dim=-1), strict=True))
        masked = inputs._replace(key_mask=tokens.real)
        chosen = self._choose(pairs, masked, context, index.shape[1] - tokens.number).long()
        sinks, chunk = self.config.sinks, self.near.window.chunk if self.config.local else None
        beside, start = tokens.near(chunk, sinks)
        rank = tokens.rank.expand(len(chosen), -1).gather(1, chosen.clamp_min(0).flatten(1)).view(chosen.shape)
        chosen = chosen.masked_fill((rank < sinks) | (rank >= start[:, None]), -1)
        return torch.cat([chosen, beside[:, None].expand(*chosen.shape[:2], -1, -1)], dim=-1)

    @torch.no_grad()
    def _choose(
        self,
        sketches: list[tuple[Tensor, Tensor]],
        inputs: AttentionInputs,
        context: AttentionContext,
        first_query: int = 0,
    ) -> Tensor:
        """The index (B, sketches, Lq, K), or where heads draw (B, H, Lq, K), of the queries from position `first_query`
        on. sketches: their queries (B, Lq, d), and all keys, of each.
        """
        sampling, rng, masks = self.config.sampling, context.rng, (inputs.key_mask, inputs.segments)
        spec = KeyChoiceSpec(self.config.keys, inputs.causal, sampling)
        if not (sampling == "random" or (sampling != "top_k" and (rng.training or self.config.evaluation == "draws"))):
            (q, k), (real, documents), count = sketches[0], masks, len(sketches)
            if count > 1:  # side by side in the batch
                q, k = (torch.stack(x, dim=1).flatten(0, 1) for x in zip(*sketches, strict=True))
                real, documents = (None if x is None else x.repeat_interleave(count, dim=0) for x in masks)
            chosen = chosen_keys(q, k, spec, None, None, real, documents, first_query)
            return chosen.unflatten(0, (-1, count)).squeeze(2)
        heads, indices = inputs.q.shape[1] // len(sketches), []
        for number, (q, k) in enumerate(sketches):
            lse, first = None, context.head_offset + number * heads
            rows = rng.rows(first_query + q.shape[1], q.device)[:, first_query:]
            noise = Noise(rng.key(context.layer, "sampled keys"), range(first, first + heads), rows)
            if sampling.startswith("inverse_log"):
                queries = F.pad(q, (0, 0, first_query, 0)) if first_query else q  # none of those before is read
                lse = _sketch(queries.float(), k.float(), k.float(), inputs)[1][:, first_query:]
            indices.append(chosen_keys(q, k, spec, noise, lse, *masks, first_query))
        return indices[0] if len(indices) == 1 else torch.cat(indices, dim=1)


def _by_head(index: Tensor, heads: int) -> Tensor:
    """An index (B, I, L, K) for each of the heads; of one, or of all, as it is."""
    return index if index.shape[1] in (1, heads) else index.repeat_interleave(heads // index.shape[1], dim=1)


class Projection(nn.Module):
    """Linear map of x (B, L, E) -> (B, L, d) in the dtype of x, or exactly: see `exact_projection`."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))

    def forward(self, x: Tensor, exactly: bool = False) -> Tensor:
        return exact_projection(x, self.weight) if exactly else F.linear(x, self.weight.to(x.dtype))


class HeadProjection(nn.Module):
    """A linear map of G neighbouring heads' queries or keys, side by side, to d numbers, for each group of heads."""

    def __init__(self, groups: int, width_in: int, width_out: int):
        super().__init__()
        self.groups, self.width_in = groups, width_in
        self.weight = nn.Parameter(torch.empty(groups * width_out, width_in))

    def forward(self, x: Tensor, part: SequencePart, exactly: bool = False) -> list[Tensor]:
        """Project heads x (B, H, L, D), those that are here, to (B, L, d) of each group; see `exact_projection`."""
        weights = part.local_part(self.weight, 0).chunk(self.groups // part.shares)
        grouped = [heads.transpose(1, 2).flatten(2) for heads in x.split(self.width_in // x.shape[3], dim=1)]
        project = exact_projection if exactly else _project
        return [project(vectors, weight) for vectors, weight in zip(grouped, weights, strict=True)]


def _project(x: Tensor, weight: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype))


class SketchEmbedding(nn.Module):
    """Embeddings of tokens and sinusoidal positions, (B, L, d) in fp32 at least; a token of −1 is its position."""

    def __init__(self, spec: MechanismSpec, width: int):
        super().__init__()
        self.weight, self.longest = nn.Parameter(torch.empty(spec.vocabulary, width)), spec.max_length

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        """Embed tokens. tokens, numbers: (B, L) int64, the numbers those of positions."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        embedded = F.embedding(tokens.clamp_min(0), self.weight).to(dtype) * (tokens >= 0).unsqueeze(-1)
        table = sinusoids(0, self.longest, self.weight.shape[1], tokens.device)
        return embedded + F.embedding(numbers, table)


class SketchLayer(nn.Module):
    """The rest of a Transformer layer around an attention of width d (Vaswani et al. 2017): LN(x + W·a), then LN(y +
    W2·relu(W1·y)) with 4d hidden units.
    """

    def __init__(self, width: int):
        super().__init__()
        self.merge = Projection(width, width)
        self.hidden, self.back = Projection(width, 4 * width), Projection(4 * width, width)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(2))

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run the layer. x: (B, L, d), what the attention read. attended: (B, L, d), its output."""
        x = self._norm(0, x + self.merge(attended))
        return self._norm(1, x + self.back(torch.relu(self.hidden(x))))

    def _norm(self, number: int, x: Tensor) -> Tensor:
        scale, shift = (weights[number].to(x.dtype) for weights in (self.scales, self.shifts))
        return F.layer_norm(x, x.shape[-1:], scale, shift)


def _sketch(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    return sketched_attention(q, k, v, causal=inputs.causal, key_mask=inputs.key_mask, segments=inputs.segments)


_LOGIT_ELEMENTS = 1 << 22  # logits of the token objective that exist at a time


class TokenObjective(nn.Module):
    """The sketch's objective where there is no label: each position's output h_i predicts the model's own target there
    (the next token, or the masked one). Mean nats a counted position.
    """

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, h: Tensor, targets: Targets, key_mask: Tensor | None) -> Tensor:
        """Compute the loss of the sketch's predictions. h: (B, L, d) in fp32 at least."""
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
    """The sketch's objective where a sequence has a label: its outputs h_i, pooled by attention Σ_i softmax_i(u·h_i)
    h_i, predict it (section 3.1), or, which the paper does not have, each token of the answer alike. Mean nats a label,
    or a token that counts.
    """

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.pool = nn.Parameter(torch.empty(1, width))
        self.weight = nn.Parameter(torch.empty(labels, width))
        self.bias = nn.Parameter(torch.zeros(labels))

    def forward(self, h: Tensor, targets: Targets, key_mask: Tensor | None) -> Tensor:
        """Compute the loss of the sketch's predictions. h: (B, L, d) in fp32 at least. targets.values: (B,) labels, or
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
