"""Batches whose sequences are padded on either side. B batch, n length of the input, E width."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Rows:
    """A batch with each row's real tokens moved to its beginning, and the way back."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None, padding: int = 0):
        """Sort real tokens to the front. input_ids: (B, n). attention_mask: (B, n), 0 for padding, or None where
        there is none. padding: the token that `tokens` has there. Raises ValueError for a row of padding alone.
        """
        self.padded = attention_mask is not None and not bool((attention_mask != 0).all())
        if not self.padded or attention_mask is None:
            self.tokens, self.real, self.lengths = input_ids, None, [input_ids.shape[1]] * len(input_ids)
            return
        real = attention_mask != 0
        if not bool(real.any(1).all()):
            raise ValueError("attention_mask: a sequence is padding alone")
        self._order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        self.lengths = [int(length) for length in real.sum(1)]
        self.real = real.gather(1, self._order)
        self.tokens = input_ids.gather(1, self._order).masked_fill(~self.real, padding)

    def align(self, values: Tensor) -> Tensor:
        """(B, n) or (B, n, E) in the order of `tokens`."""
        return values.gather(1, self._like(values, self._order)) if self.padded else values

    def restore(self, values: Tensor) -> Tensor:
        """(B, n, E) in the order of the input."""
        return values.gather(1, self._like(values, self._order.argsort(dim=1))) if self.padded else values

    def key_mask(self, start: bool) -> Tensor | None:
        """The real positions, in a decoder behind the start: (B, n), or (B, n + 1)."""
        return F.pad(self.real, (1, 0), value=True) if start and self.real is not None else self.real

    @staticmethod
    def _like(values: Tensor, order: Tensor) -> Tensor:
        return order if values.dim() == 2 else order.unsqueeze(-1).expand(values.shape)
