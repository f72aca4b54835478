"""The bidirectional encoder, pretrained by masked tokens (Devlin et al. 2018). B batch, L length, V vocabulary."""

import torch
from torch import Tensor

from megasparse.attention.heads import Padding
from megasparse.model.stack import Transformer
from megasparse.ops.random import Draws, random_bits

MASKED, REPLACED = 0.8, 0.1
"""Of the tokens to tell, the parts that become the mask token and a random token; the rest stay as they are."""


class Encoder(Transformer):
    """Every token sees both sides. A part of the real tokens, most of them hidden behind a mask token, is to be told.

    Which ones is a function of (seed, step, global sample, position); evaluation fixes the step, so it asks the same
    tokens each time.
    """

    def task(self, tokens: Tensor, draws: Draws, padding: Padding) -> tuple[Tensor, Tensor]:
        """The tokens with some of them hidden, and which ones the model has to tell.

        Exactly masking.rate of each sequence's real tokens, rounded, and at least one: so every sequence weighs the
        same in the loss, however they are shared out among micro-batches and ranks.
        """
        masking, vocabulary = self.config.masking, self.config.vocabulary
        key, rows = draws.key(-1, "masked tokens"), draws.rows(tokens.shape[1], tokens.device)
        order, fate, other = (random_bits(key, rows, 3).to(torch.int64) + 2**31).unbind(-1)  # uniform below 2^32
        real = torch.ones_like(tokens, dtype=torch.bool) if padding.key_mask is None else padding.key_mask
        rank = order.masked_fill(~real, 2**32).argsort(dim=-1, stable=True).argsort(dim=-1)
        scored = (rank < self._count(real)) & real
        random = other * (vocabulary - 1) >> 32
        random = random + (random >= masking.token)  # any token but the mask token
        hidden = torch.where(fate < (MASKED + REPLACED) * 2**32, random, tokens)
        hidden = torch.where(fate < MASKED * 2**32, masking.token, hidden)
        return torch.where(scored, hidden, tokens), scored

    def count_scored(self, tokens: Tensor) -> Tensor:
        real = torch.ones_like(tokens, dtype=torch.bool)
        if self.config.padding_token is not None:
            real = tokens != self.config.padding_token
        return self._count(real).minimum(real.sum(-1, keepdim=True)).sum()

    def _count(self, real: Tensor) -> Tensor:
        """Tokens to tell in each sequence, (B, 1)."""
        return (self.config.masking.rate * real.sum(-1, keepdim=True)).round().clamp_min(1)
