"""The documents of a batch, one by one and without padding, for what must treat each as if it were alone.

B batch, H heads, L length, n tokens of a document.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Document(NamedTuple):
    """Tokens of a document. rows: of the batch. tokens: their positions, (n,) int64 in order; None: all of them."""

    rows: slice
    tokens: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """(rows, H, n, ...) of x (B, H, L, ...)."""
        x = x[self.rows]
        return x if self.tokens is None else x.index_select(2, self.tokens)


def begins_with_real_tokens(key_mask: Tensor | None, segments: Tensor | None) -> bool:
    """Whether every row is one document with its padding, if any, behind it: positions are then those of the row.

    True for a key mask on the meta device, which has no values: memory is counted for sequences without padding.
    """
    if segments is not None:
        return False
    return key_mask is None or key_mask.is_meta or bool((key_mask[:, :-1] >= key_mask[:, 1:]).all())


def most_documents(segments: Tensor) -> int:
    """The largest number of documents in a row; 1 on the meta device."""
    return 1 if segments.is_meta else int(segments.max()) + 1


def documents(key_mask: Tensor | None, segments: Tensor | None) -> Iterator[Document]:
    """Yield the documents of a batch. key_mask: (B, L) bool, true for real tokens. segments: (B, L) document numbers.
    With neither, the whole batch comes as one: its rows are alike and apart. On the meta device a row is one document.

    A GPU is waited for once, when the masks are copied to the host, not at every document.
    """
    if key_mask is None and segments is None:
        yield Document(slice(None), None)
        return
    given = key_mask if segments is None else segments
    assert given is not None
    if given.is_meta:
        whole = torch.arange(given.shape[1], device=given.device)
        yield from (Document(slice(row, row + 1), whole) for row in range(len(given)))
        return
    numbers = torch.zeros(given.shape, dtype=torch.int64, device="cpu") if segments is None else segments.cpu()
    real = torch.ones(given.shape, dtype=torch.bool, device="cpu") if key_mask is None else key_mask.cpu()
    for row in range(len(given)):
        for number in numbers[row, real[row]].unique():
            tokens = (real[row] & (numbers[row] == number)).nonzero().squeeze(-1)
            yield Document(slice(row, row + 1), tokens.to(given.device))
