"""Components of all models: embedding, a stack of blocks, a tiled output projection, and the objective.

B batch, L length, E d_model, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megasparse.attention.contract import Attention, Targets
from megasparse.attention.cross import EncoderOutput
from megasparse.attention.heads import LayerCache, Padding
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.config.schema import ModelConfig
from megasparse.files import UNSCORED
from megasparse.model.block import Block, Reversible
from megasparse.model.branch import Gathered, Pass, Streams, mean_stream
from megasparse.model.embedding import Embedding
from megasparse.ops.cross_entropy import adaptive_log_probabilities, adaptive_scores, token_scores
from megasparse.ops.normalize import layer_norm
from megasparse.ops.operator import at_least_fp32, linear
from megasparse.ops.random import RngContext, dropout
from megasparse.ops.tiled import tiled


class TokenScores(NamedTuple):
    """Quality of the prediction of each token in a batch: (B, L) each."""

    nats: Tensor
    """−ln p(token), fp32."""
    correct: Tensor
    """True if the token was the most likely one."""
    scored: Tensor
    """True if the model has to predict the token."""


Scored = tuple[TokenScores, Tensor, Tensor, dict[str, Tensor]]
"""Scores, each token's term of the objective (B, L), the sum of auxiliary losses, and the layers' statistics."""


def mean_cost(
    scores: TokenScores, cost: Tensor, divisor: float | None, part: SequencePart = WHOLE
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean `cost` (B, L) over scored tokens, 0 if there are none, and the statistics `nats`, `tokens` and
    `accuracy` of `Transformer.forward`. divisor: replaces the number of scored tokens.
    """
    total, count = torch.where(scores.scored, cost, 0.0).sum(), scores.scored.sum()
    hits = part.sum(torch.stack([(scores.correct & scores.scored).sum(), count]))  # of all parts, in one message
    return total / (count.clamp_min(1) if divisor is None else divisor), {
        "nats": torch.where(scores.scored, scores.nats.detach(), 0.0).sum(),
        "tokens": count,
        "accuracy": hits[0] / hits[1].clamp_min(1),
    }


def padding_of(tokens: Tensor, config: ModelConfig, part: SequencePart = WHOLE) -> Padding:
    """Return the padding and documents of a batch. tokens: (B, L), or this rank's part of them. All tokens except
    `padding_token` are real; each `document_separator` is the last token of its document.
    """
    key_mask, segments = None, None
    if config.padding_token is not None:
        key_mask = part.gather(tokens != config.padding_token, 1)
    if config.document_separator is not None:
        ends = part.gather(tokens == config.document_separator, 1).long()
        segments = ends.cumsum(1) - ends
    return Padding(key_mask, segments, part)


def cut(tokens: Tensor, config: ModelConfig, group: ProcessGroup | None) -> tuple[Tensor, Padding]:
    """Return this rank's part of sequences (B, L) that all S ranks of a group have in full, and their padding. Masked
    tokens are appended if S does not divide L.
    """
    part, padding = SequencePart.of(group), padding_of(tokens, config)
    key_mask, missing = padding.key_mask, -tokens.shape[1] % part.size
    if missing and key_mask is None:
        key_mask = torch.ones_like(tokens, dtype=torch.bool)
    key_mask, segments = (None if x is None else F.pad(x, (0, missing)) for x in (key_mask, padding.segments))
    return part.local_part(F.pad(tokens, (0, missing)), 1), Padding(key_mask, segments, part)


def average_over_layers(statistics: Mapping[str, Mapping[int, Tensor]], layers: int) -> dict[str, Tensor]:
    """Average each statistic over the layers that report it; if several do, also return NAME/layers, NaN for others."""
    means: dict[str, Tensor] = {}
    for name, values in statistics.items():
        means[name] = torch.stack(list(values.values())).mean()
        if len(values) > 1:
            none = torch.full_like(means[name], torch.nan)
            means[f"{name}/layers"] = torch.stack([values.get(layer, none) for layer in range(layers)])
    return means


class _GradientEnd(torch.autograd.Function):
    """Identity of a frozen embedding's output whose result requires a gradient, which is dropped: otherwise a
    recomputed block would get none, and ZeRO 3 would release its weights before its backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, zero: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class Stack(nn.Module):
    """Embedding and blocks: the network from tokens to the input of the output head."""

    gradient_checkpointing = False
    """Set by transformers with the next one in an exported model, to recompute layers that `activations` stores."""
    _gradient_checkpointing_func: Any
    embedding_once: bool = False
    """True in both stacks of an encoder–decoder: reversible streams start as two copies of the embedding e, and one is
    subtracted from their sum at the end, leaving e plus all branches, as with ordinary blocks (docs/lab/streams.md).
    Costs one more tensor of a stream's size. False with `model.embedding_twice`."""

    def __init__(self, config: ModelConfig, embedding: nn.Parameter | nn.Module | None = None):
        """Create the stack. embedding: weight (V, E) shared with another stack; or a module that embeds other inputs,
        called with the input and its first position.
        """
        super().__init__()
        self.config = config
        self.marked = config.marked
        self.embedding_once = self.embedding_once and config.blocks == "reversible" and not config.embedding_twice
        self.embedding: Any = embedding if isinstance(embedding, nn.Module) else Embedding(config, embedding)
        self.layers = [Block(config, layer) for layer in range(config.layers)]
        self.blocks = nn.ModuleList(self.layers)
        checkpoint = config.activations.startswith("checkpoint")
        if checkpoint and config.kind == "encoder" and config.checkpoint_layers == 1:  # never in tiles
            from fairscale.nn import checkpoint_wrapper  # optional dependency

            for block in self.layers:
                checkpoint_wrapper(block, offload_to_cpu=config.activations == "checkpoint_cpu")
        elif checkpoint:
            for i in range(0, config.layers, config.checkpoint_layers):
                self.layers[i].recomputed = self.layers[i : i + config.checkpoint_layers]

    def streams(
        self,
        read: Tensor,
        rng: RngContext,
        padding: Padding,
        targets: Targets | None = None,
        caches: Sequence[LayerCache] | None = None,
        source: EncoderOutput | None = None,
        donated: bool = False,
    ) -> tuple[Streams, Tensor, dict[str, Tensor]]:
        """Return the output streams, the sum of auxiliary losses, and the layers' statistics, see
        `average_over_layers`.

        read: the embedding's input, from position rng.first on. targets: for the mechanisms, in training. caches: empty
        caches, one per layer, to prefill. source: input of cross-attention in an encoder–decoder; None if the caches
        contain it. donated: see `Reversible`.
        """
        config, (tokens, codes) = self.config, self._newest_tokens(read, rng.first, padding)
        run = Pass(rng, padding, targets if rng.training else None, source and source.key_mask, tokens, donated)
        states = None if source is None else source.states
        streams = self._enter(read, rng.first, rng, codes)
        initial = streams[1] if self.embedding_once else None
        if config.activations == "reversible" and torch.is_grad_enabled():
            *streams, total = Reversible.apply(*streams, states, self.layers, run, donated)
        else:
            total = torch.zeros((), device=streams[0].device)
            step = config.checkpoint_layers if caches is None else 1
            for i, block in list(enumerate(self.layers))[::step]:
                arguments = block.update, run, None if caches is None else caches[i], states, *streams
                if self.gradient_checkpointing and rng.training:
                    auxiliary, *streams = self._gradient_checkpointing_func(block, *arguments)
                else:
                    auxiliary, *streams = block(*arguments)
                total = total if auxiliary is None else total + auxiliary
        streams = tuple(streams) if initial is None else (streams[0], streams[1] - initial)
        return streams, total, average_over_layers(run.statistics, config.layers)

    def mechanisms(self) -> Iterator[tuple[int, Attention]]:
        """Yield (layer, mechanism) for every mechanism of self-attention."""
        for layer, block in enumerate(self.layers):
            for kind in block.attention.attention.split:
                yield layer, block.attention.attention.mechanism(kind)

    def _newest_tokens(self, read: Tensor, first: int, padding: Padding) -> tuple[Tensor | None, Tensor | None]:
        """Return the newest token at each position of whole sequences, (B, L), if a mechanism hashes tokens, and the
        codes of n-grams that end at this rank's positions, if the embedding hashes them.
        """
        hashed = any(mechanism.reads_tokens for _, mechanism in self.mechanisms())
        ngrams = self.config.ngrams is not None
        if read.is_floating_point() or not (hashed or ngrams):
            return None, None
        starts = first == 0 and self.config.kind != "encoder"
        newest = F.pad(read, (1, 0), value=-1) if starts else read
        tokens = padding.part.gather(newest, 1)
        local = slice(first, first + newest.shape[1])
        return tokens if hashed else None, self.embedding.ngrams.codes(tokens, padding)[..., local] if ngrams else None

    def _enter(self, tokens: Tensor, first: int, rng: RngContext, codes: Tensor | None = None) -> Streams:
        x = self.embedding(tokens, first) if codes is None else self.embedding(tokens, first, codes)
        if rng.training:
            x = dropout(x, self.config.dropout, rng.key(-1, "embedding dropout"), rng.rows(x.shape[1], x.device))
        if self.config.residual_dtype == "bf16":
            x = x.bfloat16()
        recomputed = self.gradient_checkpointing or self.config.activations != "stored"
        if recomputed and not x.requires_grad and any(weight.requires_grad for weight in self.blocks.parameters()):
            x = _GradientEnd.apply(x, torch.zeros((), device=x.device, requires_grad=True))
        return (x, x) if self.config.blocks == "reversible" else (x,)


class OutputHead(Gathered):
    """Output head, softmax(W·norm(streams)), or the adaptive softmax with rows of W.

    Untied, a reversible stack's two streams are normalised and projected as one vector of width 2·E, as in the
    published Reformer; tied, their mean is projected with the token embedding / √E. With `style` bert it is
    softmax(W·norm(gelu(D·stream + d)) + b), and W, tied or not, is not scaled. `model.logit_scale` replaces the scale.
    """

    def __init__(self, config: ModelConfig, embedding: nn.Parameter):
        """Create the head. embedding: (V, E), also the weight of a tied head."""
        super().__init__()
        streams = 2 if config.blocks == "reversible" else 1
        self.tiles, self.tied, self.eps = config.loss_tiles, config.tied_embeddings, config.norm_eps
        self.smoothing, self.cutoffs = config.label_smoothing, config.adaptive_cutoffs
        width = config.d_model if self.tied else streams * config.d_model
        bert = config.style == "bert"
        self.scale = config.logit_scale or (config.d_model**-0.5 if self.tied and not bert else 1.0)
        # Parameters of this module itself, so that ZeRO 3 gathers them once for all tiles.
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.norm_bias = nn.Parameter(torch.zeros(width)) if config.norm == "layer" else None
        self.weight = embedding if self.tied else nn.Parameter(torch.empty(config.vocabulary, width))
        self.dense = nn.Parameter(torch.empty(width, width)) if bert else None
        self.dense_bias = nn.Parameter(torch.zeros(width)) if bert else None
        self.bias = nn.Parameter(torch.zeros(config.vocabulary)) if bert or config.output_bias else None
        self.clusters = nn.Parameter(torch.empty(len(self.cutoffs), width)) if self.cutoffs else None

    def logits(self, streams: Streams) -> Tensor:
        """Return the logits (..., V) of streams (..., E) in fp32, all positions at once."""
        weights = dict(self.named_parameters(recurse=False))
        hidden = self._hidden(tuple(x.flatten(0, -2) for x in streams), weights)  # (N, E)
        return at_least_fp32(self._logits(hidden, weights)).unflatten(0, streams[0].shape[:-1])  # (..., V)

    def score(self, streams: Streams, targets: Tensor, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return −ln p of every target, (B, L) fp32; True if it was the most likely id, (B, L) bool; and its term of
        the objective, (B, L) fp32: −ln p, in training with label smoothing. Logits exist for L/tiles positions at a
        time.
        """
        weights = dict(self.named_parameters(recurse=False))
        count = len(streams)  # the graph would keep streams that `score` reads

        def score(targets: Tensor, *rest: Tensor) -> Tensor:
            values = dict(zip(weights, rest[count:], strict=True))
            hidden = self._hidden(rest[:count], values).flatten(0, 1)
            return self._scores(hidden, targets.flatten(), values, training).unflatten(0, targets.shape)

        nats, correct, *cost = tiled(score, (targets, *streams), list(weights.values()), self.tiles).unbind(-1)
        return nats, correct.bool(), cost[0] if cost else nats

    def _scores(self, hidden: Tensor, targets: Tensor, weights: Mapping[str, Tensor], training: bool) -> Tensor:
        """Return the outputs of `score` as columns; (N, 2) if the objective equals the nats. hidden: (N, E)."""
        if self.cutoffs:
            nats, correct = adaptive_scores(hidden, targets, weights["weight"], weights["clusters"], self.cutoffs)
            return torch.stack([nats, correct.to(nats.dtype)], dim=-1)
        return token_scores(self._logits(hidden, weights), targets, self.smoothing if training else 0.0)

    def _hidden(self, streams: Streams, weights: Mapping[str, Tensor]) -> Tensor:
        gain, shift = weights["norm_weight"], weights.get("norm_bias")
        if self.scale != 1.0:
            gain, shift = gain * self.scale, None if shift is None else shift * self.scale
        if "dense" in weights:
            (x,) = streams
            x = F.gelu(F.linear(x.to(weights["dense"].dtype), weights["dense"], weights["dense_bias"])).float()
        elif self.tied:
            x = mean_stream(streams)
        else:
            x = torch.cat(list(streams), dim=-1)
        return layer_norm(x, gain, shift, self.eps, weights["weight"].dtype)

    def _logits(self, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return logits of every id; for an adaptive softmax ln p."""
        if self.cutoffs:
            return adaptive_log_probabilities(hidden, weights["weight"], weights["clusters"], self.cutoffs)
        return linear(hidden, weights["weight"], weights.get("bias"))


class Transformer(Stack, ABC):
    """Stack of blocks that predicts tokens. Subclasses define which tokens, from which inputs."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.head = OutputHead(config, self.embedding.weight)
        self.task_weight = min(mechanism.task_weight for _, mechanism in self.mechanisms())
        # Padding and separators are not predicted, so micro-batches can differ in their number of scored tokens.
        self.varying_token_counts = any(
            token is not None for token in (config.padding_token, config.document_separator)
        )
        self.is_autoregressive = config.kind == "decoder"  # an encoder is bidirectional

    @abstractmethod
    def prepare_inputs(self, tokens: Tensor, rng: RngContext, padding: Padding) -> tuple[Tensor, Tensor]:
        """Return the tokens that the embedding reads, and a mask (B, L) of the tokens to predict, given this rank's
        tokens (B, L).
        """

    @abstractmethod
    def count_scored(self, tokens: Tensor, sequence: ProcessGroup | None = None) -> Tensor:
        """Return the number of tokens of a batch (B, L) that the model predicts, for any random draws. sequence: ranks
        that share the sequences, over which the numbers are summed.
        """

    def forward(
        self,
        tokens: Tensor,
        rng: RngContext | None = None,
        padding: Padding | None = None,
        divisor: float | None = None,
        sequence: ProcessGroup | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model and compute its objective.

        Args:
            tokens: (B, L) int64; with `sequence`, this rank's part of the tokens.
            rng: State of the random draws; None means evaluation with seed 0, equal in each call and without dropout.
            padding: None derives it from the tokens, see `padding_of`.
            divisor: Divisor of the sum of nats instead of the number of scored tokens, to average batches with
                different numbers.
            sequence: Ranks that share the sequences; already contained in `padding`, if that is set.

        Returns:
            The objective, mean nats per scored token (in training with label smoothing) plus auxiliary losses, and
            statistics: `nats`, the sum over scored tokens; `tokens`, their number; and means to log, such as
            `accuracy`. All are scalars except NAME/layers, (layers,). Without scored tokens, loss and accuracy are 0.
        """
        padding = padding or padding_of(tokens, self.config, SequencePart.of(sequence))
        rng = (rng or RngContext.evaluation(0, len(tokens))).at(padding.part.rank * tokens.shape[1])
        scores, cost, auxiliary, statistics = self.score(tokens, rng, padding)
        loss, means = mean_cost(scores, cost, divisor, padding.part)
        return self.task_weight * loss + auxiliary, statistics | means

    @torch.no_grad()
    def token_scores(self, tokens: Tensor, rng: RngContext, padding: Padding | None = None) -> TokenScores:
        """Score the prediction of each of this rank's tokens. padding: with the part of shared sequences."""
        padding = padding or padding_of(tokens, self.config)
        return self.score(tokens, rng.at(padding.part.rank * tokens.shape[1]), padding)[0]

    def score(self, tokens: Tensor, rng: RngContext, padding: Padding, source: EncoderOutput | None = None) -> Scored:
        """Score tokens (B, L). source: encoder output from which target tokens are predicted, or None."""
        read, scored = self.prepare_inputs(tokens, rng, padding)
        if self.marked:
            tokens = tokens % UNSCORED
        targets = Targets(tokens, scored)
        streams, auxiliary, statistics = self.streams(read, rng, padding, targets, source=source, donated=True)
        nats, correct, cost = self.head(self.head.score, streams, tokens, rng.training)
        further, more = self._extra_loss(streams, tokens, rng)
        return TokenScores(nats, correct, scored), cost, auxiliary + further, statistics | more

    def _extra_loss(
        self, streams: Streams, tokens: Tensor, rng: RngContext
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Return a loss for predictions other than tokens, and its statistics."""
        return 0.0, {}

    def logits(self, streams: Streams) -> Tensor:
        """Return the logits (..., V) of streams (..., E) in fp32."""
        logits: Tensor = self.head(self.head.logits, streams)
        return logits
