"""Predicting whether segments stand in order (ALBERT, Lan et al. 2020). B batch, L length, E d_model."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.norm import Norm
from megasparse.config.schema import ModelConfig
from megasparse.model.block import Streams, mean_stream
from megasparse.ops.random import RngContext, random_bits


class OrderScores(NamedTuple):
    """How well a model predicts the order of each pair of a batch: (B,) each."""

    nats: Tensor
    """−ln p(what was done), fp32."""
    correct: Tensor
    """Whether the model held it to be the likelier."""
    scored: Tensor
    """Whether the sequence is a pair."""


class SentenceOrder(nn.Module):
    """Sequences are [begin] A [separator] B [separator] and padding, of which half become [begin] B [separator] A
    [separator]: which ones is a function of (seed, step, global sample).

    They are predicted from the first position of the last layer's streams: their mean goes through BERT's pooler,
    tanh(D·x + d), to two logits. A model that is not of style bert normalises it before. A sequence without two
    separators stays as it is and is not scored.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.sentence_order is not None
        self.separator, self.weight_of_loss = config.sentence_order.separator, config.sentence_order.weight
        self.norm = Norm(config) if config.style != "bert" else None
        self.dense = nn.Parameter(torch.empty(config.d_model, config.d_model))
        self.dense_bias = nn.Parameter(torch.zeros(config.d_model))
        self.weight = nn.Parameter(torch.empty(2, config.d_model))
        self.bias = nn.Parameter(torch.zeros(2))

    def arrange(self, tokens: Tensor, rng: RngContext) -> Tensor:
        """Swap some pairs of segments. tokens: (B, L) in order. Each separator stays behind a segment."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        ends = tokens == self.separator
        count = ends.cumsum(1)
        first, second = ((ends & (count == number)).long().argmax(1, keepdim=True) for number in (1, 2))
        # The positions 1 to `second` are turned round until what was behind the first separator comes first.
        turned = 1 + (position - 1 + first) % second.clamp_min(1)
        moved = self._swapped(tokens, rng)[:, None] & (position >= 1) & (position <= second)
        return tokens.gather(1, torch.where(moved, turned, position))

    def forward(self, streams: Streams, tokens: Tensor, rng: RngContext) -> OrderScores:
        """Predict the order of each pair. streams: of `tokens` as `arrange` returned them."""
        x = mean_stream(tuple(stream[:, 0] for stream in streams))
        if self.norm is not None:
            x = self.norm(x)
        pooled = torch.tanh(F.linear(x.to(self.dense.dtype), self.dense, self.dense_bias))
        logits = F.linear(pooled, self.weight, self.bias).float()
        wanted = self._swapped(tokens, rng).long()
        nats = F.cross_entropy(logits, wanted, reduction="none")
        return OrderScores(nats, logits.argmax(-1) == wanted, self._is_pair(tokens))

    def loss(self, scores: OrderScores) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted mean nats a sequence, to add to the objective, and statistics, means over the batch's pairs."""
        total, count = torch.where(scores.scored, scores.nats, 0.0).sum(), scores.scored.sum().clamp_min(1)
        return self.weight_of_loss * total / len(scores.nats), {
            "sentence_order_nats": total.detach() / count,
            "sentence_order_accuracy": (scores.correct & scores.scored).sum() / count,
        }

    def _swapped(self, tokens: Tensor, rng: RngContext) -> Tensor:
        """Whether each sequence is in the other order than its document's, (B,) bool."""
        bits = random_bits(rng.key(-1, "sentence order"), rng.samples.to(tokens.device), 1)
        return (bits[:, 0] < 0) & self._is_pair(tokens)

    def _is_pair(self, tokens: Tensor) -> Tensor:
        return (tokens == self.separator).sum(1) >= 2
