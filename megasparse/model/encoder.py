"""The bidirectional encoder, pretrained by masked tokens (Devlin et al. 2018) and sentence order (Lan et al. 2020).

B batch, L length, V vocabulary.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasparse.attention.heads import Padding
from megasparse.attention.sequence_part import SequencePart
from megasparse.config.schema import ModelConfig
from megasparse.model.block import Streams
from megasparse.model.padding import padding_of
from megasparse.model.sentence_order import OrderScores, SentenceOrder
from megasparse.model.stack import Scored, Transformer
from megasparse.ops.random import RngContext, random_bits

MASKED, REPLACED = 0.8, 0.1
"""Shares of the tokens to predict that become the mask token and a random token; the rest stay as they are."""


class Encoder(Transformer):
    """Every token sees both sides. It predicts a part of the real tokens, most of them hidden behind a
    mask token.

    Which ones is a function of (seed, step, global sample, position); evaluation fixes the step, so it predicts the
    same tokens each time. With model.sentence_order half the sequences have their two segments swapped, and the model
    predicts which ones.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.sentence_order = SentenceOrder(config) if config.sentence_order else None
        self.register_buffer("word_starts", None, persistent=False)
        self.word_starts: Tensor | None

    def set_word_starts(self, starts: Tensor) -> None:
        """With masking.whole_words, before anything is masked: which ids begin a word, bool (n,) as a tokenizer's
        `word_starts` has them. Ids from n on begin none.
        """
        own = torch.zeros(self.config.vocabulary, dtype=torch.bool)
        count = min(len(own), len(starts))
        own[:count] = starts[:count]
        self.word_starts = own.to(self.embedding.weight.device)

    def prepare_inputs(self, tokens: Tensor, rng: RngContext, padding: Padding) -> tuple[Tensor, Tensor]:
        """The tokens with some of them hidden, and which ones the model has to predict.

        Exactly masking.rate of each sequence's tokens, rounded, and at least one: so every sequence weighs the same in
        the loss, however they are shared out among micro-batches and ranks. Padding and separators, and what stands
        before the first segment of a pair, do not count and are never hidden. With masking.whole_words all tokens of a
        word are hidden together, but for the last word taken, which is cut so that the number is the same.
        """
        masking = self.config.masking
        part, tokens = padding.part, padding.part.gather(tokens, 1)  # whose number and order decide
        key, rows = rng.key(-1, "masked tokens"), rng.at(0).rows(tokens.shape[1], tokens.device)
        order, fate, other = (random_bits(key, rows, 3).to(torch.int64) + 2**31).unbind(-1)  # uniform below 2^32
        maskable = self._maskable(tokens, padding)
        if masking.whole_words:
            order = order.gather(1, self._first_of_word(tokens, maskable))
        rank = order.masked_fill(~maskable, 2**32).argsort(dim=-1, stable=True).argsort(dim=-1)
        scored = (rank < self._count(maskable)) & maskable
        hidden = torch.where(fate < (MASKED + REPLACED) * 2**32, self._replacements(other), tokens)
        hidden = torch.where(fate < MASKED * 2**32, masking.token, hidden)
        return part.own(torch.where(scored, hidden, tokens), 1), part.own(scored, 1)

    def count_scored(self, tokens: Tensor, sequence: ProcessGroup | None = None) -> Tensor:
        part = SequencePart.of(sequence)
        tokens = part.gather(tokens, 1)
        counts = self._count(self._maskable(tokens, padding_of(tokens, self.config)))
        return counts.sum() * (part.rank == 0)

    @torch.no_grad()
    def sentence_order_scores(self, tokens: Tensor, rng: RngContext, padding: Padding | None = None) -> OrderScores:
        """Return how well the model predicts the order of each pair of tokens (B, L), given in order."""
        assert self.sentence_order is not None, "only a model with model.sentence_order predicts it"
        padding = padding or padding_of(tokens, self.config)
        tokens = self.sentence_order.arrange(tokens, rng)
        streams, _, _ = self.streams(self.prepare_inputs(tokens, rng, padding)[0], rng, padding)
        return self.sentence_order(streams, tokens, rng)

    def _scores(self, tokens: Tensor, rng: RngContext, padding: Padding) -> Scored:
        if self.sentence_order is not None:
            tokens = self.sentence_order.arrange(tokens, rng)
        return super()._scores(tokens, rng, padding)

    def _extra_loss(
        self, streams: Streams, tokens: Tensor, rng: RngContext
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        if self.sentence_order is None:
            return super()._extra_loss(streams, tokens, rng)
        loss, statistics = self.sentence_order.loss(self.sentence_order(streams, tokens, rng))
        return self.task_weight * loss, statistics

    def _maskable(self, tokens: Tensor, padding: Padding) -> Tensor:
        """Which tokens may be hidden, (B, L)."""
        separator, key_mask = self.config.document_separator, padding.key_mask
        maskable = torch.ones_like(tokens, dtype=torch.bool) if key_mask is None else key_mask
        if separator is not None:
            maskable = maskable & (tokens != separator)
        if self.sentence_order is not None:
            maskable = maskable & (tokens != self.sentence_order.separator)
            maskable[:, 0] = False
        return maskable

    def _count(self, maskable: Tensor) -> Tensor:
        """Number of tokens to predict in each sequence, (B, 1)."""
        most = maskable.sum(-1, keepdim=True)
        return (self.config.masking.rate * most).round().long().clamp_min(1).minimum(most)

    def _first_of_word(self, tokens: Tensor, maskable: Tensor) -> Tensor:
        """The position at which each token's word begins, (B, L)."""
        if self.word_starts is None:
            raise RuntimeError("masking.whole_words: set_word_starts was not called with those of the tokenizer")
        begins = self.word_starts[tokens] | ~maskable
        begins[:, 1:] |= ~maskable[:, :-1]
        begins[:, 0] = True
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return torch.where(begins, positions, 0).cummax(dim=1).values

    def _replacements(self, uniform: Tensor) -> Tensor:
        """A random id for each number below 2^32: any but those that stand for something else than text."""
        order = self.config.sentence_order
        separators = (self.config.document_separator, order.separator if order else None)
        own = (self.config.masking.token, self.config.padding_token, *separators)
        reserved = sorted({token for token in own if token is not None})
        random = uniform * (self.config.vocabulary - len(reserved)) >> 32
        for token in reserved:
            random = random + (random >= token)
        return random
