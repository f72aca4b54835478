"""Smart Bird (Wu et al. 2021): a narrow single-head sketch of the attention selects the keys that queries attend to."""

from operator import itemgetter
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, AttentionInputs, MechanismSpec, Targets
from megasparse.attention.flops import Flops, product
from megasparse.attention.sequence_part import SequencePart
from megasparse.attention.sinks import DocumentRanks
from megasparse.attention.taught_sketch import SketchSection, TaughtSketch
from megasparse.config.attention import mechanism
from megasparse.config.schema import ModelConfig
from megasparse.config.section import Positive
from megasparse.errors import ConfigError
from megasparse.ops.operator import ParameterList, at_least_fp32
from megasparse.ops.positions import sinusoids
from megasparse.ops.sketch import KeyChoiceSpec, Noise, chosen_keys, exact_projection, sketched_attention
from megasparse.ops.tiled import tiled

ASKED = {"token": "one token per position", "pooled": "one label per sequence", "answer": "the tokens of an answer"}
"""Descriptions of a sketch's targets, by objective."""


class SmartBirdAttentionConfig(SketchSection):
    keys: Positive = 20
    """K, number of keys per query."""
    sketch_dim: Positive = 4
    """Width d of the single-head sketch."""
    sketch: Literal["attention", "transformer", "heads"] = "attention"
    """`attention`: one narrow attention over the layer's input. `transformer`: a Transformer layer of width
    `sketch_dim` over separate token embeddings, with sinusoidal positions (Eq. 1). `heads`: one sketch for every
    `sketch_heads` heads, from their queries and keys after rotation."""
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

    def check(self, key: str, model: ModelConfig) -> None:
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
        super().check(key, model)

    @property
    def joined(self) -> str | None:
        return None if self.sketch == "heads" else 'all heads share one sketch, unless sketch = "heads"'

    @property
    def predicts(self) -> Literal["token", "pooled", "answer"] | None:
        return None if self.objective == "attention" else self.objective

    def with_labels(self, labels: int) -> "SmartBirdAttentionConfig":
        if self.predicts is None:
            return self
        return self.changed(objective="pooled", labels=labels)


@mechanism("smart_bird", SmartBirdAttentionConfig)
class SmartBirdAttention(TaughtSketch):
    """Softmax attention of each query to K keys that a narrow attention, the sketch, selects (Smart Bird Eq. 1 to 3).

    The sketch computes weights α_ij, over j <= i if causal, and scores p_ij = (1/log α_ij)². In training each head
    draws s_ij ~ U(0, p_ij) and takes the K keys with the largest s_ij. In evaluation all heads take the K largest p_ij,
    with ties to earlier keys, unless they draw. An optional window (as in local attention) and sinks join the selected
    keys in one softmax, each key once.

    A separate loss trains the sketch on the task's targets or on the heads' full attention.
    """

    def __init__(self, config: SmartBirdAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.reads_tokens = config.sketch == "transformer"
        if config.sketch != "heads":  # one sketch of the layer's input for all heads
            self.groups = 1
            self.width = config.sketch_dim if self.reads_tokens else spec.d_model
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

    def attends_prefix(self, group: int, ranks: int) -> bool:
        draws = self.config.sampling != "top_k" or self.config.evaluation == "draws"
        return self.config.sketch == "heads" and not draws and super().attends_prefix(group, ranks)

    def _auxiliary(
        self, x: Tensor, inputs: AttentionInputs, context: AttentionContext
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        if self.config.objective == "attention":
            return super()._auxiliary(x, inputs, context)
        targets = context.targets
        part = context.part
        if targets is None:
            return None, {}
        target = "answer" if targets.answer else "token" if targets.values.dim() == 2 else "pooled"
        if target != self.config.objective:
            problem = f'"{self.config.objective}" does not match this task, which needs {ASKED[target]}'
            raise ConfigError("model.attention.smart_bird.objective", problem, f'Set it to "{target}"')
        # With sequence parallelism, every rank computes the whole loss.
        q, k, v = (self._whole(project(x), part) for project in (self.query, self.key, self.value))
        h, _ = _sketch(q, k, v, inputs)
        if self.layer is not None:
            h = self.layer(x, h)
        if target == "token":
            counted = None if targets.counted is None else part.gather(targets.counted, 1)
            targets = Targets(part.gather(targets.values, 1), counted)
        loss = self.objective(h, targets, inputs.key_mask)
        return loss * (1.0 / self.spec.layers), {"sketch_loss": loss.detach()}

    def teaching_rate(self, parameter: str, progress: float = 0.0) -> float | None:
        return super().teaching_rate(parameter, progress) if self.config.objective == "attention" else None

    def _project(
        self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, exactly: bool
    ) -> tuple[Tensor, Tensor]:
        if self.config.sketch == "heads":
            return super()._project(x, inputs, context, exactly)
        x = x if exactly else at_least_fp32(x)  # `exact_projection` widens its input itself
        q, k = (self._whole(project(x, exactly), context.part).unsqueeze(1) for project in (self.query, self.key))
        return q, k  # (B, 1, L, d)

    def _read(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, position: int = 0) -> Tensor:
        """Return the sketch's detached input, or token embeddings of the whole sequences, in decoding of the token at
        `position`.
        """
        if self.embedding is None:
            return x.detach()
        if context.tokens is None:
            problem = '"transformer" embeds tokens, but this model has none'
            raise ConfigError("model.attention.smart_bird.sketch", problem, 'Set it to "attention"')
        tokens = context.tokens
        numbers = DocumentRanks.of(inputs).rank.clamp_max(self.spec.max_length - 1) + position
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

    def _sketch_flops(self, length: int, visible: float) -> Flops:
        """One sketch for all heads: 12·d per key, 2·d more for the selection, its projections of a detached input (4
        per weight), the rest of its layer, and its objective's output.
        """
        if self.config.objective == "attention":
            return super()._sketch_flops(length, visible)
        wide = self.config.sketch_dim
        width = self.width
        outputs = self.spec.vocabulary if self.config.objective == "token" else 0
        attended = product(4.0 * visible) + Flops(2.0 * visible)
        layer = 9 * width if self.layer is not None else 0
        return (attended + Flops(6.0 * width, 6.0 * width) + product(2.0 * (outputs + layer))) * wide

    @torch.no_grad()
    def _choose(
        self, sketches: tuple[Tensor, Tensor], inputs: AttentionInputs, context: AttentionContext, first_query: int = 0
    ) -> Tensor:
        """Return the keys as `TaughtSketch`, or (B, H, Lq, K) if heads draw."""
        sampling = self.config.sampling
        rng = context.rng
        draws = rng.training or self.config.evaluation == "draws"
        if not (sampling == "random" or (sampling != "top_k" and draws)):
            return super()._choose(sketches, inputs, context, first_query)
        sketches = sketches[0], self.unpacked(sketches[1])
        spec = KeyChoiceSpec(self.config.keys, inputs.causal, sampling)
        heads = inputs.q.shape[1] // sketches[0].shape[1]
        indices = []
        for number, (q, k) in enumerate(zip(*(x.unbind(1) for x in sketches), strict=True)):
            lse = None
            group = context.heads(inputs.q.shape[1])[number * heads : (number + 1) * heads]
            rows = rng.rows(first_query + q.shape[1], q.device)[:, first_query:]
            noise = Noise(context.key("sampled keys"), group, rows)
            if sampling.startswith("inverse_log"):
                queries = F.pad(q, (0, 0, first_query, 0)) if first_query else q  # padding rows are never read
                lse = _sketch(queries.float(), k.float(), k.float(), inputs)[1][:, first_query:]
            indices.append(chosen_keys(q, k, spec, noise, lse, inputs.key_mask, inputs.segments, first_query))
        return indices[0] if len(indices) == 1 else torch.cat(indices, dim=1)


class Projection(nn.Module):
    """Linear map of x (B, L, E) -> (B, L, d) in the dtype of x, or exactly: see `exact_projection`."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))

    def forward(self, x: Tensor, exactly: bool = False) -> Tensor:
        return exact_projection(x, self.weight) if exactly else F.linear(x, self.weight.to(x.dtype))


class SketchEmbedding(nn.Module):
    """Token embeddings plus sinusoidal positions, (B, L, d) in fp32 or wider; token −1 gives only the position."""

    def __init__(self, spec: MechanismSpec, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocabulary, width))
        self.longest = spec.max_length

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        embedded = at_least_fp32(F.embedding(tokens.clamp_min(0), self.weight)) * (tokens >= 0).unsqueeze(-1)
        table = sinusoids(0, self.longest, self.weight.shape[1], tokens.device)
        return embedded + F.embedding(numbers, table)


class SketchLayer(nn.Module):
    """Transformer layer around an attention of width d (Vaswani et al. 2017), with 4d hidden units."""

    def __init__(self, width: int):
        super().__init__()
        self.merge = Projection(width, width)
        self.hidden = Projection(width, 4 * width)
        self.back = Projection(4 * width, width)
        self.scales = ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.shifts = ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(2))

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run the layer. x: (B, L, d), the attention's input. attended: its output."""
        x = self._norm(0, x + self.merge(attended))
        return self._norm(1, x + self.back(torch.relu(self.hidden(x))))

    def _norm(self, number: int, x: Tensor) -> Tensor:
        scale, shift = (weights(itemgetter(number)).to(x.dtype) for weights in (self.scales, self.shifts))
        return F.layer_norm(x, x.shape[-1:], scale, shift)


def _sketch(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    return sketched_attention(q, k, v, causal=inputs.causal, key_mask=inputs.key_mask, segments=inputs.segments)


_LOGIT_ELEMENTS = 1 << 22  # logits of the token objective in memory at a time


class TokenObjective(nn.Module):
    """Objective of a sketch without labels: each position's output h_i predicts the model's target there. Mean nats per
    counted position.
    """

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, h: Tensor, targets: Targets, key_mask: Tensor | None) -> Tensor:
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
    label (section 3.1) or, not in the paper, every token of the answer. Mean nats.
    """

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.pool = nn.Parameter(torch.empty(1, width))
        self.weight = nn.Parameter(torch.empty(labels, width))
        self.bias = nn.Parameter(torch.zeros(labels))

    def forward(self, h: Tensor, targets: Targets, key_mask: Tensor | None) -> Tensor:
        """Compute the loss. h: (B, L, d). targets.values: (B,) labels, or (B, T) tokens."""
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
