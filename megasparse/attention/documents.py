"""The documents of a batch, one by one and without padding, for what must treat each as if it were alone.

B batch, H heads, L length, n tokens of a document.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Document(NamedTuple):
    """Tokens of a batch that belong to one document. rows: of the batch. tokens: their positions, (n,) int64 in order,
    or None for all of them.
    """

    rows: slice
    tokens: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """(rows, H, n, ...) of x (B, H, L, ...)."""
        x = x[self.rows]
        return x if self.tokens is None else x.index_select(2, self.tokens)


def begins_with_real_tokens(key_mask: Tensor | None, segments: Tensor | None) -> bool:
    """Whether every row is one document with its padding, if any, behind it: positions are then those of the row."""
    if segments is not None:
        return False
    return key_mask is None or bool((key_mask[:, :-1] >= key_mask[:, 1:]).all())


def documents(key_mask: Tensor | None, segments: Tensor | None) -> Iterator[Document]:
    """Yield the documents of a batch. key_mask: (B, L) bool, true for real tokens. segments: (B, L) document numbers.
    With neither, the whole batch comes as one: its rows are alike and apart.
    """
    if key_mask is None and segments is None:
        yield Document(slice(None), None)
        return
    real = torch.ones_like(segments, dtype=torch.bool) if key_mask is None else key_mask  # type: ignore[arg-type]
    for row in range(len(real)):
        tokens = real[row].nonzero().squeeze(-1)
        numbers = torch.zeros_like(tokens) if segments is None else segments[row, tokens]
        for number in numbers.unique():
            yield Document(slice(row, row + 1), tokens[numbers == number])
