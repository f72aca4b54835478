"""Attention of packed documents, each as if it were alone. B batch, H heads, L length, D head dim, n tokens of one."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megasparse.attention.contract import AttentionInputs
from megasparse.attention.documents import Document, begins_with_real_tokens, documents
from megasparse.ops.custom import custom


def attend_each(inputs: AttentionInputs, attend: Callable[[AttentionInputs], Tensor]) -> Tensor:
    """Return attend(heads) -> (B, H, L, D), for each document by itself where there are several, or padding before
    them.

    So what depends on positions counts them from the document's first real token. Padding gets 0. attend: a dataclass
    of tensors and constants, so that torch.compile has one operator for all documents, however many there are.
    """
    if inputs.key_mask is None and inputs.segments is None:
        return attend(inputs)
    return _by_document(inputs, attend)


@custom(lambda inputs, attend: inputs.q.new_empty(inputs.q.shape), copies=True)
def _by_document(inputs: AttentionInputs, attend: Callable[[AttentionInputs], Tensor]) -> Tensor:
    if begins_with_real_tokens(inputs.key_mask, inputs.segments):
        out = attend(inputs)
        return out if inputs.key_mask is None else out.masked_fill(~inputs.key_mask[:, None, :, None], 0.0)
    each = list(documents(inputs.key_mask, inputs.segments))
    return _join([attend(_alone(inputs, document)) for document in each], each, inputs.q)


def _alone(inputs: AttentionInputs, document: Document) -> AttentionInputs:
    """The heads of one document's real tokens, without masks."""
    q, k, v = (document.take(x) for x in (inputs.q, inputs.k, inputs.v))
    dropout = inputs.dropout
    if dropout is not None:
        dropout = replace(dropout, queries=document.take(dropout.queries))
    return inputs._replace(q=q, k=k, v=v, key_mask=None, segments=None, dropout=dropout)


def _join(parts: Sequence[Tensor], each: Sequence[Document], like: Tensor) -> Tensor:
    """Outputs (1, H, n, D) of documents at the places of their tokens, 0 elsewhere. like: (B, H, L, D)."""
    if not parts:
        return like.masked_fill(torch.ones_like(like, dtype=torch.bool), 0.0)  # has a gradient, 0, as ever
    batch, heads, length, head_dim = like.shape
    slots = torch.cat([document.rows.start * length + document.tokens for document in each])
    out = like.new_zeros(batch * length, heads, head_dim)
    out = out.index_copy(0, slots, torch.cat([part[0].transpose(0, 1) for part in parts]))
    return out.view(batch, length, heads, head_dim).transpose(1, 2)
