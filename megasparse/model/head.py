"""The output: final norm, projection to the vocabulary, and the score of every token. B batch, L length, E d_model, V
vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.config.schema import ModelConfig
from megasparse.model.block import Streams
from megasparse.ops.tiled import tiled


class OutputHead(nn.Module):
    """softmax(W·norm(streams)).

    Untied, a reversible stack's two streams are normalised and projected side by side, 2·E wide, as in the published
    Reformer; tied, their mean is, against the token embedding / √E.
    """

    def __init__(self, config: ModelConfig, embedding: nn.Parameter):
        """embedding: (V, E), a tied head's weight too."""
        super().__init__()
        streams = 2 if config.blocks == "reversible" else 1
        self.tiles, self.tied = config.loss_tiles, config.tied_embeddings
        width = config.d_model if self.tied else streams * config.d_model
        # Parameters of this very module: under ZeRO 3 its call gathers them once for all tiles.
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.norm_bias = nn.Parameter(torch.zeros(width))
        self.weight = embedding if self.tied else nn.Parameter(torch.empty(config.vocabulary, width))

    def forward(self, streams: Streams, targets: Tensor | None) -> tuple[Tensor, Tensor] | Tensor:
        """−ln p of every target, (B, L) fp32, and whether it was the likeliest, (B, L) bool; without targets the
        logits of the last position, (B, V) fp32.

        Norm, logits and softmax exist for L/tiles positions at a time, forward and backward.
        """
        weights = (self.norm_weight, self.norm_bias, self.weight)
        if targets is None:
            return self._logits([x[:, -1:] for x in streams], *weights)[:, 0]

        def score(targets: Tensor, *rest: Tensor) -> Tensor:
            logits = self._logits(rest[:-3], *rest[-3:])
            nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
            return torch.stack([nats, (logits.argmax(-1) == targets).to(nats.dtype)], dim=-1)

        nats, correct = tiled(score, (targets, *streams), weights, self.tiles).unbind(-1)
        return nats, correct.bool()

    def _logits(self, streams: Streams | list[Tensor], gain: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        if self.tied:
            x = torch.stack(list(streams)).mean(0)
            gain, bias = gain * weight.shape[1] ** -0.5, bias * weight.shape[1] ** -0.5
        else:
            x = torch.cat(list(streams), dim=-1)
        hidden = F.layer_norm(x, x.shape[-1:], gain.to(x.dtype), bias.to(x.dtype))
        return F.linear(hidden.to(weight.dtype), weight).float()
