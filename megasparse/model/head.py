"""The output: final norm, projection to the vocabulary, and the score of every token. B batch, L length, E d_model, V
vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.config.schema import ModelConfig
from megasparse.model.block import Streams
from megasparse.ops.tiled import tiled


class TokenScores(NamedTuple):
    """How well each token was predicted from those before it."""

    nats: Tensor
    """−ln p(token), (B, L) fp32."""
    correct: Tensor
    """Whether the token was the likeliest one, (B, L) bool."""


class OutputHead(nn.Module):
    """softmax(W·norm(streams)).

    Untied, a reversible stack's two streams are normalised and projected side by side, 2·E wide, as in the published
    Reformer; tied, their mean is, against the token embedding / √E.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        streams = 2 if config.blocks == "reversible" else 1
        self.tiles, self.tied = config.loss_tiles, config.tied_embeddings
        width = config.d_model if self.tied else streams * config.d_model
        # Parameters of this very module: under ZeRO 3 its call gathers them once for all tiles.
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.norm_bias = nn.Parameter(torch.zeros(width))
        if not self.tied:
            self.weight = nn.Parameter(torch.empty(config.vocabulary, width))

    def forward(self, streams: Streams, targets: Tensor | None, embedding: Tensor | None) -> TokenScores | Tensor:
        """The scores of every target; without targets the logits of the last position, (B, V) fp32.

        Norm, logits and softmax exist for L/tiles positions at a time, forward and backward. embedding: (V, E), tied
        heads only.
        """
        weight = embedding if self.tied else self.weight
        assert weight is not None
        weights = (self.norm_weight, self.norm_bias, weight)
        if targets is None:
            return self._logits([x[:, -1:] for x in streams], *weights)[:, 0]

        def score(targets: Tensor, *rest: Tensor) -> Tensor:
            logits = self._logits(rest[:-3], *rest[-3:])
            nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
            return torch.stack([nats, (logits.argmax(-1) == targets).to(nats.dtype)], dim=-1)

        nats, correct = tiled(score, (targets, *streams), weights, self.tiles).unbind(-1)
        return TokenScores(nats, correct.bool())

    def _logits(self, streams: Streams | list[Tensor], gain: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        if self.tied:
            x = torch.stack(list(streams)).mean(0)
            gain, bias = gain * weight.shape[1] ** -0.5, bias * weight.shape[1] ** -0.5
        else:
            x = torch.cat(list(streams), dim=-1)
        hidden = F.layer_norm(x, x.shape[-1:], gain.to(x.dtype), bias.to(x.dtype))
        return F.linear(hidden.to(weight.dtype), weight).float()
