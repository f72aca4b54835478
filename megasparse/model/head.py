"""The output: norm, projection, and each token's score. B batch, L length, E d_model, V vocabulary."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.config.schema import ModelConfig
from megasparse.model.branch import Streams, mean_stream
from megasparse.ops.adaptive_softmax import adaptive_log_probabilities, adaptive_scores
from megasparse.ops.cross_entropy import token_scores
from megasparse.ops.normalize import layer_norm
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.tiled import tiled


class OutputHead(nn.Module):
    """Output head, softmax(W·norm(streams)), or the adaptive softmax with rows of W.

    Untied, a reversible stack's two streams are normalised and projected side by side, 2·E wide, as in the published
    Reformer; tied, their mean is, against the token embedding / √E. With `style` bert it is
    softmax(W·norm(gelu(D·stream + d)) + b), and W, tied or not, is not scaled. `model.logit_scale` scales W otherwise.
    """

    def __init__(self, config: ModelConfig, embedding: nn.Parameter):
        """Make the head. embedding: (V, E), a tied head's weight too."""
        super().__init__()
        streams = 2 if config.blocks == "reversible" else 1
        self.tiles, self.tied, self.eps = config.loss_tiles, config.tied_embeddings, config.norm_eps
        self.smoothing, self.cutoffs = config.label_smoothing, config.adaptive_cutoffs
        width = config.d_model if self.tied else streams * config.d_model
        bert = config.style == "bert"
        self.scale = config.logit_scale or (config.d_model**-0.5 if self.tied and not bert else 1.0)
        # Parameters of this very module: under ZeRO 3 its call gathers them once for all tiles.
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.norm_bias = nn.Parameter(torch.zeros(width)) if config.norm == "layer" else None
        self.weight = embedding if self.tied else nn.Parameter(torch.empty(config.vocabulary, width))
        self.dense = nn.Parameter(torch.empty(width, width)) if bert else None
        self.dense_bias = nn.Parameter(torch.zeros(width)) if bert else None
        self.bias = nn.Parameter(torch.zeros(config.vocabulary)) if bert or config.output_bias else None
        self.clusters = nn.Parameter(torch.empty(len(self.cutoffs), width)) if self.cutoffs else None

    def forward(
        self, streams: Streams, targets: Tensor | None, training: bool = False
    ) -> tuple[Tensor, Tensor, Tensor] | Tensor:
        """−ln p of every target, (B, L) fp32; whether it was the likeliest, (B, L) bool; and what the objective is to
        lower for it, (B, L) fp32: the same −ln p, in training with label smoothing. Without targets the logits of the
        last position, (B, V) fp32.

        Norm, logits and softmax exist for L/tiles positions at a time, forward and backward.
        """
        weights = dict(self.named_parameters(recurse=False))
        if targets is None:
            return at_least_fp32(self._logits(self._hidden(tuple(x[:, -1] for x in streams), weights), weights))

        def score(targets: Tensor, *rest: Tensor) -> Tensor:
            values = dict(zip(weights, rest[len(streams) :], strict=True))
            hidden = self._hidden(rest[: len(streams)], values).flatten(0, 1)
            return self._scores(hidden, targets.flatten(), values, training).unflatten(0, targets.shape)

        nats, correct, *cost = tiled(score, (targets, *streams), list(weights.values()), self.tiles).unbind(-1)
        return nats, correct.bool(), cost[0] if cost else nats

    def _scores(self, hidden: Tensor, targets: Tensor, weights: Mapping[str, Tensor], training: bool) -> Tensor:
        """The outputs of `forward` in columns; (N, 2) where the objective is the nats. hidden: (N, E)."""
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
        """Logits of every id; of an adaptive softmax ln p, whose softmax is that p."""
        if self.cutoffs:
            return adaptive_log_probabilities(hidden, weights["weight"], weights["clusters"], self.cutoffs)
        return F.linear(hidden, weights["weight"], weights.get("bias"))
