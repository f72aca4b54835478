"""Iterate over the documents of a batch, without padding, for operations that treat each document separately."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import AttentionInputs
from megasparse.ops.cluster_attention import ClusterAttentionSpec, ClusterIndices, cluster_attention


class Document(NamedTuple):
    """Tokens of a document. rows: rows of the batch. tokens: their positions, (n,) int64 in order; None for all."""

    rows: slice
    tokens: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Select (rows, H, n, ...) from x (B, H, L, ...)."""
        x = x[self.rows]
        return x if self.tokens is None else x.index_select(2, self.tokens)


def documents(key_mask: Tensor | None, segments: Tensor | None) -> Iterator[Document]:
    """Yield the documents of a batch, the whole batch if both are None; on the meta device each row. Synchronises with
    the GPU. key_mask: (B, L) bool, true for real tokens. segments: (B, L) document numbers.
    """
    if key_mask is None and segments is None:
        yield Document(slice(None), None)
        return
    mask = key_mask if segments is None else segments
    assert mask is not None
    if mask.is_meta:
        every_token = torch.arange(mask.shape[1], device=mask.device)
        yield from (Document(slice(row, row + 1), every_token) for row in range(len(mask)))
        return
    numbers = torch.zeros(mask.shape, dtype=torch.int64, device="cpu") if segments is None else segments.cpu()
    real = torch.ones(mask.shape, dtype=torch.bool, device="cpu") if key_mask is None else key_mask.cpu()
    for row in range(len(mask)):
        for number in numbers[row, real[row]].unique():
            tokens = (real[row] & (numbers[row] == number)).nonzero().squeeze(-1)
            yield Document(slice(row, row + 1), tokens.to(mask.device))


def attend_each(inputs: AttentionInputs, attend: Callable[[AttentionInputs], Tensor]) -> Tensor:
    """Return attend(heads) -> (B, H, L, D), of each document separately if rows contain several or start with padding:
    positions count from its first real token. Padding gets 0.
    """
    mask = inputs.key_mask
    # A mask on the meta device contains no values; memory estimates assume sequences without padding.
    if inputs.segments is None and (mask is None or mask.is_meta or bool((mask[:, :-1] >= mask[:, 1:]).all())):
        return inputs.without_padding(attend(inputs))
    parts = []
    slots = []
    batch, heads, length, head_dim = inputs.q.shape
    for document in documents(mask, inputs.segments):
        q, k, v = (document.take(x) for x in inputs[:3])
        dropout = inputs.dropout
        if dropout is not None:
            dropout = replace(dropout, queries=document.take(dropout.queries))
        document_inputs = inputs._replace(q=q, k=k, v=v, key_mask=None, segments=None, dropout=dropout)
        parts.append(attend(document_inputs)[0].transpose(0, 1))  # (n, H, D)
        slots.append(document.rows.start * length + document.tokens)
    if not parts:
        return inputs.q.masked_fill(torch.ones_like(inputs.q, dtype=torch.bool), 0.0)  # keep a zero gradient
    out = inputs.q.new_zeros(batch * length, heads, head_dim).index_copy(0, torch.cat(slots), torch.cat(parts))
    return out.view(batch, length, heads, head_dim).transpose(1, 2)


def padding_apart(inputs: AttentionInputs) -> AttentionInputs:
    """Return inputs with documents if they have padding, so that `attend_each` computes sequences without it."""
    if inputs.key_mask is None or inputs.segments is not None:
        return inputs
    return inputs._replace(segments=torch.zeros_like(inputs.key_mask, dtype=torch.int64))


def clusters_by_document(inputs: AttentionInputs, choose: Callable[[Document], ClusterIndices]) -> ClusterIndices:
    """Return the clusters of all documents, concatenated, int32. choose: clusters of one document, as token numbers."""
    if inputs.key_mask is None and inputs.segments is None:
        queries, keys = choose(Document(slice(None), None))
        return queries.to(torch.int32), keys.to(torch.int32)
    batch, count = inputs.q.shape[:2]
    empty = torch.full((count, 1, 1), -1, dtype=torch.int64, device=inputs.q.device)
    rows: list[list[ClusterIndices]] = [[(empty, empty)] for _ in range(batch)]
    for document in documents(inputs.key_mask, inputs.segments):
        assert document.tokens is not None
        queries, keys = choose(document)
        numbers = F.pad(document.tokens, (0, 1), value=-1)  # index −1, an empty slot, maps to −1
        rows[document.rows.start].append((numbers[queries[0]], numbers[keys[0]]))
    return _side_by_side([[part[0] for part in row] for row in rows]), _side_by_side([[p[1] for p in r] for r in rows])


def _side_by_side(rows: list[list[Tensor]]) -> Tensor:
    """Concatenate each row's (H, W, M) clusters to one (B, H, ΣW, M), padded with empty slots."""
    size = max(part.shape[-1] for row in rows for part in row)
    joined = [torch.cat([F.pad(part, (0, size - part.shape[-1]), value=-1) for part in row], dim=1) for row in rows]
    clusters = max(row.shape[1] for row in joined)
    full = [F.pad(row, (0, 0, 0, clusters - row.shape[1]), value=-1) for row in joined]
    return torch.stack(full).to(torch.int32)


def attend_in_clusters(
    inputs: AttentionInputs, lists: ClusterIndices, scale: float, count_clusters: bool
) -> tuple[Tensor, Tensor]:
    """Return attention (B, H, L, D) inside clusters, and the share of real queries that are in no cluster."""
    spec = ClusterAttentionSpec(inputs.causal, scale, count_clusters)
    out, lse = cluster_attention(inputs.q, inputs.k, inputs.v, lists, spec, dropout=inputs.dropout)
    real = torch.ones_like(lse, dtype=torch.bool)
    if inputs.key_mask is not None:
        real = inputs.key_mask[:, None].expand_as(lse)
    return out, (lse.isneginf() & real).sum() / real.sum().clamp_min(1)
