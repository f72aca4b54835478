"""The bidirectional encoder, pretrained by masked tokens (Devlin et al. 2018) and sentence order (Lan et al. 2020).

B batch, L length, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megasparse.attention.cross import EncoderOutput
from megasparse.attention.heads import Padding
from megasparse.attention.sequence_part import SequencePart
from megasparse.config.schema import ModelConfig
from megasparse.model.branch import Streams, mean_stream
from megasparse.model.stack import Scored, Transformer, padding_of
from megasparse.ops.normalize import Norm
from megasparse.ops.random import RngContext, random_bits

MASKED = 0.8
REPLACED = 0.1
"""Shares of the tokens to predict that are replaced by the mask token and by a random token; the rest are unchanged."""


class OrderScores(NamedTuple):
    """Quality of the predicted order of each pair in a batch: (B,) each."""

    nats: Tensor
    """−ln p(true order), fp32."""
    correct: Tensor
    """True if the model considered the true order more likely."""
    scored: Tensor
    """True if the sequence is a pair."""


class SentenceOrder(nn.Module):
    """Head that predicts whether two segments were swapped. Sequences are [begin] A [separator] B [separator] and
    padding; half of them become [begin] B [separator] A [separator], as a function of (seed, step, global sample).

    The mean of the streams' first position, normalised unless the style is bert, goes through BERT's pooler, tanh(D·x +
    d), to two logits. A sequence without two separators is unchanged and not scored.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.sentence_order is not None
        self.separator = config.sentence_order.separator
        self.norm = Norm(config.norm, config.d_model, config.norm_eps) if config.style != "bert" else None
        self.dense = nn.Parameter(torch.empty(config.d_model, config.d_model))
        self.dense_bias = nn.Parameter(torch.zeros(config.d_model))
        self.weight = nn.Parameter(torch.empty(2, config.d_model))
        self.bias = nn.Parameter(torch.zeros(2))

    def arrange(self, tokens: Tensor, rng: RngContext) -> Tensor:
        """Swap the segments of some pairs. tokens: (B, L) in order. Separators stay after a segment."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        ends = tokens == self.separator
        count = ends.cumsum(1)
        first, second = ((ends & (count == number)).long().argmax(1, keepdim=True) for number in (1, 2))
        # Rotate positions 1 to `second` until the segment after the first separator is in front.
        rotated = 1 + (position - 1 + first) % second.clamp_min(1)
        moved = self._swapped(tokens, rng)[:, None] & (position >= 1) & (position <= second)
        return tokens.gather(1, torch.where(moved, rotated, position))

    def forward(self, streams: Streams, tokens: Tensor, rng: RngContext) -> OrderScores:
        """Predict the order of each pair in `tokens`, as returned by `arrange`."""
        x = mean_stream(tuple(stream[:, 0] for stream in streams))
        if self.norm is not None:
            x = self.norm(x)
        pooled = torch.tanh(F.linear(x.to(self.dense.dtype), self.dense, self.dense_bias))
        logits = F.linear(pooled, self.weight, self.bias).float()
        target = self._swapped(tokens, rng).long()
        nats = F.cross_entropy(logits, target, reduction="none")
        return OrderScores(nats, logits.argmax(-1) == target, self._is_pair(tokens))

    def loss(self, scores: OrderScores) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean nats per sequence, and statistics averaged over the batch's pairs."""
        total = torch.where(scores.scored, scores.nats, 0.0).sum()
        count = scores.scored.sum().clamp_min(1)
        return total / len(scores.nats), {
            "sentence_order_nats": total.detach() / count,
            "sentence_order_accuracy": (scores.correct & scores.scored).sum() / count,
        }

    def _swapped(self, tokens: Tensor, rng: RngContext) -> Tensor:
        """Return which pairs are swapped, (B,) bool."""
        bits = random_bits(rng.key(-1, "sentence order"), rng.samples.to(tokens.device), 1)
        return (bits[:, 0] < 0) & self._is_pair(tokens)

    def _is_pair(self, tokens: Tensor) -> Tensor:
        return (tokens == self.separator).sum(1) >= 2


class Encoder(Transformer):
    """Bidirectional model that predicts some of the real tokens, most of them replaced by a mask token.

    The choice is a function of (seed, step, global sample, position), in evaluation of a fixed step. With
    model.sentence_order, half the sequences have swapped segments, and the model predicts which ones.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.sentence_order = SentenceOrder(config) if config.sentence_order else None
        self.register_buffer("word_starts", None, persistent=False)
        self.word_starts: Tensor | None

    def set_word_starts(self, starts: Tensor) -> None:
        """Set the ids that start a word, for masking.whole_words, before the first forward. starts: bool (n,), a
        tokenizer's `word_starts`; ids from n on start no word.
        """
        padded = torch.zeros(self.config.vocabulary, dtype=torch.bool)
        count = min(len(padded), len(starts))
        padded[:count] = starts[:count]
        self.word_starts = padded.to(self.embedding.weight.device)

    def prepare_inputs(self, tokens: Tensor, rng: RngContext, padding: Padding) -> tuple[Tensor, Tensor]:
        """Return the tokens with some of them hidden, and a mask of the tokens to predict.

        Exactly masking.rate of each sequence's tokens (rounded, at least one) are predicted, so that every sequence has
        the same weight in the loss. Padding, separators, and everything before the first segment of a pair are
        excluded. With masking.whole_words all tokens of a word are hidden together; the last word is cut to keep the
        number exact.
        """
        masking = self.config.masking
        part = padding.part  # the choice depends on all tokens of a sequence
        tokens = padding.part.gather(tokens, 1)
        key = rng.key(-1, "masked tokens")
        rows = rng.at(0).rows(tokens.shape[1], tokens.device)
        order, fate, other = (random_bits(key, rows, 3).to(torch.int64) + 2**31).unbind(-1)  # uniform below 2^32
        maskable = self._maskable(tokens, padding)
        if masking.whole_words:
            order = order.gather(1, self._first_of_word(tokens, maskable))
        rank = order.masked_fill(~maskable, 2**32).argsort(dim=-1, stable=True).argsort(dim=-1)
        scored = (rank < self._count(maskable)) & maskable
        hidden = torch.where(fate < (MASKED + REPLACED) * 2**32, self._replacements(other), tokens)
        hidden = torch.where(fate < MASKED * 2**32, masking.token, hidden)
        return part.local_part(torch.where(scored, hidden, tokens), 1), part.local_part(scored, 1)

    def count_scored(self, tokens: Tensor, sequence: ProcessGroup | None = None) -> Tensor:
        part = SequencePart.of(sequence)
        tokens = part.gather(tokens, 1)
        return self._count(self._maskable(tokens, padding_of(tokens, self.config))).sum() * (part.rank == 0)

    @torch.no_grad()
    def sentence_order_scores(self, tokens: Tensor, rng: RngContext) -> OrderScores:
        """Score the predicted order of each pair in tokens (B, L), given in the original order."""
        assert self.sentence_order is not None, "only a model with model.sentence_order predicts it"
        padding = padding_of(tokens, self.config)
        tokens = self.sentence_order.arrange(tokens, rng)
        streams, _, _ = self.streams(self.prepare_inputs(tokens, rng, padding)[0], rng, padding)
        return self.sentence_order(streams, tokens, rng)

    def score(self, tokens: Tensor, rng: RngContext, padding: Padding, source: EncoderOutput | None = None) -> Scored:
        if self.sentence_order is not None:
            tokens = self.sentence_order.arrange(tokens, rng)
        return super().score(tokens, rng, padding)

    def _extra_loss(
        self, streams: Streams, tokens: Tensor, rng: RngContext
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        if self.sentence_order is None:
            return super()._extra_loss(streams, tokens, rng)
        loss, statistics = self.sentence_order.loss(self.sentence_order(streams, tokens, rng))
        return self.task_weight * loss, statistics

    def _maskable(self, tokens: Tensor, padding: Padding) -> Tensor:
        """Return which tokens may be hidden, (B, L)."""
        separator = self.config.document_separator
        key_mask = padding.key_mask
        maskable = torch.ones_like(tokens, dtype=torch.bool) if key_mask is None else key_mask
        if separator is not None:
            maskable = maskable & (tokens != separator)
        if self.sentence_order is not None:
            maskable = maskable & (tokens != self.sentence_order.separator)
            maskable[:, 0] = False
        return maskable

    def _count(self, maskable: Tensor) -> Tensor:
        """Return the number of tokens to predict in each sequence, (B, 1)."""
        most = maskable.sum(-1, keepdim=True)
        return (self.config.masking.rate * most).round().long().clamp_min(1).minimum(most)

    def _first_of_word(self, tokens: Tensor, maskable: Tensor) -> Tensor:
        """Return the position of the first token of each token's word, (B, L)."""
        if self.word_starts is None:
            raise RuntimeError("masking.whole_words: call set_word_starts with the tokenizer's word_starts first")
        begins = self.word_starts[tokens] | ~maskable
        begins[:, 1:] |= ~maskable[:, :-1]
        begins[:, 0] = True
        return torch.where(begins, torch.arange(tokens.shape[1], device=tokens.device), 0).cummax(dim=1).values

    def _replacements(self, uniform: Tensor) -> Tensor:
        """Return a random id for each number below 2^32, excluding special tokens."""
        order = self.config.sentence_order
        separators = (self.config.document_separator, order.separator if order else None)
        special = (self.config.masking.token, self.config.padding_token, *separators)
        reserved = sorted({token for token in special if token is not None})
        random = uniform * (self.config.vocabulary - len(reserved)) >> 32
        for token in reserved:
            random = random + (random >= token)
        return random
