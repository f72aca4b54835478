"""The output: norm, projection to the vocabulary, and the score of every token. B batch, L length, E d_model, V
vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.config.schema import ModelConfig
from megasparse.model.block import Streams
from megasparse.ops.tiled import tiled


class OutputHead(nn.Module):
    """softmax(W·norm(streams)).

    Untied, a reversible stack's two streams are normalised and projected side by side, 2·E wide, as in the published
    Reformer; tied, their mean is, against the token embedding / √E. With `style` bert it is
    softmax(W·norm(gelu(D·stream + d)) + b), and W, tied or not, is not scaled.
    """

    def __init__(self, config: ModelConfig, embedding: nn.Parameter):
        """embedding: (V, E), a tied head's weight too."""
        super().__init__()
        streams = 2 if config.blocks == "reversible" else 1
        self.tiles, self.tied, self.eps = config.loss_tiles, config.tied_embeddings, config.norm_eps
        width = config.d_model if self.tied else streams * config.d_model
        # Parameters of this very module: under ZeRO 3 its call gathers them once for all tiles.
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.norm_bias = nn.Parameter(torch.zeros(width))
        self.weight = embedding if self.tied else nn.Parameter(torch.empty(config.vocabulary, width))
        self.bert = config.style == "bert"
        if self.bert:
            self.dense = nn.Parameter(torch.empty(width, width))
            self.dense_bias = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(config.vocabulary)) if self.bert or config.output_bias else None

    def forward(self, streams: Streams, targets: Tensor | None) -> tuple[Tensor, Tensor] | Tensor:
        """−ln p of every target, (B, L) fp32, and whether it was the likeliest, (B, L) bool; without targets the
        logits of the last position, (B, V) fp32.

        Norm, logits and softmax exist for L/tiles positions at a time, forward and backward.
        """
        weights = [self.norm_weight, self.norm_bias, self.weight]
        if self.bias is not None:
            weights.append(self.bias)
        if self.bert:
            weights += [self.dense, self.dense_bias]
        if targets is None:
            return self._logits([x[:, -1:] for x in streams], *weights)[:, 0]

        def score(targets: Tensor, *rest: Tensor) -> Tensor:
            logits = self._logits(rest[: len(streams)], *rest[len(streams) :])
            nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
            return torch.stack([nats, (logits.argmax(-1) == targets).to(nats.dtype)], dim=-1)

        nats, correct = tiled(score, (targets, *streams), weights, self.tiles).unbind(-1)
        return nats, correct.bool()

    def _logits(
        self,
        streams: Sequence[Tensor],
        gain: Tensor,
        shift: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        dense: Tensor | None = None,
        dense_bias: Tensor | None = None,
    ) -> Tensor:
        if dense is not None:
            (x,) = streams
            x = F.gelu(F.linear(x.to(dense.dtype), dense, dense_bias)).float()
        elif self.tied:
            x = torch.stack(list(streams)).mean(0)
            gain, shift = gain * weight.shape[1] ** -0.5, shift * weight.shape[1] ** -0.5
        else:
            x = torch.cat(list(streams), dim=-1)
        hidden = F.layer_norm(x, x.shape[-1:], gain.to(x.dtype), shift.to(x.dtype), self.eps)
        return F.linear(hidden.to(weight.dtype), weight, bias).float()
