"""An encoder–decoder that reads a text and learns to predict another. B batch, S source length, E width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from megasparse.attention.contract import Targets
from megasparse.attention.cross import Source
from megasparse.config.parts import encoder_part
from megasparse.config.schema import ModelConfig
from megasparse.evaluation.beam import BeamSettings, search_with
from megasparse.model.encoder_decoder import EncoderDecoder
from megasparse.model.stack import mean_cost
from megasparse.ops.random import RngContext
from megasparse.tasks.backbones import Backbone, attention_settings
from megasparse.tasks.batches import Movable, Padded


@dataclass(frozen=True)
class Texts(Movable):
    """A micro-batch of sources and targets."""

    source: Padded
    target: Padded | None
    """Targets; None where some example has none."""
    rule: BeamSettings
    """Settings of the search for answers."""

    def numel(self) -> int:
        """Number of tokens read and predicted, without padding."""
        target = 0 if self.target is None else int(self.target.lengths.sum())
        return int(self.source.lengths.sum()) + target


def side_by_side(sequences: Sequence[np.ndarray]) -> Padded:
    """Sequences of token ids, at least 1 each, padded to the longest."""
    tokens = pad_sequence([torch.from_numpy(each) for each in sequences], batch_first=True)
    return Padded(tokens, torch.zeros_like(tokens), torch.tensor([len(each) for each in sequences]))


class SequenceToSequenceBody(Backbone):
    """One of our encoder–decoders, whole: all weights of a checkpoint of its pretraining."""

    causal = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.source is not None
        self.stack = EncoderDecoder(config)
        self.width, self.vocabulary, self.longest = config.d_model, config.vocabulary, config.source.length
        self.task_weight = self.stack.task_weight

    def forward(
        self, read: Padded, rng: RngContext, classes: Tensor | None, answer: Targets | None = None
    ) -> tuple[Tensor, Tensor]:
        """The encoder's states (B, S, E) fp32 of the sources, and the sum of its mechanisms' losses. answer: the
        targets' tokens, from which the encoder's sketch learns.
        """
        states, auxiliary, _ = self.stack.encoder(read.tokens, rng, read.mask, answer)
        return states, auxiliary

    def attention(self) -> dict[str, Any]:
        """The settings of both sides; the decoder's attention to the source is `source`'s `cross_attention`."""
        config = self.stack.config
        assert config.source is not None
        own = {**attention_settings(encoder_part(config)), "cross_attention": config.source.cross_attention}
        return {**attention_settings(config), "source": own}


class TextModel(nn.Module):
    """−ln p(target | source), summed over the target's tokens, its end among them (Vaswani et al. 2017)."""

    varying_token_counts = True

    def __init__(self, body: SequenceToSequenceBody):
        super().__init__()
        self.body = body

    def count_scored(self, batch: Texts) -> Tensor:
        """Number of tokens of the targets."""
        assert batch.target is not None
        return batch.target.lengths.sum()

    def forward(self, batch: Texts, rng: RngContext, divisor: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective, mean nats of a target token (in training with label smoothing) plus auxiliary losses; and the
        statistics of tasks/form.py, a token weighing 1, and `accuracy`. Without targets the loss is 0.

        Out of training `predicted` has the token ids (n,) of each example's best hypothesis, without its end; a single
        NaN where the model's probabilities are not finite.
        """
        stack = self.body.stack
        answer = None if batch.target is None else Targets(batch.target.tokens, batch.target.mask, answer=True)
        states, auxiliary = self.body(batch.source, rng, None, answer)
        memory = Source(states, batch.source.mask)
        loss = torch.zeros((), device=states.device)
        found: dict[str, Any] = {"nats": loss, "tokens": loss}
        if batch.target is not None:
            target = batch.target
            scores, cost, own, statistics = stack.score_targets(target.tokens, rng, target.mask, memory)
            loss, predicted = mean_cost(scores, cost, divisor)
            auxiliary, found = auxiliary + own, statistics | predicted
            if not rng.training:
                found["costs"] = torch.where(scores.scored, scores.nats, 0.0).sum(1)
                found["weights"] = target.lengths.float()
        if not rng.training:
            found["predicted"] = self._best(memory, rng, batch.rule)
        return self.body.task_weight * loss + auxiliary, found

    def _best(self, memory: Source, rng: RngContext, rule: BeamSettings) -> list[Tensor]:
        stack = self.body.stack
        nothing = torch.zeros(len(memory.states), 0, dtype=torch.int64, device=memory.states.device)
        best = search_with(stack, nothing, stack.cache_beside(memory, rng), rule)
        return [torch.tensor(each[0].tokens if each else [math.nan], dtype=torch.float64) for each in best]
