"""Order of tokens by document, in which chunks and distances count real tokens alone."""

import torch
from torch import Tensor

_LAST = torch.iinfo(torch.int32).max  # the document of padding while documents are sorted
PADDING = -1
"""The document of padding and of empty places."""


def by_document(q: Tensor, key_mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Tokens of q (B, H, L, D) in the order of (document, position), padding last, (B, L) int64, and the sorted
    documents, (B, L) int32; None and None where there is one document without padding.
    """
    if key_mask is None and segments is None:
        return None, None
    document = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int32, device=q.device)
    if segments is not None:
        document = segments.to(torch.int32)
    if key_mask is not None:
        document = document.masked_fill(~key_mask, _LAST)
    document, order = torch.sort(document, dim=-1, stable=True)
    return order, document.masked_fill(document == _LAST, PADDING)
