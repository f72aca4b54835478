"""Padded batches with the real tokens of each row at its start, and the caches of rows of several lengths.

B batch, n length of the input, E width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.model.decoder import DecodingCache


def refuse_unsupported(arguments: dict[str, Any]) -> None:
    """Raise ValueError for an argument that would be ignored."""
    for name in ("inputs_embeds", "decoder_inputs_embeds"):
        if arguments.get(name) is not None:
            raise ValueError(f"{name} is not supported: mechanisms may read token ids. Give input_ids")
    for name in ("output_hidden_states", "output_attentions"):
        if arguments.get(name):
            raise ValueError(f"{name} is not supported: layers do not keep them. Omit it")
    cache = arguments.get("cache", arguments.get("past_key_values"))
    if not isinstance(cache, MegasparseCache | None):
        problem = f"past_key_values is a {type(cache).__name__}, which this model cannot read"
        raise ValueError(f"{problem}. Omit it, or give the result of an earlier call")


def refuse_shape(name: str, mask: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ValueError if a mask of tokens is not of their shape (B, n)."""
    if mask is not None and mask.shape != torch.Size(shape):
        problem = f"{name} has shape {tuple(mask.shape)}, expected {tuple(shape)}"
        raise ValueError(f"{problem}: (batch, length) of the tokens, 0 for padding")


class AlignedRows:
    """A batch with the real tokens of each row moved to its start, and the inverse permutation."""

    def __init__(
        self, input_ids: Tensor, attention_mask: Tensor | None, padding: int = 0, positions: Tensor | None = None
    ):
        """Move real tokens of (B, n) to the front. padding: token to write there in `tokens`. positions: transformers'
        position_ids. Raises ValueError for a row of padding, or if positions do not count a row's real tokens from 0.
        """
        refuse_shape("attention_mask", attention_mask, input_ids.shape)
        if positions is not None:
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask != 0
            if bool(((positions != real.cumsum(-1) - 1) & (real != 0)).any()):
                problem = "position_ids restart or start late: this model counts the real tokens of a row from 0"
                raise ValueError(f"{problem}. Give one document per row, or train with model.document_separator")
        self.padded = attention_mask is not None and not bool((attention_mask != 0).all())
        if not self.padded or attention_mask is None:
            self.tokens, self.real, self.lengths = input_ids, None, [input_ids.shape[1]] * len(input_ids)
            return
        real = attention_mask != 0
        if not bool(real.any(1).all()):
            raise ValueError("attention_mask: a sequence contains only padding")
        self._order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        self.lengths = [int(length) for length in real.sum(1)]
        self.real = real.gather(1, self._order)
        self.tokens = input_ids.gather(1, self._order).masked_fill(~self.real, padding)

    def align(self, values: Tensor) -> Tensor:
        """Reorder (B, n) or (B, n, E) to the order of `tokens`."""
        return values.gather(1, self._like(values, self._order)) if self.padded else values

    def restore(self, values: Tensor) -> Tensor:
        """Reorder (B, n, E) to the order of the input."""
        return values.gather(1, self._like(values, self._order.argsort(dim=1))) if self.padded else values

    def key_mask(self, start: bool) -> Tensor | None:
        """Return the mask of real positions, (B, n), or with a decoder's start vector (B, n + 1)."""
        return F.pad(self.real, (1, 0), value=True) if start and self.real is not None else self.real

    @staticmethod
    def _like(values: Tensor, order: Tensor) -> Tensor:
        return order if values.dim() == 2 else order.unsqueeze(-1).expand(values.shape)


class MegasparseCache:
    """Cache for generation: one decoding cache for the rows of each length, as a cache stores a single position."""

    is_compileable = False

    def __init__(self, groups: list[tuple[Tensor, DecodingCache]], length: int):
        """groups: indices of rows, and their cache. length: number of cached columns."""
        self.groups, self.length = groups, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def crop(self, *args: Any) -> None:
        raise ValueError("the cache of this model cannot drop tokens, so it cannot draft. Omit assistant_model")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows `beam_idx`, (n,) indices of the current rows, with repetitions."""
        groups = []
        for numbers, cache in self.groups:
            same = beam_idx.to(numbers.device).unsqueeze(1) == numbers
            rows = same.any(1).nonzero().squeeze(1)
            if len(rows):
                cache.select(same[rows].to(torch.int8).argmax(1))
                groups.append((rows, cache))
        self.groups = groups
